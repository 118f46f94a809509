//! `kiln convert`: a part of a model under other names, in another type, in another kind of file.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_engine::Model;
use kiln_tensor::DType;
use kiln_weights::export::{Container, Names, Options, Storage, export, export_shards};
use kiln_weights::quantise::Report;
use kiln_weights::{Component, WeightSource};
use serde_json::json;

use crate::args::{ConvertArgs, NamesArg, PartArg, PlainArg};
use crate::cancel::Cancel;
use crate::failure::{Failure, While};
use crate::quantize::{Progress, Stop, place, read_failed, sheet, threads, write_failed};

/// Bytes of a shard when nothing is said.
const SHARD: u64 = 10 << 30;

pub fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let part = Part::open(&args.input, args.part)?;
    let storage = match args.dtype {
        None => Storage::Keep,
        Some(PlainArg::F32) => Storage::Plain(DType::F32),
        Some(PlainArg::Bf16) => Storage::Plain(DType::BF16),
        Some(PlainArg::F16) => Storage::Plain(DType::F16),
    };
    let names = args.names.map(|names| match names {
        NamesArg::Diffusers => Names::Diffusers,
        NamesArg::Original => Names::Original,
    });
    let wanted = Wanted { names, storage, threads: threads(args.threads.number), shard: args.shard_size };
    let report = part.write(&args.out, &wanted, args.quiet)?;
    let sheet = sheet(&args.out, &report, "packed");
    let text = if args.json { sheet.to_json() } else { sheet.to_lines() };
    if args.quiet { Ok(()) } else { crate::print(text.as_bytes()) }
}

/// What a part becomes.
pub struct Wanted {
    /// By the kind of file where nothing is said: a folder has diffusers' names, a file the original ones.
    pub names: Option<Names>,
    pub storage: Storage,
    pub threads: usize,
    pub shard: Option<u64>,
}

/// A part of a model, opened.
pub struct Part {
    component: Component,
    source: WeightSource,
    /// Its folder in a model, with its configuration.
    folder: Option<PathBuf>,
}

impl Part {
    /// The part of a model's folder or of a file; without a wish the transformer, or the only one there is.
    pub fn open(input: &Path, wish: Option<PartArg>) -> Result<Part, Failure> {
        let wish = wish.map(|part| match part {
            PartArg::Transformer => Component::Transformer,
            PartArg::TextEncoder => Component::TextEncoder,
            PartArg::Vae => Component::Vae,
        });
        let opening = || format!("opening `{}`", input.display());
        let folder = input.is_dir().then(|| Model::open(input).ok()).flatten();
        if let Some(model) = folder.filter(|model| model.searched.is_empty()) {
            let component = wish.unwrap_or(Component::Transformer);
            let (path, source) = match component {
                Component::Transformer => (model.transformer.path.clone(), Some(model.transformer.weights())),
                Component::TextEncoder => match &model.text_encoder {
                    Some(part) => (part.path.clone(), Some(part.weights())),
                    None => (input.to_path_buf(), None),
                },
                Component::Vae => match &model.vae {
                    Some(part) => (part.path.clone(), Some(part.weights())),
                    None => (input.to_path_buf(), None),
                },
            };
            let missing = || Failure::new(format!("the model `{}` has no {component}", input.display()));
            let source = source.ok_or_else(missing)?.while_doing(opening)?;
            return Ok(Part { component, source: source.clone(), folder: path.is_dir().then_some(path) });
        }
        let source = WeightSource::open(input).while_doing(opening)?;
        let parts: Vec<Component> = source.components().into_iter().map(|(part, _)| part).collect();
        let component = wish.or_else(|| parts.first().copied()).unwrap_or(Component::Transformer);
        let source = WeightSource::open_component(input, component).while_doing(opening)?;
        Ok(Part { component, source, folder: input.is_dir().then(|| input.to_path_buf()) })
    }

    /// Its weights.
    pub fn source(&self) -> &WeightSource {
        &self.source
    }

    /// Writes it to a file, or to a folder when `out` has no known ending.
    pub fn write(&self, out: &Path, wanted: &Wanted, quiet: bool) -> Result<Report, Failure> {
        let ending = out.extension().and_then(|e| e.to_str()).map(str::to_lowercase);
        let container = match ending.as_deref() {
            Some("gguf") => Container::Gguf,
            _ => Container::Safetensors,
        };
        let file = matches!(ending.as_deref(), Some("gguf" | "safetensors"));
        let usual = if file { Names::Original } else { Names::Diffusers };
        let options = Options {
            component: self.component,
            container,
            names: wanted.names.unwrap_or(usual),
            storage: wanted.storage,
            threads: wanted.threads,
        };
        if file && wanted.shard.is_some() {
            return Err(Failure::usage("--shard-size makes several files").hint("name a folder as OUT"));
        }
        let stop = Stop::new(Cancel::on_ctrl_c(), Progress::new(quiet));
        let doing = || format!("writing `{}`", out.display());
        if file {
            let report = export(&self.source, out, &options, &mut |done, total| stop.tell(done, total));
            return stop.end(report).while_doing(doing);
        }
        if out.symlink_metadata().is_ok() {
            return Err(Failure::new(format!("`{}` exists already", out.display()))
                .hint("name a folder that does not exist yet, or a file ending in .safetensors or .gguf"));
        }
        let beside = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let making = tempfile::Builder::new().prefix(".kiln-").suffix(".tmp").tempdir_in(beside);
        let making = making.map_err(|e| write_failed(out, &e))?;
        let stem = if self.component == Component::TextEncoder { "model" } else { "diffusion_pytorch_model" };
        let shard = wanted.shard.unwrap_or(SHARD);
        let tell = &mut |done, total| stop.tell(done, total);
        let report = export_shards(&self.source, making.path(), (stem, shard), &options, tell);
        let report = stop.end(report).while_doing(doing)?;
        self.configure(making.path())?;
        place(making, out)?;
        Ok(report)
    }

    /// Puts the configuration beside the weights: the one they came with, or of a transformer what its tensors tell.
    fn configure(&self, to: &Path) -> Result<(), Failure> {
        let target = to.join("config.json");
        let own = self.folder.as_ref().map(|folder| folder.join("config.json")).filter(|file| file.is_file());
        if let Some(own) = own {
            let text = fs::read(&own).map_err(|e| read_failed(&own, &e))?;
            return fs::write(&target, text).map_err(|e| write_failed(&target, &e));
        }
        let config = match self.component {
            Component::Transformer => kiln_model::transformer::Config::from_tensors(&self.source),
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
        fs::write(&target, format!("{text:#}\n")).map_err(|e| write_failed(&target, &e))
    }
}
