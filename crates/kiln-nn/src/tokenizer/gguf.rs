//! A tokenizer from the metadata of a GGUF file.

use kiln_weights::{MetadataArray, WeightSource};

use super::bpe::BpeModel;
use super::byte_level::{AddedToken, ByteLevelTokenizer};
use super::mistral;

/// Names of the tokens, by id.
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";

/// Types of tokens that are found in a text as they are written: special ones, and those that a user added.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Reads Mistral's tokenizer.
pub(super) fn read(source: &WeightSource) -> Result<ByteLevelTokenizer, String> {
    let setting = |key: &str| source.metadata().get(key).map(String::as_str);
    // llama.cpp's name for byte-level BPE.
    if let Some(model) = setting("tokenizer.ggml.model").filter(|model| *model != "gpt2") {
        return Err(format!("`tokenizer.ggml.model` is `{model}`, expected `gpt2`"));
    }
    if let Some(pre) = setting("tokenizer.ggml.pre").filter(|pre| *pre != "tekken") {
        return Err(format!("`tokenizer.ggml.pre` is `{pre}`, expected `tekken`"));
    }
    let array = |key: &str| {
        let array = source.gguf_array(key).map_err(|error| error.to_string())?;
        if array.is_none() && setting(key).is_none() {
            Err(format!("there is no `{key}`"))
        } else {
            Ok(array)
        }
    };
    let strings = |key: &str| match array(key)? {
        Some(MetadataArray::Strings(texts)) => Ok(texts),
        _ => Err(format!("`{key}` is not a list of texts")),
    };
    let Some(MetadataArray::Integers(types)) = array(TOKEN_TYPE)? else {
        return Err(format!("`{TOKEN_TYPE}` is not a list of integers"));
    };
    new(&strings(TOKENS)?, &types, &strings(MERGES)?)
}

/// Creates the tokenizer: names and types of tokens by id, and merges with a space between their sides.
pub(super) fn new(tokens: &[&str], types: &[i64], merges: &[&str]) -> Result<ByteLevelTokenizer, String> {
    if types.len() != tokens.len() {
        return Err(format!("`{TOKEN_TYPE}` has {} values for {} tokens", types.len(), tokens.len()));
    }
    let (mut added, mut vocab) = (Vec::new(), Vec::with_capacity(tokens.len()));
    for (id, (token, kind)) in (0u32..).zip(tokens.iter().zip(types)) {
        match *kind {
            CONTROL | USER_DEFINED => {
                let special = *kind == CONTROL;
                added.push(AddedToken { content: (*token).to_owned(), id, special });
            }
            _ => vocab.push((*token, id)),
        }
    }
    let one_side = |merge: &str| format!("the merge `{}` has one side", short(merge));
    let sides = merges.iter().map(|merge| merge.split_once(' ').ok_or_else(|| one_side(merge)));
    let merges = sides.collect::<Result<Vec<_>, _>>()?;
    let model = BpeModel::new(&vocab, &merges, true).map_err(|(a, b)| {
        let (a, b) = (short(a), short(b));
        format!("the merge of `{a}` and `{b}`, or one of its sides, is not in the vocabulary")
    })?;
    mistral::new(model, added)
}

