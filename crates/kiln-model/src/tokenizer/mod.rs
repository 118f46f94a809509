//! Tokenizing prompts as FLUX.2's models were trained.
//!
//! ```text
//! prompt ──template of the text encoder's family──▶ text ──byte-level BPE──▶ ids ──truncation, padding──▶ `max` ids
//! ```
//! Easy to get wrong: special tokens in a prompt are parsed as such, so a typed padding token has the padding's id, but is
//! not padding. That's why the range of the real tokens is kept beside the ids. Qwen3 pads on the right, Mistral on the left;
//! both are truncated on the right.

mod bpe;
mod built_in;
mod byte_level;
mod gguf;
mod mistral;
mod tekken;
mod template;
#[cfg(test)]
mod tests;
mod tokenizer_json;
mod upsampling;
mod vocab;

use std::ops::Range;
use std::path::PathBuf;

use kiln_weights::WeightSource;
use serde::Deserialize;

use crate::{Error, Result, TextEncoderFamily};
use byte_level::ByteLevelTokenizer;
use template::{PaddingSide, Template};
pub use upsampling::{Conversation, system_message};

/// Largest number of tokens of a prompt, as trained.
pub const MAX_TOKENS: usize = 512;

/// The fields of `tokenizer_config.json` that matter here.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct TokenizerConfig {
    pad_token: Option<PadToken>,
    /// A huge float means "no limit".
    #[serde(default)]
    model_max_length: Option<f64>,
}

impl TokenizerConfig {
    /// Default number of tokens that prompts are truncated or padded to: as trained, or less for smaller models.
    pub fn default_tokens(&self) -> usize {
        self.model_max_length.map_or(MAX_TOKENS, |n| (n as usize).clamp(1, MAX_TOKENS))
    }
}

/// The padding token, as a string or as an added token.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum PadToken {
    Name(String),
    Added { content: String },
}

impl PadToken {
    fn content(&self) -> &str {
        match self {
            PadToken::Name(content) | PadToken::Added { content } => content,
        }
    }
}

/// A model's own tokenizer, not parsed yet.
#[derive(Clone, Debug)]
pub struct TokenizerFiles {
    /// The file it comes from, for error messages.
    pub path: PathBuf,
    /// Vocabulary and merges.
    pub tokenizer: TokenizerData,
    /// `tokenizer_config.json`.
    pub config: TokenizerConfig,
}

/// The vocabulary of a tokenizer in one of the formats that it is published in.
#[derive(Clone, Debug)]
pub enum TokenizerData {
    /// The bytes of a `tokenizer.json` or `tekken.json`.
    Json(Vec<u8>),
    /// A text encoder's file that holds it: a `tekken.json` as a tensor, or the metadata of a GGUF file.
    Embedded(WeightSource),
}

/// The tensor of a text encoder's file that holds a `tekken.json`.
const TEKKEN_TENSOR: &str = "tekken_model";

impl TokenizerFiles {
    /// The tokenizer inside a text encoder's file, if there is one.
    pub fn embedded(source: &WeightSource) -> Option<TokenizerFiles> {
        let is_there = source.contains(TEKKEN_TENSOR) || source.metadata().contains_key(gguf::TOKENS);
        is_there.then(|| TokenizerFiles {
            path: source.path().to_owned(),
            tokenizer: TokenizerData::Embedded(source.clone()),
            config: TokenizerConfig::default(),
        })
    }
}

/// A tokenized prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Ids, padding included.
    pub ids: Vec<u32>,
    /// The ids from the prompt and its template; those before and behind are padding.
    pub real: Range<usize>,
}

/// Turns prompts into [`Tokens`].
pub struct PromptTokenizer {
    tokenizer: ByteLevelTokenizer,
    template: &'static Template,
    padding: u32,
}

impl PromptTokenizer {
    /// Opens a model's own tokenizer.
    pub fn open(family: TextEncoderFamily, files: &TokenizerFiles) -> Result<Self> {
        let tokenizer = match &files.tokenizer {
            TokenizerData::Json(json) => parse(json),
            TokenizerData::Embedded(source) => read_embedded(source),
        };
        let padding = files.config.pad_token.as_ref().map(PadToken::content);
        tokenizer
            .and_then(|tokenizer| Self::new(family, tokenizer, padding))
            .map_err(|problem| Error::config(&files.path, format!("tokenizer: {problem}")))
    }

    /// Opens the family's tokenizer that is built into this crate.
    pub fn built_in(family: TextEncoderFamily) -> Result<Self> {
        let tokenizer = built_in::open(family);
        tokenizer.and_then(|tokenizer| Self::new(family, tokenizer, None)).map_err(Error::Tokenizer)
    }

    fn new(
        family: TextEncoderFamily,
        tokenizer: ByteLevelTokenizer,
        padding: Option<&str>,
    ) -> Result<Self, String> {
        let template = Template::of(family);
        if let Some(token) = template.required.iter().find(|token| tokenizer.id(token).is_none()) {
            return Err(format!("there is no token `{token}`, which {family}'s template has"));
        }
        let padding = padding.unwrap_or(template.padding);
        let padding =
            tokenizer.id(padding).ok_or_else(|| format!("there is no padding token `{padding}`"))?;
        Ok(PromptTokenizer { tokenizer, template, padding })
    }

    /// Tokenizes a prompt to exactly `max` ids.
    pub fn encode(&self, prompt: &str, max: usize) -> Result<Tokens> {
        if max == 0 {
            return Err(Error::request("the number of text tokens must be at least 1"));
        }
        let mut ids = self.ids(prompt)?;
        ids.truncate(max);
        let (real, padding) = (ids.len(), max - ids.len());
        let start = match self.template.padding_side {
            PaddingSide::Left => padding,
            PaddingSide::Right => 0,
        };
        ids.resize(max, self.padding);
        ids.rotate_right(start);
        Ok(Tokens { ids, real: start..start + real })
    }

    /// Counts the tokens of a prompt before truncation, including the template.
    pub fn count(&self, prompt: &str) -> Result<usize> {
        Ok(self.ids(prompt)?.len())
    }

    /// Returns the text of ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids)
    }

    /// Tokenizes a prompt in its template.
    fn ids(&self, prompt: &str) -> Result<Vec<u32>> {
        self.tokenizer.ids(&self.template.apply(prompt)).map_err(Error::Tokenizer)
    }
}

/// Parses a `tokenizer.json` or `tekken.json`.
fn parse(json: &[u8]) -> Result<ByteLevelTokenizer, String> {
    if tekken::is_tekken(json) { tekken::parse(json) } else { tokenizer_json::parse(json) }
}

/// Reads the tokenizer inside a text encoder's file.
fn read_embedded(source: &WeightSource) -> Result<ByteLevelTokenizer, String> {
    match source.byte_tensor(TEKKEN_TENSOR).map_err(|error| error.to_string())? {
        Some(json) => tekken::parse(&json).map_err(|problem| format!("tensor `{TEKKEN_TENSOR}`: {problem}")),
        None => gguf::read(source),
    }
}
