//! Opens a model at a path. The error says where the model may be instead.

use std::path::Path;

use kiln_engine::{ComponentPaths, Field, Hint, Model, hint};
use kiln_weights::{MalformedFile, WeightSource};

use crate::error::{Error, Result};
use crate::{cache, ember};

/// Opens a model with some components from elsewhere. If the path is not a model, the error has a hint about where the
/// model may be.
pub fn open_with(path: &Path, components: &ComponentPaths) -> Result<Model> {
    let components = &ComponentPaths { fallback_models: cache::fallback_models(), ..components.clone() };
    let source = path.is_file().then(|| WeightSource::open(path).ok()).flatten();
    let model = match source.filter(WeightSource::is_delta) {
        Some(delta) => return open_delta(&delta, components),
        None => Model::open_with(Some(path), components),
    };
    let no_index = path.is_dir() && !path.join("model_index.json").is_file();
    let hint = match &model {
        Err(kiln_engine::Error::Model(error)) => match error {
            // A file that is a model, but damaged or of an unknown type, has a hint of its own.
            kiln_nn::Error::Weights(kiln_weights::Error::Malformed { problem, .. })
                if path.is_file() && !describes_tensors(problem) =>
            {
                Some(not_a_model(path))
            }
            kiln_nn::Error::Config { file, what } if no_index && file == path => {
                let several = what.starts_with("there are several");
                let either = || hint!["name one of them with ", Field::Model; "with ", Field::Transformer];
                Some(if several { either() } else { not_a_model(path) })
            }
            _ => None,
        },
        _ => None,
    };
    opened(model, &format!("opening the model `{}`", path.display()), hint)
}

/// Adds to an error what was being done, and a hint.
pub(crate) fn opened(model: kiln_engine::Result<Model>, doing: &str, hint: Option<Hint>) -> Result<Model> {
    model.map_err(|error| {
        let source = kiln_engine::Error::Context { doing: doing.to_owned(), source: Box::new(error) };
        Error::Open { source: Box::new(source), hint }
    })
}

/// Opens a model that is stored as its difference from the built-in one.
pub(crate) fn open_delta(delta: &WeightSource, components: &ComponentPaths) -> Result<Model> {
    let path = delta.path().display();
    if !components.is_empty() {
        let what = format!("`{path}` can't be combined with components of another model");
        return Err(Error::usage(what, "leave them out"));
    }
    let Some(ember) = ember::file() else {
        let what = format!("`{path}` is stored as its difference from Ember, which this build does not have");
        return Err(Error::missing(what, "build with the feature `ember`"));
    };
    let whole = delta.apply_delta(ember).map_err(kiln_engine::Error::from);
    let model = opened(whole.and_then(Model::from_packed), &format!("opening the model `{path}`"), None);
    model.map(ember::with_vocabulary)
}

/// Whether the header of a malformed file was read, so that it is a file of weights.
fn describes_tensors(problem: &MalformedFile) -> bool {
    use MalformedFile::{DType, GgufType, SplitGguf, Trailing, Truncated, UnknownGgufType};
    matches!(
        problem,
        DType { .. }
            | GgufType { .. }
            | UnknownGgufType { .. }
            | SplitGguf { .. }
            | Truncated { .. }
            | Trailing { .. }
    )
}

/// Returns a hint for a path that is not a model folder: where a model may be instead.
pub fn not_a_model(path: &Path) -> Hint {
    const INDEX: &str = "model_index.json";
    if path.is_file() {
        return "give a model folder (with model_index.json, transformer, text_encoder and vae), a FLUX.2 transformer as \
                safetensors or GGUF, or a model.toml"
            .into();
    }
    if let Some(parent) = path.parent().filter(|p| p.join(INDEX).is_file()) {
        return hint!["the model is the parent folder: ", Field::Model.to(parent.display().to_string())];
    }
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut models: Vec<_> = inside.filter(|p| p.join(INDEX).is_file()).collect();
    models.sort();
    match models.first() {
        Some(model) => hint!["there is a model inside it: ", Field::Model.to(model.display().to_string())],
        None => {
            "give the folder of a diffusers download of FLUX.2 [klein], with model_index.json, transformer, \
                 text_encoder and vae"
                .into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_model_near_a_wrong_path_is_suggested() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("klein");
        fs::create_dir_all(model.join("vae")).unwrap();
        fs::write(model.join("model_index.json"), "{}").unwrap();
        let name = model.display().to_string();
        let hint = |path: &Path| not_a_model(path).say(&|_, value| value.map(str::to_owned)).unwrap();
        assert!(hint(&model.join("vae")).ends_with(&name));
        assert!(hint(dir.path()).ends_with(&name));
        assert!(hint(&model.join("model_index.json")).contains("GGUF"));
        assert!(hint(Path::new("/no/where")).contains("diffusers download"));
    }
}
