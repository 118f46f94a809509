//! Byte-level BPE tokenization, as `tokenizer.json` describes it.
//!
//! ```text
//! text ──added tokens──▶ ids, and text between them ──NFC──▶ ──split patterns──▶ words ──bytes as characters──▶ BPE ──▶ ids
//! ```
//!
//! That is what the tokenizers of Qwen3 and Mistral consist of. A file that asks for anything else is an error.

use std::borrow::Cow;

use fancy_regex::Regex;
use kiln_family::Side;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::bpe::BpeModel;

/// A tokenizer. Its fields are the stages that a text passes through, in order.
pub(super) struct ByteLevelTokenizer {
    pub added: AddedTokens,
    /// Whether text is normalized to NFC.
    pub nfc: bool,
    /// Patterns that split a text into words. What lies between two matches is a word, too.
    pub splits: Vec<Regex>,
    pub model: BpeModel,
    pub settings: FileSettings,
}

/// What a `tokenizer.json` says about the ids of a text as a whole.
#[derive(Default)]
pub(super) struct FileSettings {
    /// Ids that its post-processor puts before and behind those of a text.
    pub around: [Vec<u32>; 2],
    pub padding_side: Option<Side>,
    pub truncation_side: Option<Side>,
}

impl ByteLevelTokenizer {
    /// Tokenizes a text, without truncation or padding.
    pub fn ids(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        let mut rest = text;
        while let Some((start, token)) = self.added.find(rest) {
            self.tokenize(&rest[..start], &mut ids)?;
            ids.push(token.id);
            rest = &rest[start + token.content.len()..];
        }
        self.tokenize(rest, &mut ids)?;
        Ok(ids)
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.added.id(token).or_else(|| self.model.id(token))
    }

    /// Returns the text of ids, without special tokens. Bytes that are not UTF-8 become U+FFFD, ids without a token nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            match self.added.of_id(*id) {
                Some(added) if added.special => {}
                Some(added) => bytes.extend_from_slice(added.content.as_bytes()),
                None => bytes.extend(self.model.token(*id).unwrap_or("").chars().filter_map(symbol_byte)),
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Tokenizes text without added tokens.
    fn tokenize(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        let text = if self.nfc && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            Cow::Owned(text.nfc().collect())
        } else {
            Cow::Borrowed(text)
        };
        let mut words = vec![&*text];
        for pattern in &self.splits {
            let mut split = Vec::new();
            for word in words {
                split_word(pattern, word, &mut split)?;
            }
            words = split;
        }
        let mut symbols = String::new();
        for word in words {
            symbols.clear();
            symbols.extend(word.bytes().map(byte_symbol));
            self.model.tokenize(&symbols, ids);
        }
        Ok(())
    }
}

/// Splits a word into the matches of a pattern and what lies between them.
fn split_word<'a>(pattern: &Regex, word: &'a str, out: &mut Vec<&'a str>) -> Result<(), String> {
    let mut end = 0;
    for found in pattern.find_iter(word) {
        let found = found.map_err(|error| error.to_string())?;
        out.extend([&word[end..found.start()], found.as_str()].into_iter().filter(|part| !part.is_empty()));
        end = found.end();
    }
    out.extend(Some(&word[end..]).filter(|part| !part.is_empty()));
    Ok(())
}

/// The character that stands for a byte in a vocabulary: itself if it is printable, else one from U+0100 on.
pub(super) fn byte_symbol(byte: u8) -> char {
    SYMBOLS[byte as usize]
}

/// The byte that a character stands for.
fn symbol_byte(symbol: char) -> Option<u8> {
    SYMBOLS.iter().position(|other| *other == symbol).map(|byte| byte as u8)
}

const SYMBOLS: [char; 256] = {
    let mut symbols = ['\0'; 256];
    // The first 68 characters from U+0100 on, for as many bytes that are not printable.
    let (mut byte, mut other) = (0, 0x100);
    while byte < 256 {
        let printable = matches!(byte as u8, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { byte as u32 } else { other };
        symbols[byte] = char::from_u32(code).expect("below the surrogates");
        other += !printable as u32;
        byte += 1;
    }
    symbols
};

/// Tokens that are found in the text before it is split into words, such as `<|im_start|>`.
pub(super) struct AddedTokens {
    /// By first byte, then longest first: the longest match counts.
    tokens: Vec<AddedToken>,
}

/// A token that is found as it is written.
pub(super) struct AddedToken {
    pub content: String,
    pub id: u32,
    /// Whether it is no text.
    pub special: bool,
}

impl AddedTokens {
    pub fn new(mut tokens: Vec<AddedToken>) -> AddedTokens {
        tokens.retain(|token| !token.content.is_empty());
        let key = |token: &AddedToken| (token.content.as_bytes()[0], std::cmp::Reverse(token.content.len()));
        tokens.sort_by_key(key);
        AddedTokens { tokens }
    }

    /// Finds the first token in a text, and of several that start there the longest.
    fn find(&self, text: &str) -> Option<(usize, &AddedToken)> {
        text.bytes().enumerate().find_map(|(start, byte)| {
            let first = self.tokens.partition_point(|token| token.content.as_bytes()[0] < byte);
            let same = self.tokens[first..].iter().take_while(|token| token.content.as_bytes()[0] == byte);
            let rest = &text.as_bytes()[start..];
            Some((start, same.into_iter().find(|token| rest.starts_with(token.content.as_bytes()))?))
        })
    }

    fn of_id(&self, id: u32) -> Option<&AddedToken> {
        self.tokens.iter().find(|added| added.id == id)
    }

    /// All tokens.
    pub fn iter(&self) -> impl Iterator<Item = &AddedToken> {
        self.tokens.iter()
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.tokens.iter().find(|added| added.content == token).map(|added| added.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_characters_of_gpt2() {
        let all: Vec<char> = (0..=255).map(byte_symbol).collect();
        assert_eq!(
            [all[0], all[b' ' as usize], all[b'\n' as usize], all[b'a' as usize]],
            ['Ā', 'Ġ', 'Ċ', 'a']
        );
        assert_eq!([all[0x7f], all[0x80], all[0xa0], all[0xad], all[0xff]], ['ġ', 'Ģ', 'ł', 'Ń', 'ÿ']);
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), 256);
    }

    #[test]
    fn the_first_and_longest_added_token_is_found() {
        let tokens = ["<a>", "<a><b>", "<b>", "é"].into_iter().zip(1..);
        let tokens =
            tokens.map(|(content, id)| AddedToken { content: content.into(), id, special: true }).collect();
        let added = AddedTokens::new(tokens);
        let find = |text| added.find(text).map(|(start, token)| (start, token.id));
        assert_eq!(find("x<b><a>"), Some((1, 3)));
        assert_eq!(find("x<a><b>"), Some((1, 2)));
        assert_eq!(find("<a><a><b>"), Some((0, 1)));
        assert_eq!(find("è é"), Some((3, 4)));
        assert_eq!(find("<a"), None);
        assert_eq!((added.id("<b>"), added.id("b")), (Some(3), None));
    }

    #[test]
    fn a_split_keeps_what_lies_between_matches() {
        let split = |text| {
            let mut words = Vec::new();
            split_word(&Regex::new(r"\d+").unwrap(), text, &mut words).unwrap();
            words.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(split("ab12cd3"), ["ab", "12", "cd", "3"]);
        assert_eq!(split("12"), ["12"]);
        assert_eq!(split("é"), ["é"]);
        assert!(split("").is_empty());
    }
}
