//! Opens models, and assembles them from separate files that are named or found near the transformer.
//!
//! Sizes come from the tensors. Whether a model is distilled can't be read from them: the caller, a `model.toml`, the
//! file's metadata or its name says so, in this order.

use std::path::Path;
use std::sync::Arc;

use kiln_family::Variant;
use kiln_nn::tokenizer::{TokenizerConfig, TokenizerData, TokenizerFiles};
use kiln_nn::{config, text_encoder, transformer, vae};
use kiln_weights::WeightSource;

use super::component::{ModelComponent, SourceCache, open_component};
use super::component_paths::ComponentPaths;
use super::locate::{self, Located};
use super::search::{self, ComponentSearch};
use super::variant::{VariantSource, find_variant};
use super::{Model, diffusers};
use crate::error::{Error, Result};

impl Model {
    /// Opens the model at `path`: a folder in the layout of diffusers or of the Hugging Face cache, a model packed into
    /// one file, a `model.toml`, or a transformer with the other components nearby.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        open(Some(path.as_ref()), &ComponentPaths::default())
    }

    /// Opens the model at `path` with some components replaced; without a path, the model around `paths.transformer`.
    pub fn open_with(path: Option<&Path>, paths: &ComponentPaths) -> Result<Model> {
        open(path, paths)
    }

    /// Opens a model packed into one file.
    pub fn from_packed(source: WeightSource) -> Result<Model> {
        diffusers::open_packed(Arc::new(source))
    }

    /// Creates a model from components that need not come from files, as benchmarks do.
    pub fn from_components(
        name: &str,
        variant: Variant,
        transformer: ModelComponent<transformer::Config>,
        text_encoder: Option<ModelComponent<text_encoder::Config>>,
        vae: Option<ModelComponent<vae::Config>>,
    ) -> Result<Model> {
        let model = Model::new(Path::new(name), variant, transformer, text_encoder, vae);
        model.check_components()?;
        Ok(model)
    }
}

fn open(path: Option<&Path>, paths: &ComponentPaths) -> Result<Model> {
    let sources = &SourceCache::default();
    let located = match (path, &paths.transformer) {
        (Some(path), named) => locate::locate(path, named.is_some(), sources)?,
        (None, Some(transformer)) => Located::Transformer(transformer.clone()),
        (None, None) => return Err(Error::request("no model and no transformer was named")),
    };
    let model = match located {
        Located::Folder(folder) => replace(diffusers::open_folder(&folder)?, paths, sources),
        Located::Packed(source) => replace(diffusers::open_packed(source)?, paths, sources),
        Located::Manifest(file, named) => {
            let variant = named.variant.filter(|_| paths.transformer.is_some());
            let named = ComponentPaths { variant: named.variant.filter(|_| variant.is_none()), ..named };
            assemble(&file, &paths.or(named), variant, sources)
        }
        Located::Transformer(file) => {
            let named = ComponentPaths { transformer: Some(file.clone()), ..ComponentPaths::default() };
            assemble(&file, &paths.or(named), None, sources)
        }
        Located::Components(folder) => assemble(&folder, paths, None, sources),
    };
    Ok(Model { overrides: paths.named_only(), ..model? })
}

/// Replaces components of a model with the named ones.
fn replace(mut model: Model, paths: &ComponentPaths, sources: &SourceCache) -> Result<Model> {
    if paths.is_empty() {
        return Ok(model);
    }
    if let Some(path) = &paths.transformer {
        model.transformer = open_component(path, sources)?;
        let (variant, source) = variant_of(&model.transformer, Some(model.variant))?;
        model.set_variant(variant, source);
    }
    if let Some(path) = &paths.text_encoder {
        model.text_encoder = Some(open_component(path, sources)?);
    }
    if let Some(path) = &paths.vae {
        model.vae = Some(open_component(path, sources)?);
    }
    if let Some(path) = &paths.tokenizer {
        model.tokenizer = Some(read_tokenizer(path)?);
    }
    if let Some(variant) = paths.variant {
        model.set_variant(variant, VariantSource::Stated);
    }
    model.check_components()?;
    Ok(model)
}

/// Returns the variant of a transformer. If it takes the place of the one of a model, `usual` is that model's, which
/// only a clear word overrules.
fn variant_of(
    transformer: &ModelComponent<transformer::Config>,
    usual: Option<Variant>,
) -> Result<(Variant, VariantSource)> {
    let found = find_variant(transformer.weights()?, transformer.config.guidance_embeds)?;
    Ok(match (found, usual) {
        ((_, VariantSource::Stated), _) => found,
        // The first variant is also what a name says that says little.
        ((variant, VariantSource::Name), _) if variant != variant.family.default_variant() => found,
        (_, Some(usual)) => (usual, VariantSource::Stated),
        (_, None) => found,
    })
}

