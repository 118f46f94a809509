//! The naming schemes of files, and the model's name for each of their tensors.
//!
//! A component is recognized by one anchor tensor that its naming scheme always has, behind any prefix; ComfyUI's
//! checkpoints hold several components, each with its own prefix. The model's own names are those of diffusers and
//! transformers; of a text encoder that reads images, too, those that its language model would have alone.
//!
//! Names are translated once, when a component is opened: a fused q/k/v becomes three views of its rows, swapped halves two.

mod module_names;
mod text_encoder;
mod vae;

use std::fmt;

use kiln_family::{FAMILIES, Family, ModuleNames};

pub(crate) use module_names::{View, parse_index};
pub(crate) use text_encoder::{GGUF_SETTINGS, HEAD_DIM, Q_NORM, TEKKEN, is_beside_layers};

/// A component of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// The transformer.
    Transformer,
    /// The text encoder.
    TextEncoder,
    /// The autoencoder.
    Vae,
}

impl Component {
    /// All of them.
    pub const ALL: [Component; 3] = [Component::Transformer, Component::TextEncoder, Component::Vae];

    /// Its folder in diffusers' layout.
    pub fn folder(self) -> &'static str {
        match self {
            Component::Transformer => "transformer",
            Component::TextEncoder => "text_encoder",
            Component::Vae => "vae",
        }
    }

    /// The name of its weights in that folder, without an ending.
    pub fn weights_stem(self) -> &'static str {
        if self == Component::TextEncoder { "model" } else { "diffusion_pytorch_model" }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Component::Transformer => "transformer",
            Component::TextEncoder => "text encoder",
            Component::Vae => "VAE",
        })
    }
}

/// The tensor names that some programs use for a component.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamingScheme {
    pub component: Component,
    /// The family whose transformers have these names; `None` for names that a network has in every family.
    pub family: Option<&'static Family>,
    /// The programs or people it comes from.
    pub name: &'static str,
    /// The tensor by which it is recognized.
    anchor: &'static str,
    /// The prefix that the model adds to names that are not in `modules`.
    model_prefix: &'static str,
    /// The modules whose names differ from the model's.
    modules: &'static [ModuleNames],
}

impl NamingScheme {
    const fn new(component: Component, name: &'static str, anchor: &'static str) -> NamingScheme {
        NamingScheme { component, family: None, name, anchor, model_prefix: "", modules: &[] }
    }
}

const LLAMA_CPP: &str = "llama.cpp";

/// The names of the networks.
const NETWORKS: [NamingScheme; 5] = [
    NamingScheme::new(Component::Transformer, "diffusers", "single_stream_modulation.linear.weight"),
    NamingScheme {
        model_prefix: "model.",
        ..NamingScheme::new(Component::TextEncoder, "transformers", "layers.0.self_attn.q_proj.weight")
    },
    NamingScheme {
        modules: text_encoder::LLAMA_CPP,
        ..NamingScheme::new(Component::TextEncoder, LLAMA_CPP, "blk.0.attn_q.weight")
    },
    NamingScheme::new(Component::Vae, "diffusers", "decoder.mid_block.resnets.0.conv1.weight"),
    NamingScheme {
        modules: vae::LATENT_DIFFUSION,
        ..NamingScheme::new(Component::Vae, "latent diffusion", "decoder.mid.block_1.conv1.weight")
    },
];

/// All naming schemes: those of the networks, and those of each family's transformer.
fn schemes() -> impl Iterator<Item = NamingScheme> {
    let of_family = |family: &'static Family| {
        family.transformer.layouts.iter().map(move |layout| NamingScheme {
            family: Some(family),
            modules: layout.modules,
            ..NamingScheme::new(Component::Transformer, layout.name, layout.anchor)
        })
    };
    let [transformer, others @ ..] = NETWORKS;
    std::iter::once(transformer)
        .chain(FAMILIES.iter().flat_map(move |family| of_family(family)))
        .chain(others)
}

/// A component found in a file.
#[derive(Clone, Debug)]
pub(crate) struct DetectedComponent {
    pub scheme: NamingScheme,
    /// What the file has before each name of the scheme.
    pub prefix: String,
}

