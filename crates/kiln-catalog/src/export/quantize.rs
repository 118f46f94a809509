//! Quantizes one component of a model, as a file or as a folder with the whole model.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use kiln_engine::{Field, Model, hint, text};
use kiln_family::Variant;
use kiln_weights::Component;
use kiln_weights::export::Report;
use kiln_weights::export::{Container, Options, TensorNames, export};
use kiln_weights::quantize::quantize;
use serde_json::Value;

use super::component::{ConvertOptions, SourceComponent, without_quantization};
use super::folder::{AtomicFolder, copy_files, copy_folder};
use super::{ExportWatcher, OutKind, QuantType, opened, read_error, write_error};
use crate::error::{Error, Result};
use crate::folders::ModelFolders;

/// How to quantize a model.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// The type of the linear layers inside the blocks.
    pub to: QuantType,
    /// The component; the transformer, or the only one, if absent.
    pub component: Option<Component>,
    /// The variant to record in a file; the input's if absent.
    pub variant: Option<Variant>,
    /// Threads to use.
    pub threads: usize,
}

/// Writes a model folder with one component quantized, or that component as a file.
pub fn quantize_model(
    input: &Path,
    out: &Path,
    options: &QuantizeOptions,
    watcher: &dyn ExportWatcher,
) -> Result<Report> {
    let kind = OutKind::check(out)?;
    check_container(options.to, kind, out)?;
    if let Some(component) = options.component {
        check_component(options.to, component)?;
    }
    if kind == OutKind::Folder && options.variant.is_some() {
        return Err(Error::usage(
            text![
                Field::Variant,
                " needs a file as ",
                Field::Out,
                ": a folder has the model's own model_index.json"
            ],
            hint!["leave out ", Field::Variant; "end ", Field::Out, " in .safetensors or .gguf"],
        ));
    }
    if kind == OutKind::Folder {
        to_folder(input, out, options, watcher)
    } else {
        to_file(input, out, options, watcher)
    }
}

/// Refuses a file that can't hold the type.
fn check_container(to: QuantType, kind: OutKind, out: &Path) -> Result<()> {
    let (expected, fits) = if to.is_gguf() {
        (".gguf", kind != OutKind::Safetensors)
    } else {
        (".safetensors", kind != OutKind::Gguf)
    };
    if fits {
        return Ok(());
    }
    let (to, out) = (to.name(), out.display());
    Err(Error::usage(
        text![format!("{to} requires a {expected} file, "), Field::Out, format!(" is `{out}`")],
        hint!["end ", Field::Out, format!(" in {expected}"); "choose another type with ", Field::To],
    ))
}

/// Refuses a type that the component's layers can't have.
fn check_component(to: QuantType, component: Component) -> Result<()> {
    match component {
        Component::Vae => Err(Error::usage(
            "a VAE has no layers to quantize",
            hint!["quantize the transformer or the text encoder"; "change a VAE's type with `kiln convert`"],
        )),
        Component::TextEncoder if to == QuantType::Int8 => Err(Error::usage(
            "int8 is a type for transformers, not for text encoders",
            hint!["choose another type with ", Field::To, ", such as q8_0 or fp8"],
        )),
        _ => Ok(()),
    }
}

fn to_file(
    input: &Path,
    out: &Path,
    options: &QuantizeOptions,
    watcher: &dyn ExportWatcher,
) -> Result<Report> {
    let source = SourceComponent::open(input, options.component, options.variant)?;
    check_component(options.to, source.component)?;
    let threads = options.threads;
    let Some(storage) = options.to.storage() else {
        source.refuse_as_output(out)?;
        let update = &mut |done, total| watcher.update(done, total);
        let report = quantize(&source.weights, out, threads, update);
        return opened(report, || format!("quantizing `{}`", input.display()));
    };
    source.write(out, &ConvertOptions { names: None, storage, threads, shard_size: None }, watcher)
}

fn to_folder(
    input: &Path,
    out: &Path,
    options: &QuantizeOptions,
    watcher: &dyn ExportWatcher,
) -> Result<Report> {
    let source = SourceModel::open(input, options.component)?;
    let folder = AtomicFolder::create(out)?;
    let report = source.write(folder.path(), options, watcher)?;
    folder.commit()?;
    Ok(report)
}

