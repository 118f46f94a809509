//! What a family is.

use crate::{Alias, TextEncoder, TransformerNames, VariantInfo};

/// A family of models: the same networks and latents, in one or more variants and sizes.
#[derive(Debug)]
pub struct Family {
    /// Its name, as users know it.
    pub name: &'static str,
    /// Its variants, the usual one first.
    pub variants: &'static [&'static VariantInfo],
    /// diffusers' pipelines, by which a `model_index.json` tells the variant; the first that matches.
    pub pipelines: &'static [Pipeline],
    /// Words in the names of files that tell the variant; the first that a name has.
    pub file_words: &'static [(&'static str, &'static VariantInfo)],
    /// How images become tokens.
    pub latent: Latent,
    /// Width and height of the images that its published models are trained for.
    pub full_size: usize,
    /// Maximum number of text, image and reference tokens: what its rotary embedding was trained for.
    pub positions: usize,
    /// How its noise schedule is shifted.
    pub shift: Shift,
    /// The names of its transformer's tensors.
    pub transformer: &'static TransformerNames,
    /// Models that are easily mistaken for one of it, by a tensor that only they have.
    pub related: &'static [(&'static str, &'static str)],
    /// Models whose VAE is easily mistaken for one of it, by latent channels.
    pub related_vaes: &'static [(usize, &'static str)],
    /// Its published models. A family without one is not offered to users.
    pub models: &'static [Alias],
    /// A word in the names of its repositories and pipelines, in lower case and without punctuation.
    pub repository_word: &'static str,
    /// The published model whose text encoder and VAE fit a transformer, by the width of its text tokens.
    pub components_of: &'static [(usize, &'static str)],
    /// The published models by the width of the transformer.
    pub widths: &'static [(usize, &'static str)],
}

/// A pipeline of diffusers.
#[derive(Debug)]
pub struct Pipeline {
    /// Its `_class_name`.
    pub class: &'static str,
    /// Its `is_distilled`; `None` for any.
    pub is_distilled: Option<bool>,
    /// The variant that it is for.
    pub variant: &'static VariantInfo,
}

impl Pipeline {
    /// A pipeline for `variant`.
    pub const fn new(
        class: &'static str,
        is_distilled: Option<bool>,
        variant: &'static VariantInfo,
    ) -> Pipeline {
        Pipeline { class, is_distilled, variant }
    }
}

/// The shift of a noise schedule towards high noise, `mu`, as lines of the number of image tokens: slope and offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shift {
    /// For 10 steps. Between 10 and 200 steps it is interpolated.
    pub at_10_steps: [f64; 2],
    /// For 200 steps.
    pub at_200_steps: [f64; 2],
    /// Above this many tokens the line of 200 steps holds for any number of steps.
    pub max_tokens: f64,
    /// Two points of the line that the model was trained with: tokens and `mu`.
    pub training: [[f64; 2]; 2],
}

/// The geometry of the latents that a transformer works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Pixels of the image along a side of one latent pixel.
    pub scale: usize,
    /// Latent pixels along a side of the patch that makes one token.
    pub patch: usize,
    /// Channels of the latent.
    pub channels: usize,
}

impl Latent {
    /// Returns the pixels along a side of one token. Image sides are multiples of it.
    pub const fn pixels_per_token(self) -> usize {
        self.scale * self.patch
    }

    /// Returns the channels of one token.
    pub const fn token_channels(self) -> usize {
        self.patch * self.patch * self.channels
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name == other.name
    }
}

impl Family {
    /// Returns the full name of its published model whose transformer has this width, such as `FLUX.2 klein 4B`.
    pub fn title_of_width(&self, width: usize) -> Option<String> {
        let (_, name) = self.widths.iter().find(|(known, _)| *known == width)?;
        Some(format!("{} {name}", self.name))
    }

    /// Returns its text encoders, each once.
    pub fn text_encoders(&self) -> Vec<&'static TextEncoder> {
        let mut all: Vec<&TextEncoder> = self.variants.iter().map(|variant| variant.text_encoder).collect();
        all.dedup();
        all
    }
}
