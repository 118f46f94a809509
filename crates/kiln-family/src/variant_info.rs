//! What is known of a variant of a family.

use std::fmt;

use crate::TextEncoder;

/// What is known of a variant.
pub struct VariantInfo {
    /// Its name in options and metadata; no other variant of any family has it.
    pub name: &'static str,
    /// Its name in messages.
    pub title: &'static str,
    /// What it is, in the help text.
    pub summary: &'static str,
    /// The text encoder that it is trained with.
    pub text_encoder: &'static TextEncoder,
    /// How it is guided.
    pub guidance: Guidance,
    /// Default number of steps.
    pub steps: usize,
    /// Whether it is distilled to few steps: it can't be trained, and caching steps doesn't pay off.
    pub is_distilled: bool,
    /// Whether reference images are computed once, in the first step, and their keys and values cached.
    pub caches_references: bool,
}

/// How a variant is guided, with the default value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Guidance {
    /// Not at all.
    None,
    /// Classifier-free: a second call of the transformer with the negative prompt, if guidance is above 1.
    ClassifierFree(f32),
    /// Guidance is an input of the transformer.
    Input(f32),
}

impl VariantInfo {
    /// Returns the transformer calls per step: two with classifier-free guidance, which needs a guidance above 1.
    pub fn calls_per_step(&self, guidance: Option<f32>) -> usize {
        if self.takes_negative_prompt() && guidance.is_some_and(|g| g > 1.0) { 2 } else { 1 }
    }

    /// Returns the default guidance; `None` for variants without guidance.
    pub fn default_guidance(&self) -> Option<f32> {
        match self.guidance {
            Guidance::None => None,
            Guidance::ClassifierFree(value) | Guidance::Input(value) => Some(value),
        }
    }

    /// Returns whether a negative prompt has an effect, given enough guidance.
    pub fn takes_negative_prompt(&self) -> bool {
        matches!(self.guidance, Guidance::ClassifierFree(_))
    }

    /// Returns whether guidance is an input of the transformer, which then has tensors for it.
    pub fn embeds_guidance(&self) -> bool {
        matches!(self.guidance, Guidance::Input(_))
    }
}

impl fmt::Debug for VariantInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
