//! Prompts to token ids, as the klein models were trained on them.
//!
//! The prompt is put raw into Qwen3's chat template (one user message, thinking switched off), tokenized without
//! further special tokens, cut at `max` tokens and right-padded. Special tokens typed into a prompt are parsed as such.
//! How many tokens are real is kept beside the ids: a typed `<|endoftext|>` has the padding's id but is no padding.

mod built_in;
mod pairs;
mod read;

use std::path::PathBuf;

use serde::Deserialize;

use crate::{Error, Result};

/// Most tokens a prompt may have, as trained.
pub const MAX_TOKENS: usize = 512;

const BEFORE: &str = "<|im_start|>user\n";
const AFTER: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
const PADDING: &str = "<|endoftext|>";

/// What matters of `tokenizer_config.json`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct TokenizerConfig {
    pad_token: Option<PadToken>,
    /// Written as a float where it means "no limit".
    #[serde(default)]
    model_max_length: Option<f64>,
}

impl TokenizerConfig {
    /// The length texts are cut or padded to when none is asked for: as trained, or less for smaller models.
    pub fn default_tokens(&self) -> usize {
        self.model_max_length.map_or(MAX_TOKENS, |n| (n as usize).clamp(1, MAX_TOKENS))
    }
}

/// The padding's name, written plainly or as an added token.
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

/// A tokenizer's two files, unread.
#[derive(Clone, Debug)]
pub struct TokenizerFiles {
    /// Where `tokenizer.json` is, for messages.
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
    /// How many of them come from the prompt and its template.
    pub real: usize,
}

/// Turns prompts into [`Tokens`].
pub struct PromptTokenizer {
    tokenizer: read::Either,
    padding: u32,
}

impl PromptTokenizer {
    /// From a model's own files.
    pub fn open(files: &TokenizerFiles) -> Result<Self> {
        let padding = files.config.pad_token.as_ref().map_or(PADDING, PadToken::content);
        Self::from_json(&files.tokenizer, padding).map_err(|e| Error::config(&files.path, e.to_string()))
    }

    /// The Qwen3 tokenizer that is part of this crate.
    pub fn built_in() -> Result<Self> {
        Self::from_json(built_in::json()?.as_bytes(), PADDING)
    }

    fn from_json(json: &[u8], padding: &str) -> Result<Self> {
        let tokenizer = read::read(json).map_err(|e| Error::Tokenizer(e.to_string()))?;
        let padding = tokenizer
            .id(padding)
            .ok_or_else(|| Error::Tokenizer(format!("there is no `{padding}` token to pad with")))?;
        Ok(PromptTokenizer { tokenizer, padding })
    }

    /// The ids of a prompt, exactly `max` of them.
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

    /// How many tokens the prompt has before it is cut, its template included.
    pub fn count(&self, prompt: &str) -> Result<usize> {
        Ok(self.ids(prompt)?.len())
    }

    /// All ids of a prompt in its template.
    fn ids(&self, prompt: &str) -> Result<Vec<u32>> {
        let text = format!("{BEFORE}{prompt}{AFTER}");
        self.tokenizer.ids(&text).map_err(|e| Error::Tokenizer(e.to_string()))
    }
}
