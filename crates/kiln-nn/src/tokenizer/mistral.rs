//! Mistral's tokenizer, tekken: what its files have in common.
//!
//! The first ids are special tokens, the others tokens of bytes in the order of their ranks. The order is also that of the
//! merges: two tokens merge if their concatenation is a token, and the one of the lowest rank is made first.
//!
//! Easy to get wrong: a `tekken.json` and a GGUF file ask for another split pattern than the `tokenizer.json` that FLUX.2 was
//! trained with, and FLUX.2's text is always split as in the latter. They differ in combining marks, mixed case and digits.

use fancy_regex::Regex;

use super::bpe::BpeModel;
use super::byte_level::{AddedToken, AddedTokens, ByteLevelTokenizer, FileSettings, byte_symbol};
use super::vocab::TokenList;

/// How the published `tokenizer.json` splits a text into words.
pub(super) const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Number of special tokens, which have the first ids.
pub(super) const SPECIAL_TOKENS: u32 = 1000;

/// Number of tokens of bytes.
pub(super) const BYTE_TOKENS: usize = 130_072;

/// The first special tokens; the others have numbers for names.
const NAMED_SPECIALS: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// The special tokens of a file that doesn't list them.
pub(super) fn special_tokens(count: u32) -> Vec<AddedToken> {
    let name = |id: u32| match NAMED_SPECIALS.get(id as usize) {
        Some(name) => (*name).to_owned(),
        None => unnamed_special(id),
    };
    (0..count).map(|id| AddedToken { content: name(id), id, special: true }).collect()
}

/// The name of a special token that has none.
pub(super) fn unnamed_special(id: u32) -> String {
    format!("<SPECIAL_{id}>")
}

/// A tokenizer of byte tokens in the order of their ranks, behind the special tokens.
pub(super) fn from_ranks(tokens: &TokenList, special: Vec<AddedToken>) -> Result<ByteLevelTokenizer, String> {
    let first = special.len() as u32;
    let model = BpeModel::ranked(tokens, first, true).ok_or("a token occurs twice")?;
    new(model, special)
}

/// A tokenizer with FLUX.2's split pattern.
pub(super) fn new(model: BpeModel, special: Vec<AddedToken>) -> Result<ByteLevelTokenizer, String> {
    let symbol = |byte: u8| model.id(byte_symbol(byte).encode_utf8(&mut [0; 4]));
    if let Some(byte) = (0..=255).find(|byte| symbol(*byte).is_none()) {
        return Err(format!("there is no token for the byte {byte}"));
    }
    let split = Regex::new(PATTERN).map_err(|error| error.to_string())?;
    Ok(ByteLevelTokenizer {
        added: AddedTokens::new(special),
        nfc: false,
        splits: vec![split],
        model,
        settings: FileSettings::default(),
    })
}
