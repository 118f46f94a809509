//! Parsing of `tekken.json`, Mistral's own format: base64 of every token in the order of ranks.
//!
//! Files of version 7 don't list the special tokens, later ones do. The split pattern in a file is not used (see
//! [`mistral`](super::mistral)).

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, SeqAccess, Visitor};

use super::byte_level::{ByteLevelTokenizer, byte_symbol};
use super::mistral;
use super::vocab::TokenList;

/// Upper bound for the vocabulary of a plausible file.
const MAX_TOKENS: usize = 1 << 20;

/// Whether these bytes are a `tekken.json`, as opposed to a `tokenizer.json`: told by the first key that only one has.
pub(super) fn is_tekken(json: &[u8]) -> bool {
    struct Keys<'a>(&'a mut bool);
    impl<'de> Visitor<'de> for Keys<'_> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a tokenizer")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            while let Some(key) = map.next_key::<String>()? {
                match key.as_str() {
                    "config" | "vocab" => {
                        *self.0 = true;
                        break;
                    }
                    "added_tokens" | "pre_tokenizer" | "model" => break,
                    _ => map.next_value::<IgnoredAny>()?,
                };
            }
            Ok(())
        }
    }
    let mut found = false;
    // Stopping at the key makes it an error, like everything that is wrong with the file; that is found when it is parsed.
    let _ = serde_json::Deserializer::from_slice(json).deserialize_map(Keys(&mut found));
    found
}

/// Parses a `tekken.json`.
pub(super) fn parse(json: &[u8]) -> Result<ByteLevelTokenizer, String> {
    let text = std::str::from_utf8(json).map_err(|error| error.to_string())?;
    let file: TekkenJson = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let Config { default_vocab_size: size, default_num_special_tokens: special_count } = file.config;
    let count = size.checked_sub(special_count as usize).filter(|_| size <= MAX_TOKENS);
    let count = count.ok_or_else(|| {
        format!("its vocabulary of {size} tokens with {special_count} special ones is not plausible")
    })?;
    let mut tokens = file.vocab.0;
    if tokens.len() < count {
        return Err(format!("`vocab` has {} tokens, expected at least {count}", tokens.len()));
    }
    tokens.truncate(count);
    let mut special = mistral::special_tokens(special_count);
    for SpecialJson { rank, token_str } in file.special_tokens.unwrap_or_default() {
        let token = special.get_mut(rank as usize);
        let token = token.ok_or_else(|| format!("the special token `{token_str}` has rank {rank}"))?;
        token.content = token_str;
    }
    mistral::from_ranks(&tokens, special)
}

/// The contents of a `tekken.json`.
#[derive(Deserialize)]
struct TekkenJson {
    config: Config,
    vocab: VocabJson,
    special_tokens: Option<Vec<SpecialJson>>,
}

#[derive(Deserialize)]
struct Config {
    /// Number of ids; a file lists more tokens than are used.
    default_vocab_size: usize,
    default_num_special_tokens: u32,
}

#[derive(Deserialize)]
struct SpecialJson {
    rank: u32,
    token_str: String,
}

/// A token in the order of ranks. Its text is left out: not all tokens have one.
#[derive(Deserialize)]
struct TokenJson<'a> {
    rank: usize,
    token_bytes: &'a str,
}

/// All tokens, decoded while they are read.
struct VocabJson(TokenList);

impl<'de> Deserialize<'de> for VocabJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VocabVisitor;
        impl<'de> Visitor<'de> for VocabVisitor {
            type Value = VocabJson;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of tokens")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<VocabJson, A::Error> {
                let (mut tokens, mut bytes) = (TokenList::default(), Vec::new());
                while let Some(TokenJson { rank, token_bytes }) = seq.next_element()? {
                    if rank != tokens.len() {
                        return Err(A::Error::custom(format!("rank {rank}, expected {}", tokens.len())));
                    }
                    bytes.clear();
                    let decoded = STANDARD.decode_vec(token_bytes, &mut bytes);
                    decoded.map_err(|error| A::Error::custom(format!("token {rank}: {error}")))?;
                    tokens.push(bytes.iter().map(|byte| byte_symbol(*byte)));
                }
                Ok(VocabJson(tokens))
            }
        }
        deserializer.deserialize_seq(VocabVisitor)
    }
}
