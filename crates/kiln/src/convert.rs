//! `kiln convert`: writes a component of a model with other tensor names, another data type, or in another file format.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_engine::Model;
use kiln_tensor::DType;
use kiln_weights::export::{Container, Options, Storage, TensorNames, export, export_shards};
use kiln_weights::quantize::Report;
use kiln_weights::{Component, WeightSource};
use serde_json::json;

use crate::args::{ComponentArg, ConvertArgs, FloatTypeArg, NamingArg};
use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorContext};
use crate::export::write_error;
use crate::export::{AtomicFolder, ExportProgress, is_weight_file, read_error, report_properties, threads};

/// Default largest size of a shard, in bytes.
const SHARD_SIZE: u64 = 10 << 30;

pub fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let component = SourceComponent::open(&args.input, args.component)?;
    let storage = match args.dtype {
        None => Storage::Keep,
        Some(FloatTypeArg::F32) => Storage::Dense(DType::F32),
        Some(FloatTypeArg::Bf16) => Storage::Dense(DType::BF16),
        Some(FloatTypeArg::F16) => Storage::Dense(DType::F16),
    };
    let names = args.names.map(|names| match names {
        NamingArg::Diffusers => TensorNames::Diffusers,
        NamingArg::Original => TensorNames::Original,
    });
    let threads = threads(args.threads.number);
    let options = ConvertOptions { names, storage, threads, shard_size: args.shard_size };
    let report = component.write(&args.out, &options, args.quiet)?;
    let properties = report_properties(&args.out, &report, "packed");
    let text = if args.json { properties.to_json() } else { properties.to_text() };
    if args.quiet { Ok(()) } else { crate::print(text.as_bytes()) }
}

/// How to write a component.
pub struct ConvertOptions {
    /// Default: diffusers' names for a folder, the original ones for a file.
    pub names: Option<TensorNames>,
    pub storage: Storage,
    pub threads: usize,
    pub shard_size: Option<u64>,
}

/// A component of a model, opened for reading.
pub struct SourceComponent {
    component: Component,
    weights: WeightSource,
    /// The component's folder, with its config.json.
    folder: Option<PathBuf>,
}

impl SourceComponent {
    /// Opens a component of a model folder or of a file. Default: the transformer, or the only component.
    pub fn open(input: &Path, component: Option<ComponentArg>) -> Result<SourceComponent, CliError> {
        let wanted = component.map(|component| match component {
            ComponentArg::Transformer => Component::Transformer,
            ComponentArg::TextEncoder => Component::TextEncoder,
            ComponentArg::Vae => Component::Vae,
        });
        let opening = || format!("opening `{}`", input.display());
        let folder = input.is_dir().then(|| Model::open(input).ok()).flatten();
        if let Some(model) = folder.filter(|model| model.searched_folders.is_empty()) {
            let component = wanted.unwrap_or(Component::Transformer);
            let (path, weights) = match component {
                Component::Transformer => (model.transformer.path.clone(), Some(model.transformer.weights())),
                Component::TextEncoder => match &model.text_encoder {
                    Some(encoder) => (encoder.path.clone(), Some(encoder.weights())),
                    None => (input.to_path_buf(), None),
                },
                Component::Vae => match &model.vae {
                    Some(vae) => (vae.path.clone(), Some(vae.weights())),
                    None => (input.to_path_buf(), None),
                },
            };
            let missing = || CliError::new(format!("the model `{}` has no {component}", input.display()));
            let weights = weights.ok_or_else(missing)?.with_context(opening)?.clone();
            return Ok(SourceComponent { component, weights, folder: path.is_dir().then_some(path) });
        }
        let weights = WeightSource::open(input).with_context(opening)?;
        let first = weights.components().first().map(|(component, _)| *component);
        let component = wanted.or(first).unwrap_or(Component::Transformer);
        let weights = WeightSource::open_component(input, component).with_context(opening)?;
        Ok(SourceComponent { component, weights, folder: input.is_dir().then(|| input.to_path_buf()) })
    }

    pub fn weights(&self) -> &WeightSource {
        &self.weights
    }

    /// Writes the component to a file, or to a folder if `out` has no extension of a weight file.
    pub fn write(&self, out: &Path, options: &ConvertOptions, quiet: bool) -> Result<Report, CliError> {
        let to_file = is_weight_file(out);
        if to_file && options.shard_size.is_some() {
            return Err(
                CliError::usage("--shard-size needs a folder, OUT is a file").hint("give a folder as OUT")
            );
        }
        let is_gguf = out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        let default_names = if to_file { TensorNames::Original } else { TensorNames::Diffusers };
        let export_options = Options {
            component: self.component,
            container: if is_gguf { Container::Gguf } else { Container::Safetensors },
            names: options.names.unwrap_or(default_names),
            storage: options.storage,
            threads: options.threads,
        };
        let progress = ExportProgress::new(quiet, CancelFlag::on_ctrl_c());
        let update = &mut |done, total| progress.update(done, total);
        let writing = || format!("writing `{}`", out.display());
        if to_file {
            let report = export(&self.weights, out, &export_options, update);
            return progress.finish(report).with_context(writing);
        }
        if out.symlink_metadata().is_ok() {
            return Err(CliError::new(format!("`{}` exists already", out.display()))
                .hint("give a folder that does not exist yet, or a .safetensors or .gguf file"));
        }
        let folder = AtomicFolder::create(out)?;
        let stem = if self.component == Component::TextEncoder { "model" } else { "diffusion_pytorch_model" };
        let shard_size = options.shard_size.unwrap_or(SHARD_SIZE);
        let report = export_shards(&self.weights, folder.path(), (stem, shard_size), &export_options, update);
        let report = progress.finish(report).with_context(writing)?;
        self.write_config(folder.path())?;
        folder.commit()?;
        Ok(report)
    }

    /// Writes config.json next to the weights: a copy of the source's, or for a transformer one derived from its tensors.
    fn write_config(&self, folder: &Path) -> Result<(), CliError> {
        let target = folder.join("config.json");
        let source = self.folder.as_ref().map(|folder| folder.join("config.json"));
        if let Some(source) = source.filter(|file| file.is_file()) {
            let text = fs::read(&source).map_err(|e| read_error(&source, &e))?;
            return fs::write(&target, text).map_err(|e| write_error(&target, &e));
        }
        let config = match self.component {
            Component::Transformer => kiln_model::transformer::Config::from_tensors(&self.weights),
            _ => None,
        };
        let Some(c) = config else { return Ok(()) };
        let text = json!({
            "_class_name": "Flux2Transformer2DModel",
            "attention_head_dim": c.attention_head_dim,
            "axes_dims_rope": c.axes_dims_rope,
            "eps": 1e-6,
            "guidance_embeds": c.guidance_embeds,
            "in_channels": c.in_channels,
            "joint_attention_dim": c.joint_attention_dim,
            "mlp_ratio": c.mlp_ratio,
            "num_attention_heads": c.num_attention_heads,
            "num_layers": c.num_layers,
            "num_single_layers": c.num_single_layers,
            "out_channels": c.out_channels,
            "patch_size": c.patch_size,
            "rope_theta": c.rope_theta,
            "timestep_guidance_channels": c.timestep_guidance_channels,
        });
        fs::write(&target, format!("{text:#}\n")).map_err(|e| write_error(&target, &e))
    }
}
