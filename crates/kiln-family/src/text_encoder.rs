//! The language models that transformers take their text from.

use std::fmt;

use serde::Deserialize;

/// A language model as a text encoder: the details of its layers, its tokenizer, and which of its states a family takes.
pub struct TextEncoder {
    /// Its name.
    pub name: &'static str,
    /// Its names in `model_type` of a `config.json`, the plain one first.
    pub model_types: &'static [&'static str],
    /// Its names in `general.architecture` of GGUF files; the first is written.
    pub architectures: &'static [&'static str],
    /// The published models, by hidden size.
    pub sizes: &'static [(usize, &'static str)],
    /// Words in the names of repositories that hold it alone.
    pub repository_words: &'static [&'static str],
    /// Epsilon of every norm, unless the file says otherwise.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies, unless the file says otherwise.
    pub rope_theta: f64,
    /// Whether query and key heads are normed before the rotary embedding.
    pub has_qk_norms: bool,
    /// Whether its `config.json` states a sliding window that it doesn't use.
    pub states_unused_window: bool,
    /// The numbers of layers after which the states are taken for the transformer; 0 is the embedding.
    pub layers: &'static [usize],
    /// The text around a prompt.
    pub template: Template,
    /// How a tokenizer's own chat template is called.
    pub chat: ChatArguments,
    /// The tokenizer for files without one.
    pub tokenizer: BuiltInTokenizer,
    /// One more than the highest id of that tokenizer.
    pub vocabulary: usize,
    /// Whether published weights hold a tokenizer.
    pub embeds_tokenizer: bool,
    /// Whether it can rewrite prompts.
    pub rewrites_prompts: bool,
}

/// How a prompt becomes the text that is tokenized, and how its ids are padded.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    /// The text before a prompt.
    pub start: &'static str,
    /// The text behind it.
    pub end: &'static str,
    /// A special token that is deleted from a prompt; others are parsed as such.
    pub deleted: Option<&'static str>,
    /// Tokens that the tokenizer must have; without them the template would be tokenized as text.
    pub required: &'static [&'static str],
    /// The padding token, unless the tokenizer's configuration names another.
    pub padding: &'static str,
    /// Where padding is put.
    pub padding_side: Side,
    /// Where ids are cut off.
    pub truncation_side: Side,
}

/// Where padding is put, or ids are cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Side {
    /// Before the text.
    #[serde(rename = "left", alias = "Left")]
    Left,
    /// Behind the text.
    #[serde(rename = "right", alias = "Right")]
    Right,
}

/// The arguments with which a pipeline calls a chat template.
#[derive(Clone, Copy, Debug)]
pub struct ChatArguments {
    /// The system message before the user's. With one, contents are lists of parts instead of texts.
    pub system: Option<&'static str>,
    /// `add_generation_prompt`.
    pub generation_prompt: bool,
    /// `enable_thinking`, if it is given.
    pub thinking: Option<bool>,
    /// Whether a template that starts with the first token replaces what the tokenizer's file puts around a text.
    pub starts_itself: bool,
}

/// A tokenizer in the program, compressed with zstd.
#[derive(Clone, Copy)]
pub enum BuiltInTokenizer {
    /// There is none: models must have their own.
    None,
    /// A `tokenizer.json` whose vocabulary follows from its merges.
    Merges(&'static [u8]),
    /// Mistral's tokens as pairs of ranks.
    RankPairs(&'static [u8]),
}

impl TextEncoder {
    /// Returns the text encoder with this `model_type`.
    pub fn of_type(model_type: &str) -> Option<&'static TextEncoder> {
        crate::text_encoders().find(|encoder| encoder.model_types.contains(&model_type))
    }
}

impl PartialEq for TextEncoder {
    fn eq(&self, other: &TextEncoder) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for TextEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Display for TextEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
