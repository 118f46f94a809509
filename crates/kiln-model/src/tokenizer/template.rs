//! The text around a prompt, and the padding behind or before it, as each family of text encoders was trained.

use std::borrow::Cow;

use crate::TextEncoderFamily;

/// How a prompt becomes the text that is tokenized, and how its ids are padded.
pub(super) struct Template {
    start: &'static str,
    end: &'static str,
    /// A special token that is deleted from a prompt; others are parsed as such.
    deleted: Option<&'static str>,
    /// Tokens that a tokenizer of the family has; without them the template would be tokenized as text.
    pub required: &'static [&'static str],
    /// The padding token, unless the tokenizer's configuration names another.
    pub padding: &'static str,
    pub padding_side: PaddingSide,
}

/// Where padding is put. Truncation is always on the right.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PaddingSide {
    Left,
    Right,
}

/// One user message of Qwen3's chat template, with thinking disabled.
const QWEN3: Template = Template {
    start: "<|im_start|>user\n",
    end: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    deleted: None,
    required: &[],
    padding: "<|endoftext|>",
    padding_side: PaddingSide::Right,
};

/// The system message of dev's pipeline and one user message. An `[IMG]` would stand for an image that is not there.
const MISTRAL: Template = Template {
    start: "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses \
            focusing on object relationships, object\nattribution and actions without speculation.\
            [/SYSTEM_PROMPT][INST]",
    end: "[/INST]",
    deleted: Some("[IMG]"),
    required: &["<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"],
    padding: "<pad>",
    padding_side: PaddingSide::Left,
};

impl Template {
    pub fn of(family: TextEncoderFamily) -> &'static Template {
        match family {
            TextEncoderFamily::Qwen3 => &QWEN3,
            TextEncoderFamily::Mistral => &MISTRAL,
        }
    }

    /// Inserts a prompt.
    pub fn apply(&self, prompt: &str) -> String {
        // One pass: what a deletion joins together stays.
        let prompt = match self.deleted {
            Some(token) => Cow::Owned(prompt.replace(token, "")),
            None => Cow::Borrowed(prompt),
        };
        [self.start, &prompt, self.end].concat()
    }
}
