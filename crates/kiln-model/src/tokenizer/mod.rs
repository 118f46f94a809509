//! Tokenizing prompts as the klein models were trained.
//!
//! The prompt is inserted as it is into Qwen3's chat template (one user message, thinking disabled), tokenized without
//! further special tokens, truncated to `max` tokens and right-padded. Special tokens in a prompt are parsed as such. The
//! number of real tokens is kept beside the ids: a typed `<|endoftext|>` has the padding's id, but is not padding.

mod bpe;
mod built_in;
mod byte_level;
mod parse;

use std::path::PathBuf;

use serde::Deserialize;

use crate::{Error, Result};

/// Largest number of tokens of a prompt, as trained.
pub const MAX_TOKENS: usize = 512;

const TEMPLATE_START: &str = "<|im_start|>user\n";
const TEMPLATE_END: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
const PADDING: &str = "<|endoftext|>";

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

/// The files of a tokenizer, not parsed yet.
#[derive(Clone, Debug)]
pub struct TokenizerFiles {
    /// Path of `tokenizer.json`, for error messages.
    pub path: PathBuf,
    /// Its bytes.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`.
    pub config: TokenizerConfig,
}

/// A tokenized prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Ids, padding included.
    pub ids: Vec<u32>,
    /// Number of ids from the prompt and its template; the rest is padding.
    pub real: usize,
}

/// Turns prompts into [`Tokens`].
pub struct PromptTokenizer {
    tokenizer: byte_level::ByteLevelTokenizer,
    padding: u32,
}

impl PromptTokenizer {
    /// Opens a model's own tokenizer.
    pub fn open(files: &TokenizerFiles) -> Result<Self> {
        let padding = files.config.pad_token.as_ref().map_or(PADDING, PadToken::content);
        Self::from_json(&files.tokenizer, padding).map_err(|e| Error::config(&files.path, e.to_string()))
    }

    /// Opens the Qwen3 tokenizer that is built into this crate.
    pub fn built_in() -> Result<Self> {
        Self::from_json(built_in::json()?.as_bytes(), PADDING)
    }

    fn from_json(json: &[u8], padding: &str) -> Result<Self> {
        let tokenizer = parse::parse(json).map_err(Error::Tokenizer)?;
        let padding = tokenizer
            .id(padding)
            .ok_or_else(|| Error::Tokenizer(format!("there is no padding token `{padding}`")))?;
        Ok(PromptTokenizer { tokenizer, padding })
    }

    /// Tokenizes a prompt to exactly `max` ids.
    pub fn encode(&self, prompt: &str, max: usize) -> Result<Tokens> {
        if max == 0 {
            return Err(Error::request("the number of text tokens must be at least 1"));
        }
        let mut ids = self.ids(prompt)?;
        ids.truncate(max);
        let real = ids.len();
        ids.resize(max, self.padding);
        Ok(Tokens { ids, real })
    }

    /// Counts the tokens of a prompt before truncation, including the template.
    pub fn count(&self, prompt: &str) -> Result<usize> {
        Ok(self.ids(prompt)?.len())
    }

    /// Tokenizes a prompt in its template.
    fn ids(&self, prompt: &str) -> Result<Vec<u32>> {
        let text = format!("{TEMPLATE_START}{prompt}{TEMPLATE_END}");
        self.tokenizer.ids(&text).map_err(Error::Tokenizer)
    }
}