/// Detects the components of a file with these tensor names.
pub(crate) fn detect<'n>(names: impl Iterator<Item = &'n str> + Clone) -> Vec<DetectedComponent> {
    // Averages of the weights have names like theirs.
    let names = names.filter(|name| !is_training_leftover(name));
    let mut detected: Vec<DetectedComponent> = Vec::new();
    for scheme in schemes() {
        let prefix = |name: &'n str| {
            name.strip_suffix(scheme.anchor).filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
        };
        if detected.iter().any(|d| d.scheme.component == scheme.component) {
            continue;
        }
        // Of several, the outermost; the others are tensors that nobody reads.
        if let Some(prefix) = names.clone().filter_map(prefix).min_by_key(|prefix| prefix.len()) {
            detected.push(DetectedComponent { scheme, prefix: prefix.to_owned() });
        }
    }
    detected
}

/// The component that the file's tensor `name` belongs to: of those whose prefix it has, the one with the longest.
pub(crate) fn owner<'d>(detected: &'d [DetectedComponent], name: &str) -> Option<&'d DetectedComponent> {
    let beside = detected.iter().find(|d| d.beside_layers(name).is_some());
    let candidates = detected.iter().filter(|d| name.starts_with(d.prefix.as_str()));
    beside.or_else(|| candidates.max_by_key(|d| d.prefix.len()))
}

/// Whether training left this tensor in a checkpoint. Inference never reads it.
pub(crate) fn is_training_leftover(name: &str) -> bool {
    ["loss.", "model_ema.", "optimizer.", "ema."].iter().any(|prefix| name.starts_with(prefix))
}

/// Whether a component is recognized by this tensor.
pub(crate) fn is_anchor(name: &str) -> bool {
    schemes().any(|scheme| name.ends_with(scheme.anchor))
}

/// A model of no known family that these names belong to.
pub(crate) fn related_model<'n>(mut names: impl Iterator<Item = &'n str>) -> Option<&'static str> {
    let related = |name: &str| {
        let mut all = FAMILIES.iter().flat_map(|family| family.related);
        all.find(|(anchor, _)| name.ends_with(anchor)).map(|(_, model)| *model)
    };
    names.find_map(related)
}

impl DetectedComponent {
    /// The model's tensors in the file's tensor `name`; none for tensors of other components.
    pub fn model_tensors(&self, name: &str) -> Vec<(String, View)> {
        if let Some(beside) = self.beside_layers(name) {
            return vec![(beside.to_owned(), View::Whole)];
        }
        let Some(rest) = name.strip_prefix(self.prefix.as_str()) else { return Vec::new() };
        module_names::to_model(self.scheme.modules, rest)
            .unwrap_or_else(|| vec![(format!("{}{rest}", self.scheme.model_prefix), View::Whole)])
    }

    /// The model's name of a text encoder's tensor that is not inside its language model.
    fn beside_layers<'n>(&self, name: &'n str) -> Option<&'n str> {
        let is_text_encoder = self.scheme.component == Component::TextEncoder;
        if is_text_encoder { text_encoder::beside_layers(&self.prefix, name) } else { None }
    }

    /// Whether llama.cpp's names are the file's.
    pub fn has_llama_cpp_names(&self) -> bool {
        self.scheme.name == LLAMA_CPP
    }
}

/// The names that programs other than diffusers and transformers use for a component of a model of this family.
fn original_names(component: Component, family: &Family) -> &'static [ModuleNames] {
    match component {
        Component::Transformer => family.transformer.layouts.first().map_or(&[], |layout| layout.modules),
        Component::TextEncoder => text_encoder::LLAMA_CPP,
        Component::Vae => vae::LATENT_DIFFUSION,
    }
}

/// The tensor that holds the model's tensor `name` in files with the original names, and which slice of it that is.
pub(crate) fn to_original(component: Component, family: &Family, name: &str) -> Option<(String, View)> {
    module_names::to_file(original_names(component, family), name)
}
