//! A component of a model or of a file, opened to be written in another form.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_engine::{ComponentFile, Field, Model, VariantSource, config_key, find_variant, hint, text};
use kiln_family::Variant;
use kiln_nn::{text_encoder, transformer, vae};
use kiln_weights::export::{
    Container, NAME_KEY, Options, Report, Storage, TensorNames, export, export_shards,
};
use kiln_weights::{Component, WeightSource};
use serde_json::{Value, json};

use super::folder::AtomicFolder;
use super::{ExportWatcher, OutKind, opened, refuse_input, write_error};
use crate::error::{Error, Result};
use crate::folders::ModelFolders;
use crate::location::ModelLocation;

/// Default largest size of a shard, in bytes.
const SHARD_SIZE: u64 = 10 << 30;

/// How to write a component.
pub struct ConvertOptions {
    /// Naming scheme; by default diffusers' names for a folder, the original ones for a file.
    pub names: Option<TensorNames>,
    /// How the weights are stored.
    pub storage: Storage,
    /// Threads to use.
    pub threads: usize,
    /// Largest size of a shard in bytes.
    pub shard_size: Option<u64>,
}

/// A component of a model, opened for reading.
pub struct SourceComponent {
    /// Which component it is.
    pub component: Component,
    /// Its tensors, with all metadata of the converted file.
    pub weights: WeightSource,
    /// The text of its config.json.
    pub config: Option<String>,
    /// A note about tensors that are left out.
    note: Option<String>,
    /// The weight files of the whole model.
    files: Vec<PathBuf>,
}

impl SourceComponent {
    /// Opens a component of a model or of a file. Default: the transformer, or the only component.
    pub fn open(
        input: &Path,
        wanted: Option<Component>,
        variant: Option<Variant>,
    ) -> Result<SourceComponent> {
        let location = ModelFolders::from_env().resolve(Some(input))?;
        let opening = || format!("opening `{}`", input.display());
        let path = location.path().unwrap_or(input);
        if is_part(path) {
            return Err(Error::missing(
                format!("`{}` is only one of several shards", path.display()),
                "give their folder, or the `.safetensors.index.json` next to them",
            ));
        }
        let single = if location.is_whole_model() { None } else { Some(WeightSource::open(path)) };
        let opened = match single {
            // A folder with a model's components in separate files, which `Model` tells apart.
            None | Some(Err(kiln_weights::Error::AmbiguousWeights { .. })) => {
                SourceComponent::of_model(&location.open()?, wanted.unwrap_or(Component::Transformer))?
            }
            Some(single) => {
                opened(SourceComponent::of_file(path, opened(single, opening)?, wanted), opening)?
            }
        };
        opened.with_variant(variant)?.with_name(&location)
    }

    /// Opens a component of a model.
    pub fn of_model(model: &Model, component: Component) -> Result<SourceComponent> {
        let missing = || {
            Error::missing(
                format!("the model `{}` has no {component}", model.path.display()),
                hint!["`kiln info` shows what it has"; "name another part with ", Field::Part],
            )
        };
        let weights = model.component(component).ok_or_else(missing)?.weights();
        let weights = opened(weights, || format!("opening the {component} of `{}`", model.path.display()))?;
        let metadata = model.metadata_for(component);
        let others = model.components().filter_map(|component| component.weights().ok());
        Ok(SourceComponent {
            component,
            note: None,
            config: metadata.get(&config_key(component)).cloned(),
            files: others.flat_map(WeightSource::files).map(Path::to_path_buf).collect(),
            weights: weights.clone().with_metadata(metadata),
        })
    }

    /// Opens a component of a weight file or of a component's folder.
    fn of_file(
        path: &Path,
        file: WeightSource,
        wanted: Option<Component>,
    ) -> kiln_engine::Result<SourceComponent> {
        let first = file.components().first().map(|(component, _)| *component);
        let component = wanted.or(first).unwrap_or(Component::Transformer);
        let missing = || kiln_weights::Error::WrongComponent {
            file: path.to_path_buf(),
            component,
            found: file.describe(),
        };
        let weights = file.component(component)?.ok_or_else(missing)?;
        // A file with only some of a component's layers can be converted, too.
        let ComponentFile { weights, config, note } = if is_complete(component, &weights) {
            ComponentFile::open(path, component)?
        } else {
            weights.check_claimed(component)?;
            ComponentFile { weights, config: None, note: None }
        };
        let key = config_key(component);
        let mut metadata: Vec<_> = config.iter().map(|text| (key.clone(), text.clone())).collect();
        if component == Component::Transformer {
            let (variant, source) = find_variant(&weights, has_guidance(&weights))?;
            metadata.extend(source.metadata(variant));
        }
        let files = weights.files().map(Path::to_path_buf).collect();
        Ok(SourceComponent { component, weights: weights.with_metadata(metadata), config, files, note })
    }

    /// Records the variant that the user names.
    fn with_variant(self, variant: Option<Variant>) -> Result<SourceComponent> {
        let Some(variant) = variant else { return Ok(self) };
        let path = self.weights.path().display();
        if self.component != Component::Transformer {
            return Err(Error::usage(
                text![Field::Variant, format!(" is about a transformer, `{path}` is a {}", self.component)],
                hint!["leave out ", Field::Variant],
            ));
        }
        if has_guidance(&self.weights) != variant.embeds_guidance() {
            return Err(Error::missing(
                format!("`{path}` can't be {variant}"),
                "only dev takes guidance as an input; `kiln info` shows what a file contains",
            ));
        }
        let weights = self.weights.with_metadata(VariantSource::Stated.metadata(variant));
        Ok(SourceComponent { weights, ..self })
    }

