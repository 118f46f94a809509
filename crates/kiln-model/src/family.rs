//! The language models that FLUX.2 takes its text from.

use std::fmt;

/// The family of a text encoder: decides the tokenizer's template and padding, and the details of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TextEncoderFamily {
    /// Qwen3, the text encoder of klein.
    Qwen3,
    /// Mistral Small 3, the text encoder of dev.
    Mistral,
}

impl fmt::Display for TextEncoderFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TextEncoderFamily::Qwen3 => "Qwen3",
            TextEncoderFamily::Mistral => "Mistral",
        })
    }
}
