//! `tokenizer_config.json`: what transformers makes of a `tokenizer.json`.
//!
//! Its settings are followed, or refused by name if they would change the ids.

use std::collections::BTreeMap;

use kiln_family::Side;
use serde::Deserialize;
use serde_json::Value;

use super::byte_level::ByteLevelTokenizer;
use super::chat_template::SpecialTokens;

/// Largest number of tokens of a prompt, as trained.
pub const MAX_TOKENS: usize = 512;

/// The fields of `tokenizer_config.json` that matter here.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct TokenizerConfig {
    pad_token: Option<TokenName>,
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    /// A huge float means "no limit".
    #[serde(default)]
    model_max_length: Option<f64>,
    /// A Jinja program, or a list of named ones.
    #[serde(default)]
    chat_template: Option<ChatTemplates>,
    pub(super) padding_side: Option<Side>,
    pub(super) truncation_side: Option<Side>,
    /// Added tokens by id.
    added_tokens_decoder: Option<BTreeMap<String, TokenName>>,
    /// Texts, tokens, or a map of them.
    #[serde(default)]
    additional_special_tokens: Value,
    #[serde(default)]
    extra_special_tokens: Value,
    split_special_tokens: Option<bool>,
    add_prefix_space: Option<bool>,
}

/// A token, as a text or as an added token.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum TokenName {
    Name(String),
    Added { content: String },
}

impl TokenName {
    fn content(&self) -> &str {
        match self {
            TokenName::Name(content) | TokenName::Added { content } => content,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum ChatTemplates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Clone, Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TokenizerConfig {
    /// Uses this chat template, which was in a file of its own.
    pub fn with_chat_template(self, template: Option<String>) -> TokenizerConfig {
        let chat_template = template.map(ChatTemplates::One).or(self.chat_template);
        TokenizerConfig { chat_template, ..self }
    }

    /// The settings that also count for a tokenizer that is no `tokenizer.json`.
    pub(super) fn padding_only(&self) -> TokenizerConfig {
        TokenizerConfig { pad_token: self.pad_token.clone(), ..TokenizerConfig::default() }
    }

    /// Default number of tokens that prompts are truncated or padded to: as trained, or less for smaller models.
    pub fn default_tokens(&self) -> usize {
        self.model_max_length.map_or(MAX_TOKENS, |n| (n as usize).clamp(1, MAX_TOKENS))
    }

    /// The padding token, if it names one.
    pub(super) fn padding(&self) -> Option<&str> {
        self.pad_token.as_ref().map(TokenName::content)
    }

    pub(super) fn special_tokens(&self) -> SpecialTokens<'_> {
        let [bos, eos, pad] = [&self.bos_token, &self.eos_token, &self.pad_token]
            .map(|token| token.as_ref().map(TokenName::content));
        SpecialTokens { bos, eos, pad }
    }

    /// The chat template, if there is one.
    pub(super) fn chat_template(&self) -> Result<Option<&str>, String> {
        match &self.chat_template {
            None => Ok(None),
            Some(ChatTemplates::One(template)) => Ok(Some(template)),
            Some(ChatTemplates::Named(all)) => match all.iter().find(|one| one.name == "default") {
                Some(default) => Ok(Some(&default.template)),
                None => Err("none of its chat templates is named `default`".into()),
            },
        }
    }

    /// Refuses settings with which transformers makes another tokenizer than that of the `tokenizer.json`.
    pub(super) fn check(&self, tokenizer: &ByteLevelTokenizer) -> Result<(), String> {
        let flags = [
            ("split_special_tokens", self.split_special_tokens),
            ("add_prefix_space", self.add_prefix_space),
        ];
        if let Some((name, _)) = flags.iter().find(|(_, flag)| *flag == Some(true)) {
            return Err(format!("tokenizer_config.json has `{name}`, which is not supported"));
        }
        let refused = |what: &str, token: &str| {
            Err(format!("{what} of tokenizer_config.json has `{token}`, which tokenizer.json does not have"))
        };
        if let Some(added) = &self.added_tokens_decoder {
            let known: BTreeMap<&str, u32> =
                tokenizer.added.iter().map(|token| (token.content.as_str(), token.id)).collect();
            for (id, token) in added {
                if known.get(token.content()).map(u32::to_string).as_ref() != Some(id) {
                    return refused("added_tokens_decoder", &format!("{id}: {}", token.content()));
                }
            }
            // transformers adds those of this list alone, with other ids if one is missing.
            let mut missing =
                tokenizer.added.iter().filter(|token| !added.contains_key(&token.id.to_string()));
            if let Some(token) = missing.next() {
                let (id, content) = (token.id, &token.content);
                return Err(format!(
                    "added_tokens_decoder of tokenizer_config.json lacks `{id}: {content}`, which tokenizer.json has"
                ));
            }
        }
        for (what, tokens) in [
            ("additional_special_tokens", &self.additional_special_tokens),
            ("extra_special_tokens", &self.extra_special_tokens),
        ] {
            let unknown = |token: &&str| tokenizer.added.id(token).is_none();
            if let Some(token) = names(tokens).into_iter().find(unknown) {
                return refused(what, token);
            }
        }
        Ok(())
    }
}

/// The tokens in a list or map of texts and tokens.
fn names(value: &Value) -> Vec<&str> {
    fn one(value: &Value) -> Option<&str> {
        value.as_str().or_else(|| value.get("content")?.as_str())
    }
    match value {
        Value::Array(list) => list.iter().filter_map(one).collect(),
        Value::Object(map) => map.values().filter_map(one).collect(),
        _ => Vec::new(),
    }
}
