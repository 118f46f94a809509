//! Tokenizing prompts as FLUX.2's models were trained.
//!
//! ```text
//! prompt ──the text encoder's template──▶ text ──byte-level BPE──▶ ids ──truncation, padding──▶ `max` ids
//! ```
//! Easy to get wrong: special tokens in a prompt are parsed as such, so a typed padding token has the padding's id, but is
//! not padding. That's why the range of the real tokens is kept beside the ids. Qwen3 pads on the right, Mistral on the left;
//! both are truncated on the right. A model's own tokenizer may say otherwise, and have another template: what diffusers
//! follows is followed, or refused by name.

mod bpe;
mod built_in;
mod byte_level;
mod chat_template;
mod config;
#[cfg(test)]
mod diffusers_tests;
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

use kiln_family::{Side, TextEncoder};
use kiln_weights::WeightSource;

use crate::{Error, Result};
use byte_level::ByteLevelTokenizer;
pub use config::{MAX_TOKENS, TokenizerConfig};
use template::Template;
pub use upsampling::{Conversation, system_message};

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
    template: Template,
    padding: u32,
    /// Ids before and behind those of the text, as the tokenizer's file says.
    around: [Vec<u32>; 2],
}

impl PromptTokenizer {
    /// Opens a model's own tokenizer.
    pub fn open(encoder: &TextEncoder, files: &TokenizerFiles) -> Result<Self> {
        let tokenizer = match &files.tokenizer {
            TokenizerData::Json(json) => parse(json),
            TokenizerData::Embedded(source) => read_embedded(source),
        };
        let config = match &files.tokenizer {
            TokenizerData::Json(json) if !tekken::is_tekken(json) => files.config.clone(),
            _ => files.config.padding_only(),
        };
        tokenizer
            .and_then(|tokenizer| Self::new(encoder, tokenizer, &config))
            .map_err(|problem| Error::config(&files.path, format!("tokenizer: {problem}")))
    }

    /// Opens a text encoder's tokenizer that is built into the program.
    pub fn built_in(encoder: &TextEncoder) -> Result<Self> {
        let tokenizer = built_in::open(encoder);
        let config = TokenizerConfig::default();
        tokenizer.and_then(|tokenizer| Self::new(encoder, tokenizer, &config)).map_err(Error::Tokenizer)
    }

    fn new(
        encoder: &TextEncoder,
        tokenizer: ByteLevelTokenizer,
        config: &TokenizerConfig,
    ) -> Result<Self, String> {
        config.check(&tokenizer)?;
        let mut template = Template::of(encoder);
        let tokens = config.special_tokens();
        if let Some(own) = config.chat_template()? {
            let [start, end] = chat_template::around_prompt(own, &encoder.chat, &tokens)?;
            if (&*start, &*end) != (&*template.start, &*template.end) {
                (template.start, template.end, template.required) = (start.into(), end.into(), &[]);
            }
        }
        if let Some(token) = template.required.iter().find(|token| tokenizer.id(token).is_none()) {
            return Err(format!("there is no token `{token}`, which {encoder}'s template has"));
        }
        let settings = &tokenizer.settings;
        let sides = [
            (config.padding_side, settings.padding_side),
            (config.truncation_side, settings.truncation_side),
        ];
        let [padding_side, truncation_side] = sides.map(|(config, file)| config.or(file));
        template.padding_side = padding_side.unwrap_or(template.padding_side);
        template.truncation_side = truncation_side.unwrap_or(template.truncation_side);
        let starts_itself = tokens.bos.is_some_and(|bos| template.start.starts_with(bos));
        let around = if encoder.chat.starts_itself && starts_itself {
            Default::default()
        } else {
            settings.around.clone()
        };
        let padding = config.padding().unwrap_or(template.padding);
        let padding =
            tokenizer.id(padding).ok_or_else(|| format!("there is no padding token `{padding}`"))?;
        Ok(PromptTokenizer { tokenizer, template, padding, around })
    }

    /// Tokenizes a prompt to exactly `max` ids.
    pub fn encode(&self, prompt: &str, max: usize) -> Result<Tokens> {
        if max == 0 {
            return Err(Error::request("the number of text tokens must be at least 1"));
        }
        let [before, behind] = &self.around;
        let mut ids = self.ids(prompt)?;
        // What the file adds is not cut off.
        let room = max.saturating_sub(before.len() + behind.len());
        match self.template.truncation_side {
            Side::Right => ids.truncate(room),
            Side::Left => drop(ids.drain(..ids.len().saturating_sub(room))),
        }
        ids = [before.as_slice(), &ids, behind].concat();
        ids.truncate(max);
        let (real, padding) = (ids.len(), max - ids.len());
        let start = match self.template.padding_side {
            Side::Left => padding,
            Side::Right => 0,
        };
        ids.resize(max, self.padding);
        ids.rotate_right(start);
        Ok(Tokens { ids, real: start..start + real })
    }

    /// Counts the tokens of a prompt before truncation, including the template.
    pub fn count(&self, prompt: &str) -> Result<usize> {
        Ok(self.ids(prompt)?.len() + self.around.iter().map(Vec::len).sum::<usize>())
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
