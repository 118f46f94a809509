//! The built-in tokenizers, for checkpoints without one.
//!
//! **Qwen3.** Its vocabulary is 256 characters, then the result of each merge, in order. So the merges alone describe it, in a
//! third of the size. The packed text (from `tools/golden/qwen.py`) starts with three lines of JSON: the file up to the end of
//! the characters, what is between vocabulary and merges, and what follows the merges. Then comes one merge per line, escaped
//! as in JSON.
//!
//! **Mistral.** Its tokens are 256 bytes, then concatenations of two earlier ones; merges follow from their order. The packed
//! file (from `tools/golden/tekken.py`) holds the ranks of both sides, 24 bits each, in planes of one byte: all highest bytes
//! of the left sides first, all lowest bytes of the right sides last.

use std::fmt::Write as _;
use std::io::Read;

use kiln_family::{BuiltInTokenizer, TextEncoder};
use ruzstd::decoding::StreamingDecoder;

use super::byte_level::{ByteLevelTokenizer, byte_symbol};
use super::vocab::TokenList;
use super::{mistral, tokenizer_json};

/// Tokens that are not the result of a merge.
const CHARACTERS: usize = 256;

/// Opens the tokenizer of a text encoder.
pub(super) fn open(encoder: &TextEncoder) -> Result<ByteLevelTokenizer, String> {
    let damaged = || "the built-in tokenizer is damaged".to_owned();
    match encoder.tokenizer {
        BuiltInTokenizer::None => Err(format!("{encoder} has none in this program")),
        BuiltInTokenizer::Merges(packed) => {
            let packed = String::from_utf8(decompress(packed)?).map_err(|_| damaged())?;
            let json = unpack_json(&packed, CHARACTERS).ok_or_else(damaged)?;
            tokenizer_json::parse(json.as_bytes())
        }
        BuiltInTokenizer::RankPairs(packed) => {
            let tokens = mistral_tokens(packed).ok_or_else(damaged)?;
            mistral::from_ranks(&tokens, mistral::special_tokens(mistral::SPECIAL_TOKENS))
        }
    }
}

fn decompress(packed: &[u8]) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut decoder = StreamingDecoder::new(packed).map_err(|error| error.to_string())?;
    decoder.read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Mistral's byte tokens in the order of their ranks.
pub(super) fn mistral_tokens(packed: &[u8]) -> Option<TokenList> {
    let tokens = unpack_pairs(&decompress(packed).ok()?)?;
    (tokens.len() == mistral::BYTE_TOKENS).then_some(tokens)
}

/// Expands planes of ranks to tokens.
fn unpack_pairs(planes: &[u8]) -> Option<TokenList> {
    let count = planes.len() / 6;
    let mut tokens = TokenList::with_capacity(CHARACTERS + count, 2 * planes.len());
    (0..=255).for_each(|byte| tokens.push([byte_symbol(byte)]));
    for index in 0..count {
        let byte = |plane: usize| planes[plane * count + index] as usize;
        let rank = |plane: usize| byte(plane) << 16 | byte(plane + 1) << 8 | byte(plane + 2);
        tokens.push_pair(rank(0), rank(3))?;
    }
    Some(tokens)
}

/// Expands a packed text to a `tokenizer.json`. Escapes never span two tokens, so those of a merge can be concatenated as
/// they are.
fn unpack_json(packed: &str, characters: usize) -> Option<String> {
    let mut lines = packed.split('\n');
    let (head, between, tail) = (lines.next()?, lines.next()?, lines.next()?);
    let merges = lines.map(|line| line.split_once(' ')).collect::<Option<Vec<_>>>()?;
    let mut json = String::with_capacity(4 * packed.len());
    json.push_str(head);
    for (index, (left, right)) in merges.iter().enumerate() {
        // Writing to a string can't fail.
        let _ = write!(json, ",\"{left}{right}\":{}", characters + index);
    }
    json.push_str(between);
    for (index, (left, right)) in merges.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let _ = write!(json, "{comma}[\"{left}\",\"{right}\"]");
    }
    json.push_str(tail);
    Some(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_become_tokens_behind_the_characters() {
        let packed = "{\"vocab\":{\"a\":0,\"\\\"\":1\n},\"merges\":[\n]}\na \\\"\na\\\" a";
        let expected = r#"{"vocab":{"a":0,"\"":1,"a\"":2,"a\"a":3},"merges":[["a","\""],["a\"","a"]]}"#;
        assert_eq!(unpack_json(packed, 2).as_deref(), Some(expected));
        assert_eq!(unpack_json("{\n}", 2), None);
        assert_eq!(unpack_json("{\n,\n}\nalone", 2), None);
    }

    #[test]
    fn pairs_become_tokens_behind_the_bytes() {
        let planes = [0, 0, 0, 1, b'a', 0, 0, 0, 0, 0, b'b', b'c'];
        let tokens = unpack_pairs(&planes).unwrap();
        assert_eq!(tokens.iter().skip(256).collect::<Vec<_>>(), ["ab", "abc"]);
        assert!(unpack_pairs(&[0, 1, 0, 0, 0, 0]).is_none());
    }
}