    /// Records the model's name, unless the file has one, and the settings that GGUF has its own keys for.
    fn with_name(self, location: &ModelLocation) -> Result<SourceComponent> {
        let full = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let stem = |path: PathBuf| {
            let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
            name.map(|name| name.to_string_lossy().into_owned())
        };
        let name = || location.name().or_else(|| stem(full(location.path()?)));
        let known = self.weights.metadata().get(NAME_KEY).cloned();
        let mut metadata: Vec<(String, String)> =
            known.or_else(name).map(|name| (NAME_KEY.to_owned(), name)).into_iter().collect();
        if self.component == Component::TextEncoder {
            metadata.extend(self.config.iter().flat_map(|text| settings(text)));
        }
        Ok(SourceComponent { weights: self.weights.with_metadata(metadata), ..self })
    }

    /// Writes the component to a file or folder.
    pub fn write(&self, out: &Path, options: &ConvertOptions, watcher: &dyn ExportWatcher) -> Result<Report> {
        let kind = OutKind::check(out)?;
        self.refuse_as_output(out)?;
        let to_file = kind != OutKind::Folder;
        let default_names = if to_file { TensorNames::Original } else { TensorNames::Diffusers };
        let export_options = Options {
            component: self.component,
            container: if kind == OutKind::Gguf { Container::Gguf } else { Container::Safetensors },
            names: options.names.unwrap_or(default_names),
            storage: options.storage,
            threads: options.threads,
        };
        if let Some(note) = &self.note {
            watcher.message(&format!("note: {note}"));
        }
        let reads_images = self.weights.names().any(|name| name.starts_with("vision_tower."));
        if kind == OutKind::Gguf && reads_images {
            watcher.message("note: the vision tower is left out: GGUF files have it in a file of its own");
        }
        let update = &mut |done, total| watcher.update(done, total);
        let writing = || format!("writing `{}`", out.display());
        if to_file {
            return opened(export(&self.weights, out, &export_options, update), writing);
        }
        let folder = AtomicFolder::create(out)?;
        let stem = self.component.weights_stem();
        let shard_size = options.shard_size.unwrap_or(SHARD_SIZE);
        let report = export_shards(&self.weights, folder.path(), (stem, shard_size), &export_options, update);
        let report = opened(report, writing)?;
        self.write_config(folder.path())?;
        folder.commit()?;
        Ok(report)
    }

    /// Refuses an output that is one of the model's files.
    pub(super) fn refuse_as_output(&self, out: &Path) -> Result<()> {
        refuse_input(out, self.files.iter().map(PathBuf::as_path))
    }

    /// Writes config.json next to the weights: the source's, or for a transformer one derived from its tensors.
    fn write_config(&self, folder: &Path) -> Result<()> {
        let target = folder.join("config.json");
        let text = self.config.as_deref().map(without_quantization).or_else(|| self.derived_config());
        text.map_or(Ok(()), |text| fs::write(&target, text).map_err(|e| write_error(&target, &e)))
    }

    fn derived_config(&self) -> Option<String> {
        let c = match self.component {
            Component::Transformer => transformer::Config::from_tensors(&self.weights)?,
            Component::TextEncoder | Component::Vae => return None,
        };
        let text = json!({
            "_class_name": self.weights.family().transformer.class,
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
        Some(format!("{text:#}\n"))
    }
}

/// Returns whether a path is that of a shard beside others, such as `model-00001-of-00002.safetensors`.
fn is_part(path: &Path) -> bool {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let count = stem.rsplit_once("-of-").and_then(|(_, count)| count.parse::<u32>().ok());
    path.is_file() && count.is_some_and(|count| count > 1)
}

/// Returns whether a transformer takes guidance as an input.
fn has_guidance(weights: &WeightSource) -> bool {
    transformer::Config::from_tensors(weights).is_some_and(|config| config.guidance_embeds)
}

/// Returns whether a component's configuration follows from its tensors.
fn is_complete(component: Component, weights: &WeightSource) -> bool {
    match component {
        Component::Transformer => transformer::Config::from_tensors(weights).is_some(),
        Component::TextEncoder => text_encoder::Config::from_tensors(weights).is_some(),
        Component::Vae => vae::Config::from_tensors(weights).is_some(),
    }
}

/// Returns a config.json without its description of quantized layers: the written ones are stored in another way.
pub(super) fn without_quantization(text: &str) -> String {
    const KEY: &str = "quantization_config";
    let mut config: Value = serde_json::from_str(text).unwrap_or_default();
    match config.as_object_mut().and_then(|fields| fields.remove(KEY)) {
        Some(_) => format!("{config:#}\n"),
        None => text.to_owned(),
    }
}

/// Returns the settings of a text encoder's config.json that don't follow from its tensors.
fn settings(config: &str) -> Vec<(String, String)> {
    let Ok(config) = serde_json::from_str::<text_encoder::Config>(config) else { return Vec::new() };
    let settings = [
        ("rms_norm_eps", config.rms_norm_eps.to_string()),
        ("rope_theta", config.rope_theta().to_string()),
        ("head_dim", config.head_dim().to_string()),
    ];
    settings.map(|(key, value)| (key.to_owned(), value)).to_vec()
}
