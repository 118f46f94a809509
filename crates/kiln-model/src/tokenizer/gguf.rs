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
        array.ok_or_else(|| format!("there is no `{key}`"))
    };
    let strings = |key: &str| match array(key)? {
        MetadataArray::Strings(texts) => Ok(texts),
        _ => Err(format!("`{key}` is not a list of texts")),
    };
    let MetadataArray::Integers(types) = array(TOKEN_TYPE)? else {
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
    let one_side = |merge: &str| format!("the merge `{merge}` has one side");
    let sides = merges.iter().map(|merge| merge.split_once(' ').ok_or_else(|| one_side(merge)));
    let merges = sides.collect::<Result<Vec<_>, _>>()?;
    let model = BpeModel::new(&vocab, &merges, true).map_err(|(a, b)| {
        format!("the merge of `{a}` and `{b}`, or one of its sides, is not in the vocabulary")
    })?;
    mistral::new(model, added)
}
