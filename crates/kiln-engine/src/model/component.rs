//! A component of a model (transformer, text encoder or VAE): its configuration, and its weights, opened once.
//!
//! Tests check that every file is opened, and every reference image decoded, only once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_nn::{config, text_encoder, transformer, vae};
use kiln_weights::{Component, KnownTensors, WeightSource};
use serde::de::DeserializeOwned;

use crate::content_hashes::ContentHashes;
use crate::error::{Error, Result};
use crate::inputs::sha256;
use crate::once::TryOnceLock;

/// A component of a model: its configuration, and its weights.
#[derive(Debug)]
pub struct ModelComponent<C> {
    /// Its `config.json`, or what the shapes of its tensors imply.
    pub config: C,
    weights: ComponentWeights,
    content_key: TryOnceLock<String>,
}

/// The weights of a component of any kind.
#[derive(Debug)]
pub struct ComponentWeights {
    /// Its folder or file; in a packed model, the path it would have if the model were a folder.
    pub path: PathBuf,
    component: Component,
    /// The tensors it may have; `None` if they are not checked.
    known: Option<KnownTensors>,
    /// The file that holds the whole model, if it is packed into one.
    packed: Option<Arc<WeightSource>>,
    opened: TryOnceLock<WeightSource>,
    fingerprint: TryOnceLock<String>,
}

impl<C> Deref for ModelComponent<C> {
    type Target = ComponentWeights;

    fn deref(&self) -> &ComponentWeights {
        &self.weights
    }
}

impl<C> ModelComponent<C> {
    fn new(config: C, weights: ComponentWeights) -> ModelComponent<C> {
        ModelComponent { config, weights, content_key: TryOnceLock::new() }
    }

    /// Creates a component whose files are opened on first use.
    pub(super) fn lazy(path: PathBuf, config: C) -> ModelComponent<C>
    where
        C: ComponentConfig,
    {
        let known = Some(config.tensors());
        ModelComponent::new(
            config,
            ComponentWeights { known, ..ComponentWeights::unchecked(path, C::COMPONENT) },
        )
    }

    /// Creates a component of a packed model. The last element of `path` is the prefix of its tensor names.
    pub(super) fn packed(file: &Arc<WeightSource>, path: PathBuf, config: C) -> ModelComponent<C>
    where
        C: ComponentConfig,
    {
        let ModelComponent { config, weights, .. } = ModelComponent::lazy(path, config);
        ModelComponent::new(config, ComponentWeights { packed: Some(Arc::clone(file)), ..weights })
    }

    /// Creates a component from open weights, whose tensors are not checked.
    pub fn from_weights(
        path: PathBuf,
        config: C,
        component: Component,
        weights: WeightSource,
    ) -> ModelComponent<C> {
        let unchecked = ComponentWeights::unchecked(path, component);
        ModelComponent::new(config, ComponentWeights { opened: weights.into(), ..unchecked })
    }

    /// Returns a hash of everything that its results depend on: the configuration as understood, and every byte of its
    /// weights. Reads them on first use, unless their hash is among those remembered.
    pub fn content_key(&self, remembered: &ContentHashes) -> Result<&str>
    where
        C: fmt::Debug,
    {
        let key = || {
            let hash = remembered.of(self.weights()?);
            // All fields: one that is added to a configuration can't be forgotten here.
            Ok::<_, Error>(sha256(format!("kiln component 1\n{hash}\n{:?}", self.config).as_bytes()))
        };
        Ok(self.content_key.get_or_try_init(key)?.as_str())
    }
}

impl ComponentWeights {
    fn unchecked(path: PathBuf, component: Component) -> ComponentWeights {
        ComponentWeights {
            path,
            component,
            known: None,
            packed: None,
            opened: TryOnceLock::new(),
            fingerprint: TryOnceLock::new(),
        }
    }

    /// Returns the weights under Kiln's tensor names. Opens the files on first use; a tensor that the model does not have is
    /// an error.
    pub fn weights(&self) -> Result<&WeightSource> {
        self.opened.get_or_try_init(|| {
            let source = match &self.packed {
                None => WeightSource::open(&self.path)?,
                Some(file) => {
                    let name = self.path.file_name().unwrap_or_default().to_string_lossy();
                    let missing =
                        || Error::config(file.path(), format!("it has no tensors named `{name}.…`"));
                    file.subtree(&name).ok_or_else(missing)?
                }
            };
            // Unrecognized weights fail tensor by tensor when they are loaded.
            let Some(weights) = source.component(self.component)? else { return Ok(source) };
            self.check_tensors(&weights)?;
            Ok(weights)
        })
    }

