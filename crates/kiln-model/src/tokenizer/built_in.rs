//! The Qwen3 tokenizer inside the program, for checkpoints that come without one.
//!
//! Its names are 256 characters and then what each pair makes, in order; so the pairs say everything, in a third of the
//! room. The packed text (`tools/golden/qwen.py` makes it) has three lines of JSON, the file up to the end of those
//! characters, what stands between names and pairs, and what follows; then a pair a line, escaped as in JSON.

use std::fmt::Write as _;
use std::io::Read;

use crate::{Error, Result};

const PACKED: &[u8] = include_bytes!("../../assets/tokenizer.zst");

/// Names that are no pair's.
const CHARACTERS: usize = 256;

/// Its `tokenizer.json`.
pub(super) fn json() -> Result<String> {
    let mut packed = String::new();
    let read = |text: &mut String| {
        ruzstd::decoding::StreamingDecoder::new(PACKED).map_err(std::io::Error::other)?.read_to_string(text)
    };
    read(&mut packed).map_err(|e| Error::Tokenizer(e.to_string()))?;
    unpack(&packed, CHARACTERS).ok_or_else(|| Error::Tokenizer("the built-in one is damaged".into()))
}

/// The file that a packed text stands for. Escapes never span two names, so those of a pair can be put together as they are.
fn unpack(packed: &str, characters: usize) -> Option<String> {
    let mut lines = packed.split('\n');
    let (head, between, tail) = (lines.next()?, lines.next()?, lines.next()?);
    let pairs = lines.map(|line| line.split_once(' ')).collect::<Option<Vec<_>>>()?;
    let mut json = String::with_capacity(4 * packed.len());
    json.push_str(head);
    for (number, (left, right)) in pairs.iter().enumerate() {
        // Writing to a string can't fail.
        let _ = write!(json, ",\"{left}{right}\":{}", characters + number);
    }
    json.push_str(between);
    for (number, (left, right)) in pairs.iter().enumerate() {
        let comma = if number == 0 { "" } else { "," };
        let _ = write!(json, "{comma}[\"{left}\",\"{right}\"]");
    }
    json.push_str(tail);
    Some(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_become_names_behind_the_characters() {
        let packed = "{\"vocab\":{\"a\":0,\"\\\"\":1\n},\"merges\":[\n]}\na \\\"\na\\\" a";
        let expected = r#"{"vocab":{"a":0,"\"":1,"a\"":2,"a\"a":3},"merges":[["a","\""],["a\"","a"]]}"#;
        assert_eq!(unpack(packed, 2).as_deref(), Some(expected));
        assert_eq!(unpack("{\n}", 2), None);
        assert_eq!(unpack("{\n,\n}\nalone", 2), None);
    }
}
