//! The language models that FLUX.2 takes its text from.

/// The family of a text encoder: decides the tokenizer's template and padding, and the details of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TextEncoderFamily {
    /// Qwen3, the text encoder of klein.
    Qwen3,
    /// Mistral Small 3, the text encoder of dev.
    Mistral,
}
