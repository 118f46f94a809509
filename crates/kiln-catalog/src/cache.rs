//! Models in the Hugging Face cache.

use std::path::{Path, PathBuf};

use kiln_engine::ComponentPaths;
use kiln_family::{FAMILIES, text_encoders};
use kiln_hub::{Cache, HubSettings, InstalledModel, ModelName};

/// Finds a model in the cache by its hub name. Returns its short name and its path.
pub fn find_pulled(name: &Path) -> Option<(String, PathBuf)> {
    let name = ModelName::parse(name.to_str()?).ok()?;
    let cache = Cache::new(HubSettings::from_env()?.cache);
    let path = cache.find(&name).ok()??;
    Some((name.short(), path))
}

/// Returns whether `kiln pull` accepts the name.
pub(crate) fn can_be_pulled(name: &Path) -> bool {
    name.to_str().is_some_and(|text| ModelName::parse(text).is_ok())
}

/// Lists the models in the cache: those of a known family, or all.
pub fn installed(all: bool) -> Vec<InstalledModel> {
    let models = HubSettings::from_env().map_or(Vec::new(), |settings| Cache::new(settings.cache).list());
    models.into_iter().filter(|model| all || is_of_family(model)).collect()
}

/// Lists what in the cache can serve a transformer without its own text encoder or VAE: complete models, and files with one
/// component.
pub(crate) fn fallback_models() -> Vec<PathBuf> {
    let cached = installed(true).into_iter().filter(|model| !model.incomplete);
    let (models, others): (Vec<_>, Vec<_>) = cached.partition(|model| model.is_model);
    let models = models.into_iter().filter(is_of_family).map(|model| model.snapshot);
    let files = others.into_iter().flat_map(|repository| {
        let of_family = is_of_family(&repository);
        let repo = repository.repo.to_ascii_lowercase();
        let words = text_encoders().flat_map(|encoder| encoder.repository_words);
        let is_text_encoder = words.into_iter().any(|word| repo.contains(word));
        let is_component = move |path: &String| {
            is_text_encoder
                || of_family && ["text_encoder", "vae", "mistral"].iter().any(|part| path.contains(part))
        };
        let files = repository.weights.into_iter().filter(is_component);
        files.map(move |path| repository.snapshot.join(path)).collect::<Vec<_>>()
    });
    models.chain(files).collect()
}

/// Returns these components with a preference for the files in the cache that complete the model of this name.
pub fn with_companions(name: &str, components: &ComponentPaths) -> ComponentPaths {
    let find = || {
        let (name, cache) = (ModelName::parse(name).ok()?, Cache::new(HubSettings::from_env()?.cache));
        Some(name.companions().iter().filter_map(|companion| cache.find(companion).ok()?).collect())
    };
    ComponentPaths { preferred: find().unwrap_or_default(), ..components.clone() }
}

fn is_of_family(one: &InstalledModel) -> bool {
    let name = one.repo.to_ascii_lowercase().replace(['.', '-', '_'], "");
    let index = || std::fs::read_to_string(one.snapshot.join("model_index.json"));
    FAMILIES.iter().map(|family| family.repository_word).any(|word| {
        let has_pipeline = |text: String| text.to_ascii_lowercase().contains(&format!("\"{word}"));
        name.contains(word) || one.is_model && index().is_ok_and(has_pipeline)
    })
}
