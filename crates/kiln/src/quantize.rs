//! `kiln quantize`: writes a model folder with one component quantized, or that component as a file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kiln_engine::Model;
use kiln_weights::Component;
use kiln_weights::export::{Container, Options, TensorNames, export};
use kiln_weights::quantize::{Report, quantize};
use serde_json::Value;

use crate::args::{QuantTypeArg, QuantizeArgs};
use crate::cancel::CancelFlag;
use crate::convert::{ConvertOptions, SourceComponent, without_quantization};
use crate::error::{CliError, ErrorContext};
use crate::export::{
    AtomicFolder, ExportProgress, OutKind, read_error, report_properties, threads, write_error,
};
use crate::models;

pub fn run(args: &QuantizeArgs) -> Result<(), CliError> {
    let kind = OutKind::check(&args.out)?;
    check_container(args.to, kind, &args.out)?;
    if let Some(component) = args.component {
        check_component(args.to, component.into())?;
    }
    if kind == OutKind::Folder && args.variant.is_some() {
        return Err(CliError::usage(
            "--variant needs a file as OUT: a folder has the model's own model_index.json",
        )
        .hint("leave out --variant, or end OUT in .safetensors or .gguf"));
    }
    let report = if kind == OutKind::Folder { to_folder(args)? } else { to_file(args, kind)? };
    let properties = report_properties(&args.out, &report, Some(args.to.name()));
    let text = if args.json { properties.to_json() } else { properties.to_text() };
    if args.quiet { Ok(()) } else { crate::print(text.as_bytes()) }
}

/// Refuses a file that can't hold the type.
fn check_container(to: QuantTypeArg, kind: OutKind, out: &Path) -> Result<(), CliError> {
    let (expected, fits) = if to.is_gguf() {
        (".gguf", kind != OutKind::Safetensors)
    } else {
        (".safetensors", kind != OutKind::Gguf)
    };
    if fits {
        return Ok(());
    }
    let (to, out) = (to.name(), out.display());
    Err(CliError::usage(format!("{to} requires a {expected} file, OUT is `{out}`"))
        .hint(format!("end OUT in {expected}, or choose another type with --to")))
}

/// Refuses a component without layers of which the type is known to work.
fn check_component(to: QuantTypeArg, component: Component) -> Result<(), CliError> {
    match component {
        Component::Vae => Err(CliError::usage("a VAE has no layers to quantize").hint(
            "quantize the transformer or the text encoder; `kiln convert --dtype` changes a VAE's type",
        )),
        Component::TextEncoder if to == QuantTypeArg::Int8 => {
            Err(CliError::usage("int8 is a type for transformers, not for text encoders")
                .hint("choose another type with --to, such as q8_0 or fp8"))
        }
        _ => Ok(()),
    }
}

fn to_file(args: &QuantizeArgs, kind: OutKind) -> Result<Report, CliError> {
    let source = SourceComponent::open(&args.model, args.component.map(Into::into), args.variant)?;
    check_component(args.to, source.component)?;
    let threads = threads(args.threads.number);
    let Some(storage) = args.to.storage() else {
        source.refuse_as_output(&args.out)?;
        let progress = ExportProgress::new(args.quiet, CancelFlag::install_polled());
        let update = &mut |done, total| progress.update(done, total);
        let report = quantize(&source.weights, &args.out, threads, update);
        return progress.finish(report).with_context(|| format!("quantizing `{}`", args.model.display()));
    };
    let options = ConvertOptions { names: None, storage, threads, shard_size: None };
    source.write(&args.out, kind, &options, args.quiet)
}

