//! `kiln quantize`: writes a model folder with a quantized transformer, or one quantized component as a file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kiln_weights::Component;
use kiln_weights::export::{Container, Options, Storage, TensorNames, export};
use kiln_weights::quantize::{Report, quantize};
use serde_json::Value;

use crate::args::QuantizeArgs;
use crate::cancel::CancelFlag;
use crate::convert::{ConvertOptions, SourceComponent};
use crate::error::{CliError, ErrorContext};
use crate::export::write_error;
use crate::export::{AtomicFolder, ExportProgress, is_weight_file, read_error, report_properties, threads};
use crate::hints;

const TRANSFORMER: &str = "transformer";
const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";
const GGUF_WEIGHTS: &str = "diffusion_pytorch_model.gguf";

pub fn run(args: &QuantizeArgs) -> Result<(), CliError> {
    let report = if is_weight_file(&args.out) { to_file(args)? } else { to_folder(args)? };
    let properties = report_properties(&args.out, &report, args.to.name());
    let text = if args.json { properties.to_json() } else { properties.to_text() };
    if args.quiet { Ok(()) } else { crate::print(text.as_bytes()) }
}

fn to_file(args: &QuantizeArgs) -> Result<Report, CliError> {
    let component = SourceComponent::open(&args.model, args.component)?;
    let threads = threads(args.threads.number);
    let Some(format) = args.to.format() else {
        let progress = ExportProgress::new(args.quiet, CancelFlag::on_ctrl_c());
        let update = &mut |done, total| progress.update(done, total);
        let report = quantize(component.weights(), &args.out, threads, update);
        return progress.finish(report).with_context(|| format!("quantizing `{}`", args.model.display()));
    };
    let options =
        ConvertOptions { names: None, storage: Storage::Quantized(format), threads, shard_size: None };
    component.write(&args.out, &options, args.quiet)
}

fn to_folder(args: &QuantizeArgs) -> Result<Report, CliError> {
    let cancel = CancelFlag::on_ctrl_c();
    let source = SourceModel::open(args)?;
    let folder = AtomicFolder::create(&args.out)?;
    let report = source.write(folder.path(), args, cancel)?;
    folder.commit()?;
    Ok(report)
}

/// The model folder to quantize.
struct SourceModel {
    path: PathBuf,
    /// Folders of the components other than the transformer, from `model_index.json`.
    other_components: Vec<String>,
}

impl SourceModel {
    fn open(args: &QuantizeArgs) -> Result<SourceModel, CliError> {
        let model = args.model.as_path();
        if model.is_file() {
            return Err(CliError::new(format!("`{}` is a file, expected a model folder", model.display()))
                .hint("to quantize a file, give a .safetensors or .gguf file as OUT"));
        }
        // Opened only to check that it is a valid model.
        hints::open_model(model)?;
        if args.out.symlink_metadata().is_ok() {
            return Err(CliError::new(format!("`{}` exists already", args.out.display()))
                .hint("give a folder that does not exist yet"));
        }
        let index = model.join("model_index.json");
        let text = fs::read(&index).map_err(|e| read_error(&index, &e))?;
        let index: BTreeMap<String, Value> = serde_json::from_slice(&text)
            .map_err(|e| CliError::new(format!("`{}` is not valid: {e}", index.display())))?;
        // No path separators: a downloaded index must not reach outside its folder.
        let is_file_name =
            |name: &str| Path::new(name).file_name().is_some_and(|f| f == name) && !name.starts_with('.');
        let names = index.into_keys().filter(|name| name != TRANSFORMER && is_file_name(name));
        let other_components = names.filter(|name| model.join(name).is_dir()).collect();
        Ok(SourceModel { path: model.to_owned(), other_components })
    }

    fn write(&self, to: &Path, args: &QuantizeArgs, cancel: CancelFlag) -> Result<Report, CliError> {
        let folder = to.join(TRANSFORMER);
        fs::create_dir(&folder).map_err(|e| write_error(&folder, &e))?;
        let from = self.path.join(TRANSFORMER);
        let model = hints::open_model(&self.path)?;
        let source = model.transformer.weights()?;
        let threads = threads(args.threads.number);
        let progress = ExportProgress::new(args.quiet, cancel);
        let update = &mut |done, total| progress.update(done, total);
        let report = match args.to.format() {
            None => quantize(source, &folder.join(WEIGHTS), threads, update),
            Some(format) => {
                let gguf = args.to.is_gguf();
                let options = Options {
                    component: Component::Transformer,
                    container: if gguf { Container::Gguf } else { Container::Safetensors },
                    names: if gguf { TensorNames::Original } else { TensorNames::Diffusers },
                    storage: Storage::Quantized(format),
                    threads,
                };
                let file = folder.join(if gguf { GGUF_WEIGHTS } else { WEIGHTS });
                export(source, &file, &options, update)
            }
        };
        let report = progress.finish(report).with_context(|| format!("quantizing `{}`", from.display()))?;
        let cancel = &progress.cancel;
        let is_weights =
            |name: &str| [".safetensors", ".gguf", ".index.json"].iter().any(|end| name.ends_with(end));
        copy_folder(&from, &folder, &|name| !is_weights(name), cancel)?;
        for component in &self.other_components {
            progress.message(&format!("copying {component}"));
            let to = to.join(component);
            fs::create_dir(&to).map_err(|e| write_error(&to, &e))?;
            copy_folder(&self.path.join(component), &to, &|_| true, cancel)?;
        }
        // Model cards and licences; some downloads have a second copy of the weights here, which is not copied.
        let is_text = |name: &str| {
            [".json", ".md", ".txt"].iter().any(|end| name.ends_with(end)) || name.starts_with("LICENSE")
        };
        copy_files(&self.path, to, &is_text, cancel)?;
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