/// The model folder to quantize.
struct SourceModel {
    model: Model,
    /// The component to quantize.
    component: Component,
    /// Its folder.
    name: &'static str,
    /// Folders of the other components, from `model_index.json`.
    other_components: Vec<String>,
}

impl SourceModel {
    fn open(input: &Path, component: Option<Component>) -> Result<SourceModel> {
        let location = ModelFolders::from_env().resolve(Some(input))?;
        let folder = location.path().filter(|path| path.is_dir() && location.is_whole_model());
        let model = folder.map(|_| location.open()).transpose()?;
        // A manifest's components may lie anywhere.
        let model = model.filter(|model| model.path.join("model_index.json").is_file());
        let Some(model) = model else {
            let what = match folder {
                Some(_) => "has no `model_index.json`, which a model folder needs",
                None if input.is_dir() => "is not the folder of a whole model",
                None => "is a file, expected a model folder",
            };
            return Err(Error::missing(
                format!("`{}` {what}", input.display()),
                hint!["to quantize a single file, give a .safetensors or .gguf file as ", Field::Out],
            ));
        };
        let component = component.unwrap_or(Component::Transformer);
        let name = component.folder();
        let index = model.path.join("model_index.json");
        let text = fs::read(&index).map_err(|e| read_error(&index, &e))?;
        let index: BTreeMap<String, Value> = serde_json::from_slice(&text).map_err(|e| {
            Error::missing(
                format!("`{}` is not valid: {e}", index.display()),
                "check the file, or download the model again",
            )
        })?;
        // No path separators: a downloaded index must not reach outside its folder.
        let is_file_name =
            |name: &str| Path::new(name).file_name().is_some_and(|f| f == name) && !name.starts_with('.');
        let names = index.into_keys().filter(|other| other != name && is_file_name(other));
        let other_components = names.filter(|name| model.path.join(name).is_dir()).collect();
        Ok(SourceModel { model, component, name, other_components })
    }

    fn write(&self, to: &Path, options: &QuantizeOptions, watcher: &dyn ExportWatcher) -> Result<Report> {
        let (folder, from) = (to.join(self.name), self.model.path.join(self.name));
        let source = SourceComponent::of_model(&self.model, self.component)?;
        fs::create_dir(&folder).map_err(|e| write_error(&folder, &e))?;
        let stem = self.component.weights_stem();
        let threads = options.threads;
        let update = &mut |done, total| watcher.update(done, total);
        let report = match options.to.storage() {
            None => quantize(&source.weights, &folder.join(format!("{stem}.safetensors")), threads, update),
            Some(storage) => {
                let gguf = options.to.is_gguf();
                let export_options = Options {
                    component: self.component,
                    container: if gguf { Container::Gguf } else { Container::Safetensors },
                    names: if gguf { TensorNames::Original } else { TensorNames::Diffusers },
                    storage,
                    threads,
                };
                let extension = if gguf { "gguf" } else { "safetensors" };
                let file = folder.join(format!("{stem}.{extension}"));
                export(&source.weights, &file, &export_options, update)
            }
        };
        let report = opened(report, || format!("quantizing `{}`", from.display()))?;
        let is_weights =
            |name: &str| [".safetensors", ".gguf", ".index.json"].iter().any(|end| name.ends_with(end));
        copy_folder(&from, &folder, &|name| !is_weights(name), watcher)?;
        if let Some(config) = &source.config {
            let file = folder.join("config.json");
            fs::write(&file, without_quantization(config)).map_err(|e| write_error(&file, &e))?;
        }
        for component in &self.other_components {
            watcher.message(&format!("copying {component}"));
            let to = to.join(component);
            fs::create_dir(&to).map_err(|e| write_error(&to, &e))?;
            copy_folder(&self.model.path.join(component), &to, &|_| true, watcher)?;
        }
        // Model cards and licences; some downloads have a second copy of the weights here, which is not copied.
        let is_text = |name: &str| {
            [".json", ".jinja", ".md", ".txt"].iter().any(|end| name.ends_with(end))
                || name.starts_with("LICENSE")
        };
        copy_files(&self.model.path, to, &is_text, watcher)?;
        Ok(report)
    }
}