/// The beginning of a token, for messages: a damaged file may have one of any length.
fn short(token: &str) -> String {
    token.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::super::byte_level::byte_symbol;
    use super::*;

    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    const INT8: u32 = 1;
    const INT32: u32 = 5;
    const FLOAT32: u32 = 6;

    fn text(text: &[u8]) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text].concat()
    }

    /// An array that states `count` values and holds these bytes.
    fn array(element_type: u32, count: u64, bytes: &[u8]) -> Vec<u8> {
        [&element_type.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat()
    }

    fn strings(texts: &[&str]) -> Vec<u8> {
        let bytes: Vec<u8> = texts.iter().flat_map(|t| text(t.as_bytes())).collect();
        array(STRING, texts.len() as u64, &bytes)
    }

    /// The metadata of a small tokenizer: some special tokens, and a token for each byte.
    fn valid() -> Vec<(&'static str, u32, Vec<u8>)> {
        let special = mistral::special_tokens(20).into_iter().map(|token| token.content);
        let bytes = (0..=255).map(|byte| byte_symbol(byte).to_string());
        let names: Vec<String> = special.chain(bytes).chain(["ab".into()]).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let types: Vec<u8> =
            (0..names.len()).flat_map(|id| (if id < 20 { 3i32 } else { 1 }).to_le_bytes()).collect();
        vec![
            ("tokenizer.ggml.model", STRING, text(b"gpt2")),
            ("tokenizer.ggml.pre", STRING, text(b"tekken")),
            (TOKENS, ARRAY, strings(&names)),
            (TOKEN_TYPE, ARRAY, array(INT32, names.len() as u64, &types)),
            (MERGES, ARRAY, strings(&["a b"])),
        ]
    }

    /// Reads the tokenizer of a file with this metadata.
    fn read_file(metadata: &[(&str, u32, Vec<u8>)]) -> Result<ByteLevelTokenizer, String> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(0u64.to_le_bytes());
        file.extend((metadata.len() as u64).to_le_bytes());
        for (key, value_type, value) in metadata {
            file.extend(text(key.as_bytes()));
            file.extend(value_type.to_le_bytes());
            file.extend(value);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        let source = WeightSource::from_bytes("a.gguf", file).map_err(|error| error.to_string())?;
        read(&source)
    }

    #[test]
    fn damaged_metadata_is_an_error_that_names_the_field() {
        assert_eq!(read_file(&valid()).unwrap().ids("ab[INST]").unwrap(), [20 + 256, 3]);
        let long = "x".repeat(1 << 20);
        let many = array(INT8, 5 << 20, &vec![1; 5 << 20]);
        let bad_text = array(STRING, 1, &text(b"\xff\xfe"));
        for (key, change, words) in [
            (MERGES, None, "there is no `tokenizer.ggml.merges`"),
            (TOKENS, None, "there is no `tokenizer.ggml.tokens`"),
            (TOKEN_TYPE, None, "there is no `tokenizer.ggml.token_type`"),
            (TOKENS, Some((STRING, text(b"a"))), "`tokenizer.ggml.tokens` is not a list of texts"),
            (TOKENS, Some((ARRAY, array(INT32, 1, &[0; 4]))), "is not a list of texts"),
            (TOKENS, Some((ARRAY, strings(&[]))), "277 values for 0 tokens"),
            (TOKENS, Some((ARRAY, bad_text.clone())), "is not UTF-8"),
            (MERGES, Some((ARRAY, bad_text)), "is not UTF-8"),
            (TOKEN_TYPE, Some((ARRAY, strings(&["1"]))), "is not a list of integers"),
            (TOKEN_TYPE, Some((ARRAY, array(FLOAT32, 1, &[0; 4]))), "is not a list of integers"),
            (TOKEN_TYPE, Some((INT32, vec![0; 4])), "is not a list of integers"),
            (TOKEN_TYPE, Some((ARRAY, many)), "an array of 5242880 values; at most"),
            (MERGES, Some((ARRAY, strings(&["ab"]))), "the merge `ab` has one side"),
            (MERGES, Some((ARRAY, strings(&[&long]))), "x` has one side"),
            (MERGES, Some((ARRAY, strings(&["b a"]))), "the merge of `b` and `a`"),
            (MERGES, Some((ARRAY, array(STRING, 2, &text(b"a b")))), ""),
            (MERGES, Some((ARRAY, array(STRING, u64::MAX, b""))), "needs"),
            (TOKEN_TYPE, Some((ARRAY, array(INT32, u64::MAX / 2, b""))), "needs"),
            (TOKENS, Some((ARRAY, array(STRING, 1, &u64::MAX.to_le_bytes()))), "needs"),
            (TOKENS, Some((ARRAY, array(ARRAY, 1, b""))), "array of arrays"),
            ("tokenizer.ggml.model", Some((STRING, text(b"llama"))), "is `llama`, expected `gpt2`"),
            ("tokenizer.ggml.pre", Some((STRING, text(b"qwen2"))), "is `qwen2`, expected `tekken`"),
        ] {
            let mut metadata = valid();
            metadata.retain(|(other, ..)| *other != key);
            metadata.extend(change.map(|(value_type, value)| (key, value_type, value)));
            let problem = read_file(&metadata).err().unwrap_or_else(|| panic!("{words}"));
            assert!(problem.contains(words) && problem.len() < 300, "{words}: {problem}");
        }
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let metadata = valid();
        for length in (0..metadata[2].2.len()).step_by(97) {
            let mut cut = metadata[..3].to_vec();
            cut[2].2.truncate(length);
            assert!(read_file(&cut).is_err(), "{length} bytes");
        }
    }
}
