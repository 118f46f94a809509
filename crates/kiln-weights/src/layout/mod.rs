//! Whose names a file has for which part of the model, and what the model calls them.
//!
//! A part is recognised by one tensor that every naming has exactly one of, with whatever prefix before it; ComfyUI's
//! checkpoints have several parts, each under its own. The model's own names are diffusers' and transformers'.

mod rules;
mod text_encoder;
mod transformer;
mod vae;

use std::fmt;

pub(crate) use rules::{Piece, Rule, View};
pub(crate) use text_encoder::SETTINGS;

/// A part of a model.
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

/// The names that one family of programs uses.
#[derive(Debug)]
pub(crate) struct Naming {
    pub component: Component,
    /// Whose they are.
    pub name: &'static str,
    /// The tensor by which they are recognised.
    anchor: &'static str,
    /// What the model has before each of its names.
    ours: &'static str,
    /// What differs from the model's names.
    pub rules: &'static [Rule],
}

const NAMINGS: [Naming; 6] = [
    Naming {
        component: Component::Transformer,
        name: "diffusers",
        anchor: "single_stream_modulation.linear.weight",
        ours: "",
        rules: &[],
    },
    Naming {
        component: Component::Transformer,
        name: "Black Forest Labs",
        anchor: "single_stream_modulation.lin.weight",
        ours: "",
        rules: transformer::ORIGINAL,
    },
    Naming {
        component: Component::TextEncoder,
        name: "transformers",
        anchor: "layers.0.self_attn.q_proj.weight",
        ours: "model.",
        rules: &[],
    },
    Naming {
        component: Component::TextEncoder,
        name: "llama.cpp",
        anchor: "blk.0.attn_q.weight",
        ours: "",
        rules: text_encoder::LLAMA_CPP,
    },
    Naming {
        component: Component::Vae,
        name: "diffusers",
        anchor: "decoder.mid_block.resnets.0.conv1.weight",
        ours: "",
        rules: &[],
    },
    Naming {
        component: Component::Vae,
        name: "latent diffusion",
        anchor: "decoder.mid.block_1.conv1.weight",
        ours: "",
        rules: vae::LATENT_DIFFUSION,
    },
];

/// A naming, and what stands before its names in a file.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub naming: &'static Naming,
    pub prefix: String,
}

/// The parts that a file with these names has.
pub(crate) fn find<'n>(names: impl Iterator<Item = &'n str> + Clone) -> Vec<Found> {
    let mut found: Vec<Found> = Vec::new();
    for naming in &NAMINGS {
        let prefix = |name: &'n str| {
            name.strip_suffix(naming.anchor).filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
        };
        let known = found.iter().any(|f| f.naming.component == naming.component);
        if let (Some(prefix), false) = (names.clone().find_map(prefix), known) {
            found.push(Found { naming, prefix: prefix.to_owned() });
        }
    }
    found
}

/// A relative of FLUX.2 that these names belong to, which is easily mistaken for it.
pub(crate) fn relative<'n>(mut names: impl Iterator<Item = &'n str>) -> Option<&'static str> {
    const RELATIVES: [(&str, &str); 3] = [
        ("double_blocks.0.img_mod.lin.weight", "FLUX.1"),
        ("transformer_blocks.0.norm1_context.linear.weight", "FLUX.1"),
        ("joint_blocks.0.x_block.attn.qkv.weight", "Stable Diffusion 3"),
    ];
    names.find_map(|name| RELATIVES.iter().find(|(anchor, _)| name.ends_with(anchor)).map(|r| r.1))
}

impl Found {
    /// What the model calls a tensor of the file, and how it gets it; nothing for tensors of other parts.
    pub fn translate(&self, name: &str) -> Vec<(String, View)> {
        let Some(rest) = name.strip_prefix(self.prefix.as_str()) else { return Vec::new() };
        match rules::translate(self.naming.rules, rest) {
            Some(pieces) => pieces.into_iter().map(|Piece { name, view }| (name, view)).collect(),
            None => vec![(format!("{}{rest}", self.naming.ours), View::Whole)],
        }
    }
}

/// The rules by which a transformer or text encoder is written for other programs than diffusers and transformers.
pub(crate) fn original(component: Component) -> &'static [Rule] {
    match component {
        Component::Transformer => transformer::ORIGINAL,
        Component::TextEncoder => text_encoder::LLAMA_CPP,
        Component::Vae => vae::LATENT_DIFFUSION,
    }
}

/// [`rules::restore`] for the names of one part.
pub(crate) fn restore(component: Component, name: &str) -> Option<(String, View)> {
    rules::restore(original(component), name)
}