    /// Checks that the model has all of the weights' tensors. Returns a note about those that are left out.
    fn check_tensors(&self, weights: &WeightSource) -> Result<Option<String>> {
        let check = |known| weights.check_tensors(self.component, known);
        Ok(self.known.as_ref().map(check).transpose()?.flatten())
    }

    /// Returns a note about tensors of its files that are left out; `None` if there are none or it can't be opened.
    pub fn note(&self) -> Option<String> {
        self.check_tensors(self.weights().ok()?).ok().flatten()
    }

    /// Returns a hash that identifies its weights in recipes.
    pub fn fingerprint(&self) -> Result<&str> {
        let fingerprint = || Ok::<_, Error>(self.weights()?.fingerprint()?);
        Ok(self.fingerprint.get_or_try_init(fingerprint)?.as_str())
    }

    /// Returns the text of its `config.json`, from its folder, the packed model or its file's metadata.
    pub fn config_text(&self) -> Option<String> {
        let in_packed = format!("{}/config.json", self.component.folder());
        let packed = || self.packed.as_ref()?.metadata().get(&in_packed).cloned();
        let stored = || self.weights().ok()?.metadata().get(&config_key(self.component)).cloned();
        let beside = || std::fs::read_to_string(config_file(&self.path)?).ok();
        beside().or_else(packed).or_else(stored)
    }

    /// Returns the size of its files in bytes, 0 if they can't be read.
    pub fn file_bytes(&self) -> u64 {
        let Ok(source) = self.weights() else { return 0 };
        source.files().filter_map(|file| Some(file.metadata().ok()?.len())).sum()
    }
}

/// The configuration of one kind of component, and the names that components of this kind go by.
pub trait ComponentConfig: DeserializeOwned {
    /// The kind of component.
    const COMPONENT: Component;
    /// Other folders that ComfyUI keeps it in.
    const COMFYUI_FOLDERS: &'static [&'static str];

    /// Derives the configuration from tensor shapes; `None` if a tensor that every such component has is missing.
    fn from_tensors(source: &WeightSource) -> Option<Self>;

    /// Lists the tensors of such a component.
    fn tensors(&self) -> KnownTensors;

    /// Returns what is wrong with the configuration.
    fn problem(&self) -> Option<String>;

    /// Names the component by what decides whether it fits a model.
    fn summary(&self) -> String;
}

macro_rules! component_config {
    ($config:ty, $component:expr, $comfyui:expr, $summary:expr) => {
        impl ComponentConfig for $config {
            const COMPONENT: Component = $component;
            const COMFYUI_FOLDERS: &'static [&'static str] = &$comfyui;

            fn from_tensors(source: &WeightSource) -> Option<Self> {
                <$config>::from_tensors(source)
            }

            fn tensors(&self) -> KnownTensors {
                <$config>::tensors(self)
            }

            fn problem(&self) -> Option<String> {
                <$config>::problem(self)
            }

            fn summary(&self) -> String {
                let summary: fn(&$config) -> String = $summary;
                summary(self)
            }
        }
    };
}

component_config!(transformer::Config, Component::Transformer, [], |c| {
    format!("a transformer of dim {}", c.dim())
});
component_config!(text_encoder::Config, Component::TextEncoder, ["text_encoders", "clip"], |c| {
    format!("{} with hidden size {}", c.encoder(), c.hidden_size)
});
component_config!(vae::Config, Component::Vae, [], |c| {
    format!("an autoencoder with {} channels", c.token_channels())
});

/// Returns the metadata key under which a file has the `config.json` of the component it was converted from: not all
/// settings can be read from its tensors.
pub fn config_key(component: Component) -> String {
    format!("kiln.config.{}", component.folder())
}

/// Returns the `config.json` that describes the weights at `path`, if there is one.
pub(super) fn config_file(path: &Path) -> Option<PathBuf> {
    let file = WeightSource::config_folder(path)?.join("config.json");
    file.is_file().then_some(file)
}