/// Assembles a model around a transformer. Messages name it by `path`; `usual` is the variant of the model whose
/// transformer it replaces.
fn assemble(
    path: &Path,
    paths: &ComponentPaths,
    usual: Option<Variant>,
    sources: &SourceCache,
) -> Result<Model> {
    let Some(file) = &paths.transformer else {
        return Err(Error::config(path, "it names no `transformer`"));
    };
    let transformer: ModelComponent<transformer::Config> = open_component(file, sources)?;
    let config = &transformer.config;
    let (variant, variant_source) = match paths.variant {
        Some(variant) => (variant, VariantSource::Stated),
        None => variant_of(&transformer, usual)?,
    };
    let (default_size, defaults) = diffusers::stored_defaults(transformer.weights()?, variant.family)?;
    let mut near = vec![file.as_path()];
    // A manifest's folder needs no search: it names what is in it.
    if path != file && path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("toml")) {
        near.insert(0, path);
    }
    let mut search = ComponentSearch::new(near, paths, sources);
    let fits = |text: &text_encoder::Config| {
        text.encoder() == variant.text_encoder && text.text_dim() == config.joint_attention_dim
    };
    let text_encoder = search.find(paths.text_encoder.as_deref(), fits)?;
    let fits = |vae: &vae::Config| vae.token_channels() == config.in_channels;
    let vae = search.find(paths.vae.as_deref(), fits)?;
    let tokenizer = match &paths.tokenizer {
        Some(path) => Some(path.clone()),
        None => {
            let text_encoder = text_encoder.iter().map(|component| component.path.as_path());
            text_encoder.chain([file.as_path()]).find_map(search::find_tokenizer)
        }
    };
    let (searched_folders, ambiguous) = (search.searched, search.ambiguous);
    let model = Model {
        tokenizer: tokenizer.map(|path| read_tokenizer(&path)).transpose()?,
        variant_source,
        default_size,
        defaults,
        searched_folders,
        unusable: search.unusable,
        ambiguous,
        ..Model::new(path, variant, transformer, text_encoder, vae)
    };
    model.check_components()?;
    check_tokenizer(&model)?;
    Ok(model)
}

/// Checks that a text encoder with another vocabulary than the built-in tokenizer's comes with its own.
fn check_tokenizer(model: &Model) -> Result<()> {
    let Some(component) = &model.text_encoder else { return Ok(()) };
    let (encoder, found) = (component.config.encoder(), component.config.vocab_size);
    if found >= encoder.vocabulary || model.tokenizer.is_some() || model.embedded_tokenizer().is_some() {
        return Ok(());
    }
    let what = format!(
        "this text encoder has a vocabulary of {found} tokens, fewer than {encoder}'s tokenizer, and there is no \
         `tokenizer.json` of its own next to it"
    );
    Err(Error::config(&component.path, what))
}

/// Reads the tokenizer that belongs to a text encoder's file or folder, if there is one.
pub(crate) fn find_tokenizer(text_encoder: &Path) -> Result<Option<TokenizerFiles>> {
    search::find_tokenizer(text_encoder).map(|path| read_tokenizer(&path)).transpose()
}

/// Reads a `tokenizer.json` or `tekken.json`, or that of a folder, and the `tokenizer_config.json` and
/// `chat_template.jinja` next to it.
fn read_tokenizer(path: &Path) -> Result<TokenizerFiles> {
    let names = || search::TOKENIZERS.iter().map(|name| path.join(name));
    let in_folder =
        || names().find(|file| file.is_file()).unwrap_or_else(|| path.join(search::TOKENIZERS[0]));
    let file = if path.is_dir() { in_folder() } else { path.to_path_buf() };
    let bytes = config::read_bytes(&file)?;
    let settings = file.with_file_name("tokenizer_config.json");
    let config: TokenizerConfig =
        if settings.is_file() { config::read(&settings)? } else { Default::default() };
    let template = file.with_file_name("chat_template.jinja");
    let template = template.is_file().then(|| config::read_bytes(&template)).transpose()?;
    let template = template.map(|text| String::from_utf8_lossy(&text).into_owned());
    let config = config.with_chat_template(template);
    Ok(TokenizerFiles { path: file, tokenizer: TokenizerData::Json(bytes), config })
}
