//! The text around a prompt, and the padding behind or before it, as each family of text encoders was trained.

use std::borrow::Cow;

use serde::Deserialize;

use crate::TextEncoderFamily;

/// How a prompt becomes the text that is tokenized, and how its ids are padded.
#[derive(Clone)]
pub(super) struct Template {
    pub start: Cow<'static, str>,
    pub end: Cow<'static, str>,
    /// A special token that is deleted from a prompt; others are parsed as such.
    deleted: Option<&'static str>,
    /// Tokens that a tokenizer of the family has; without them the template would be tokenized as text.
    pub required: &'static [&'static str],
    /// The padding token, unless the tokenizer's configuration names another.
    pub padding: &'static str,
    pub padding_side: Side,
    pub truncation_side: Side,
}

/// Where padding is put, or ids are cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Side {
    #[serde(rename = "left", alias = "Left")]
    Left,
    #[serde(rename = "right", alias = "Right")]
    Right,
}

/// The system message of dev's pipeline.
pub(super) const SYSTEM_MESSAGE: &str = "You are an AI that reasons about image descriptions. You give structured \
                                         responses focusing on object relationships, object\nattribution and actions \
                                         without speculation.";

impl Template {
    pub fn of(family: TextEncoderFamily) -> Template {
        match family {
            // One user message of Qwen3's chat template, with thinking disabled.
            TextEncoderFamily::Qwen3 => Template {
                start: "<|im_start|>user\n".into(),
                end: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n".into(),
                deleted: None,
                required: &[],
                padding: "<|endoftext|>",
                padding_side: Side::Right,
                truncation_side: Side::Right,
            },
            // The system message and one user message. An `[IMG]` would stand for an image that is not there.
            TextEncoderFamily::Mistral => Template {
                start: format!("<s>[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]").into(),
                end: "[/INST]".into(),
                deleted: Some("[IMG]"),
                required: &["<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"],
                padding: "<pad>",
                padding_side: Side::Left,
                truncation_side: Side::Right,
            },
        }
    }

    /// Inserts a prompt.
    pub fn apply(&self, prompt: &str) -> String {
        // One pass: what a deletion joins together stays.
        let prompt = match self.deleted {
            Some(token) => Cow::Owned(prompt.replace(token, "")),
            None => Cow::Borrowed(prompt),
        };
        [&*self.start, &prompt, &*self.end].concat()
    }
}