/// Returns the configuration of the component at `path`: its `config.json`, else the one in its metadata, else what its
/// tensors imply. `None` if a tensor that every such component has is missing.
pub(super) fn config_of<C: ComponentConfig>(weights: &WeightSource, path: &Path) -> Result<Option<C>> {
    if let Some(file) = config_file(path) {
        return Ok(Some(config::read(&file)?));
    }
    match weights.metadata().get(&config_key(C::COMPONENT)) {
        Some(text) => Ok(Some(config::parse(path, text.as_bytes())?)),
        None => Ok(C::from_tensors(weights)),
    }
}

/// Opens a component: a file, or a folder that may have a `config.json`.
pub(super) fn open_component<C: ComponentConfig>(
    path: &Path,
    sources: &SourceCache,
) -> Result<ModelComponent<C>> {
    let source = sources.require_component(path, C::COMPONENT)?;
    let family = source.family().name;
    let missing = || format!("tensors that every {family} {} has are missing", C::COMPONENT);
    let config: C = config_of(&source, path)?.ok_or_else(|| Error::config(path, missing()))?;
    if let Some(what) = config.problem() {
        return Err(Error::config(path, what));
    }
    let component = ModelComponent::lazy(path.to_path_buf(), config);
    component.check_tensors(&source)?;
    let weights = ComponentWeights { opened: source.into(), ..component.weights };
    Ok(ModelComponent { weights, ..component })
}

/// Opens a text encoder: a file, its folder, or a model's folder with one.
pub(crate) fn open_text_encoder(path: &Path) -> Result<ModelComponent<text_encoder::Config>> {
    let inside = path.join(Component::TextEncoder.folder());
    let path = if inside.is_dir() { &inside } else { path };
    open_component(path, &SourceCache::default())
}

/// A component in a file or folder, checked as a model's own.
pub struct ComponentFile {
    /// Its weights under Kiln's tensor names.
    pub weights: WeightSource,
    /// The text of its `config.json`.
    pub config: Option<String>,
    /// A note about tensors that are left out.
    pub note: Option<String>,
}

impl ComponentFile {
    /// Opens a component of the file or folder at `path`. The error is the one that loading it as part of a model gives.
    pub fn open(path: &Path, component: Component) -> Result<ComponentFile> {
        match component {
            Component::Transformer => ComponentFile::open_as::<transformer::Config>(path),
            Component::TextEncoder => ComponentFile::open_as::<text_encoder::Config>(path),
            Component::Vae => ComponentFile::open_as::<vae::Config>(path),
        }
    }

    fn open_as<C: ComponentConfig>(path: &Path) -> Result<ComponentFile> {
        let component = open_component::<C>(path, &SourceCache::default())?;
        let (config, note) = (component.config_text(), component.note());
        Ok(ComponentFile { weights: component.weights()?.clone(), config, note })
    }
}

/// The weight files opened while a model is assembled. Each is opened once, however often it is inspected.
#[derive(Default)]
pub(super) struct SourceCache {
    sources: RefCell<HashMap<PathBuf, Arc<WeightSource>>>,
}

impl SourceCache {
    /// Opens the file or folder at `path`.
    pub fn open(&self, path: &Path) -> Result<Arc<WeightSource>> {
        if let Some(source) = self.sources.borrow().get(path) {
            return Ok(Arc::clone(source));
        }
        let source = Arc::new(WeightSource::open(path)?);
        self.sources.borrow_mut().insert(path.to_path_buf(), Arc::clone(&source));
        Ok(source)
    }

    /// Opens a component of the file at `path`; `None` if the file does not contain it.
    pub fn component(&self, path: &Path, component: Component) -> Result<Option<WeightSource>> {
        Ok(self.open(path)?.component(component)?)
    }

    /// Opens a component of a file that must contain it.
    pub fn require_component(&self, path: &Path, component: Component) -> Result<WeightSource> {
        let source = self.open(path)?;
        let wrong = || kiln_weights::Error::WrongComponent {
            file: source.path().to_path_buf(),
            component,
            found: source.describe(),
        };
        Ok(source.component(component)?.ok_or_else(wrong)?)
    }
}
