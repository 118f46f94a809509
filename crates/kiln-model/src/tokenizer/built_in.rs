//! The built-in Qwen3 tokenizer, for checkpoints without one.
//!
//! Its vocabulary is 256 characters, then the result of each merge, in order. So the merges alone describe it, in a third of
//! the size. The packed text (from `tools/golden/qwen.py`) starts with three lines of JSON: the file up to the end of the
//! characters, what is between vocabulary and merges, and what follows the merges. Then comes one merge per line, escaped as
//! in JSON.

use std::fmt::Write as _;
use std::io::Read;

use crate::{Error, Result};

const PACKED: &[u8] = include_bytes!("../../assets/tokenizer.zst");

/// Tokens that are not the result of a merge.
const CHARACTERS: usize = 256;

/// Unpacks its `tokenizer.json`.
pub(super) fn json() -> Result<String> {
    let mut packed = String::new();
    let read = |text: &mut String| {
        ruzstd::decoding::StreamingDecoder::new(PACKED).map_err(std::io::Error::other)?.read_to_string(text)
    };
    read(&mut packed).map_err(|e| Error::Tokenizer(e.to_string()))?;
    unpack(&packed, CHARACTERS).ok_or_else(|| Error::Tokenizer("the built-in tokenizer is damaged".into()))
}

/// Expands a packed text. Escapes never span two tokens, so those of a merge can be concatenated as they are.
fn unpack(packed: &str, characters: usize) -> Option<String> {
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
        assert_eq!(unpack(packed, 2).as_deref(), Some(expected));
        assert_eq!(unpack("{\n}", 2), None);
        assert_eq!(unpack("{\n,\n}\nalone", 2), None);
    }
}