fn to_folder(args: &QuantizeArgs) -> Result<Report, CliError> {
    let cancel = CancelFlag::install_polled();
    let source = SourceModel::open(args)?;
    let folder = AtomicFolder::create(&args.out)?;
    let report = source.write(folder.path(), args, cancel)?;
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
    fn open(args: &QuantizeArgs) -> Result<SourceModel, CliError> {
        let location = models::resolve(Some(&args.model))?;
        let folder = location.path().filter(|path| path.is_dir() && location.is_whole_model());
        let model = folder.map(|_| location.open()).transpose()?;
        // A manifest's components may lie anywhere.
        let model = model.filter(|model| model.path.join("model_index.json").is_file());
        let Some(model) = model else {
            let what = match folder {
                Some(_) => "has no `model_index.json`, which a model folder needs",
                None if args.model.is_dir() => "is no folder of a whole model",
                None => "is a file, expected a model folder",
            };
            return Err(CliError::new(format!("`{}` {what}", args.model.display()))
                .hint("to quantize a single file, give a .safetensors or .gguf file as OUT"));
        };
        let (component, name) = match args.component.map(Component::from) {
            Some(Component::TextEncoder) => (Component::TextEncoder, "text_encoder"),
            _ => (Component::Transformer, "transformer"),
        };
        let index = model.path.join("model_index.json");
        let text = fs::read(&index).map_err(|e| read_error(&index, &e))?;
        let index: BTreeMap<String, Value> = serde_json::from_slice(&text).map_err(|e| {
            CliError::new(format!("`{}` is not valid: {e}", index.display()))
                .hint("check the file, or download the model again")
        })?;
        // No path separators: a downloaded index must not reach outside its folder.
        let is_file_name =
            |name: &str| Path::new(name).file_name().is_some_and(|f| f == name) && !name.starts_with('.');
        let names = index.into_keys().filter(|other| other != name && is_file_name(other));
        let other_components = names.filter(|name| model.path.join(name).is_dir()).collect();
        Ok(SourceModel { model, component, name, other_components })
    }

    fn write(&self, to: &Path, args: &QuantizeArgs, cancel: CancelFlag) -> Result<Report, CliError> {
        let (folder, from) = (to.join(self.name), self.model.path.join(self.name));
        let source = SourceComponent::of_model(&self.model, self.component)?;
        fs::create_dir(&folder).map_err(|e| write_error(&folder, &e))?;
        let stem = if self.component == Component::TextEncoder { "model" } else { "diffusion_pytorch_model" };
        let threads = threads(args.threads.number);
        let progress = ExportProgress::new(args.quiet, cancel);
        let update = &mut |done, total| progress.update(done, total);
        let report = match args.to.storage() {
            None => quantize(&source.weights, &folder.join(format!("{stem}.safetensors")), threads, update),
            Some(storage) => {
                let gguf = args.to.is_gguf();
                let options = Options {
                    component: self.component,
                    container: if gguf { Container::Gguf } else { Container::Safetensors },
                    names: if gguf { TensorNames::Original } else { TensorNames::Diffusers },
                    storage,
                    threads,
                };
                let extension = if gguf { "gguf" } else { "safetensors" };
                let file = folder.join(format!("{stem}.{extension}"));
                export(&source.weights, &file, &options, update)
            }
        };
        let report = progress.finish(report).with_context(|| format!("quantizing `{}`", from.display()))?;
        let cancel = &progress.cancel;
        let is_weights =
            |name: &str| [".safetensors", ".gguf", ".index.json"].iter().any(|end| name.ends_with(end));
        copy_folder(&from, &folder, &|name| !is_weights(name), cancel)?;
        if let Some(config) = &source.config {
            let file = folder.join("config.json");
            fs::write(&file, without_quantization(config)).map_err(|e| write_error(&file, &e))?;
        }
        for component in &self.other_components {
            progress.message(&format!("copying {component}"));
            let to = to.join(component);
            fs::create_dir(&to).map_err(|e| write_error(&to, &e))?;
            copy_folder(&self.model.path.join(component), &to, &|_| true, cancel)?;
        }
        // Model cards and licences; some downloads have a second copy of the weights here, which is not copied.
        let is_text = |name: &str| {
            [".json", ".md", ".txt"].iter().any(|end| name.ends_with(end)) || name.starts_with("LICENSE")
        };
        copy_files(&self.model.path, to, &is_text, cancel)?;
        Ok(report)
    }
}

/// Copies the accepted files of a folder and its subfolders, except hidden ones.
fn copy_folder(
    from: &Path,
    to: &Path,
    accept: &dyn Fn(&str) -> bool,
    cancel: &CancelFlag,
) -> Result<(), CliError> {
    copy_files(from, to, accept, cancel)?;
    for (name, path) in entries(from)? {
        if path.is_dir() {
            let to = to.join(&name);
            fs::create_dir(&to).map_err(|e| write_error(&to, &e))?;
            copy_folder(&path, &to, accept, cancel)?;
        }
    }
    Ok(())
}

fn copy_files(
    from: &Path,
    to: &Path,
    accept: &dyn Fn(&str) -> bool,
    cancel: &CancelFlag,
) -> Result<(), CliError> {
    for (name, path) in entries(from)? {
        if cancel.is_set() {
            return Err(CliError::cancelled());
        }
        if path.is_file() && accept(&name) {
            // Follows links, which the Hugging Face cache is made of.
            let to = to.join(&name);
            fs::copy(&path, &to).map_err(|e| write_error(&to, &e))?;
        }
    }
    Ok(())
}

/// Lists the names and paths in a folder, sorted, without hidden ones.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>, CliError> {
    let list = || -> io::Result<Vec<(String, PathBuf)>> {
        let named = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
        let mut all = Vec::new();
        for entry in fs::read_dir(folder)? {
            all.extend(named(entry?).filter(|(name, _)| !name.starts_with('.')));
        }
        all.sort();
        Ok(all)
    };
    list().map_err(|e| read_error(folder, &e))
}
