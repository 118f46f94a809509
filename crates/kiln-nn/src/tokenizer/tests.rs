//! Mistral's tokenizer from each of its files, compared with the published one.

use std::fmt::Write as _;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kiln_family::BuiltInTokenizer;
use kiln_family::flux2::{MISTRAL, QWEN3};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::byte_level::{ByteLevelTokenizer, byte_symbol};
use super::*;

/// SHA-256 of the published `tokenizer.json`'s merges, one per line, from `tools/golden/tekken.py`.
const PUBLISHED_MERGES: &str = "b1b0165185b1925118c2f7b1e978439b02010c3a420ebfec5c19a093a0d9b4cb";

/// Ids by the published tokenizer, without a template.
#[derive(Deserialize)]
struct Text {
    name: String,
    text: String,
    ids: Vec<u32>,
    /// Where special tokens in the text change them.
    ids_specials_parsed: Option<Vec<u32>>,
}

fn texts() -> Vec<Text> {
    #[derive(Deserialize)]
    struct File {
        texts: Vec<Text>,
    }
    let file = include_bytes!("../../../../testdata/dev/tokenizer_agreement.json");
    serde_json::from_slice::<File>(file).unwrap().texts
}

/// Compares the ids of all texts.
fn check(tokenizer: &ByteLevelTokenizer) {
    for Text { name, text, ids, ids_specials_parsed } in texts() {
        let expected = ids_specials_parsed.unwrap_or(ids);
        assert_eq!(tokenizer.ids(&text).unwrap(), expected, "{name}");
    }
}

fn built_in() -> ByteLevelTokenizer {
    built_in::open(&MISTRAL).unwrap()
}

fn tokens() -> Vec<String> {
    let BuiltInTokenizer::RankPairs(packed) = MISTRAL.tokenizer else { panic!() };
    built_in::mistral_tokens(packed).unwrap().iter().map(str::to_owned).collect()
}

/// All pairs of tokens that together are a token, in the order of the published merges.
fn merges(tokens: &[String]) -> Vec<(&str, &str)> {
    let ranks: std::collections::HashMap<&str, usize> = tokens.iter().map(String::as_str).zip(0..).collect();
    let splits = |token: &'_ String| {
        let mut pairs: Vec<_> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((ranks.get(&token[..at])?, ranks.get(&token[at..])?)))
            .map(|(left, right)| (*left, *right))
            .collect();
        pairs.sort_unstable();
        pairs
    };
    tokens.iter().flat_map(splits).map(|(left, right)| (&*tokens[left], &*tokens[right])).collect()
}

fn special_names() -> Vec<String> {
    mistral::special_tokens(mistral::SPECIAL_TOKENS).into_iter().map(|token| token.content).collect()
}

fn base64(token: &str) -> String {
    let bytes: Vec<u8> =
        token.chars().map(|c| (0..=255).find(|byte| byte_symbol(*byte) == c).unwrap()).collect();
    STANDARD.encode(bytes)
}

/// A `tekken.json` of these tokens and some more that are not used.
fn tekken_json(tokens: &[String], special: Option<Value>) -> Value {
    let vocab: Vec<Value> = tokens
        .iter()
        .map(|token| base64(token))
        .chain(["AAEC".to_owned()])
        .enumerate()
        .map(|(rank, bytes)| json!({ "rank": rank, "token_bytes": bytes, "token_str": null }))
        .collect();
    let mut file = json!({
        "config": {
            "pattern": "not used", "num_vocab_tokens": vocab.len(), "version": "v7",
            "default_vocab_size": tokens.len() + 1000, "default_num_special_tokens": 1000,
        },
        "vocab": vocab,
    });
    if let Some(special) = special {
        file["special_tokens"] = special;
    }
    file
}

/// Tokens of single bytes and a few more.
fn few_tokens() -> Vec<String> {
    tokens()[..400].to_vec()
}

fn parse_value(file: &Value) -> Result<ByteLevelTokenizer, String> {
    parse(file.to_string().as_bytes())
}

#[test]
fn the_built_in_tokenizer_gives_the_published_ids() {
    check(&built_in());
}

#[test]
fn the_order_of_the_built_in_tokens_gives_the_published_merges() {
    let tokens = tokens();
    let merges = merges(&tokens);
    assert_eq!((tokens.len(), merges.len()), (130_072, 269_443));
    let mut text = String::new();
    for (left, right) in merges {
        let newline = if text.is_empty() { "" } else { "\n" };
        write!(text, "{newline}{left} {right}").unwrap();
    }
    assert_eq!(kiln_base::hex(Sha256::digest(text)), PUBLISHED_MERGES);
}

#[test]
fn a_tekken_file_gives_the_published_ids() {
    check(&parse_value(&tekken_json(&tokens(), None)).unwrap());
}

#[test]
fn a_tekken_file_may_name_more_special_tokens() {
    let special = json!([{ "rank": 32, "token_str": "[ARGS]", "is_control": true }]);
    let later = parse_value(&tekken_json(&few_tokens(), Some(special))).unwrap();
    let earlier = parse_value(&tekken_json(&few_tokens(), None)).unwrap();
    assert_eq!(later.ids("[ARGS]").unwrap(), [32]);
    assert!(earlier.ids("[ARGS]").unwrap().len() > 1);
    assert_eq!(earlier.ids("<SPECIAL_32>").unwrap(), [32]);
    assert_eq!(later.ids("[INST]<pad>").unwrap(), [3, 11]);
}

#[test]
fn a_tokenizer_json_gives_the_published_ids() {
    let (tokens, special) = (tokens(), special_names());
    // As text: a JSON value for each token and merge would take longer than the test.
    let quoted = |text: &str| Value::from(text).to_string();
    let list = |items: Vec<String>| items.join(",");
    let vocab = special.iter().chain(&tokens).zip(0..).map(|(name, id)| format!("{}:{id}", quoted(name)));
    let merges =
        merges(&tokens).into_iter().map(|(left, right)| format!("[{},{}]", quoted(left), quoted(right)));
    let added = special.iter().zip(0..);
    let added = added.map(|(name, id)| json!({ "id": id, "content": name, "special": true }).to_string());
    let pre_tokenizer = json!({ "type": "Sequence", "pretokenizers": [
        { "type": "Split", "pattern": { "Regex": mistral::PATTERN }, "behavior": "Isolated", "invert": false },
        { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
    ] });
    let file = format!(
        r#"{{"added_tokens":[{}],"normalizer":null,"pre_tokenizer":{pre_tokenizer},
            "model":{{"type":"BPE","ignore_merges":true,"vocab":{{{}}},"merges":[{}]}}}}"#,
        list(added.collect()),
        list(vocab.collect()),
        list(merges.collect()),
    );
    check(&parse(file.as_bytes()).unwrap());
}

#[test]
fn the_metadata_of_a_gguf_file_gives_the_published_ids() {
    let (tokens, special) = (tokens(), special_names());
    let merges: Vec<String> = merges(&tokens).iter().map(|(left, right)| format!("{left} {right}")).collect();
    let names: Vec<&str> = special.iter().chain(&tokens).map(String::as_str).collect();
    let types: Vec<i64> = (0..names.len()).map(|id| if id < 1000 { 3 } else { 1 }).collect();
    let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
    check(&gguf::new(&names, &types, &merges).unwrap());
    for (problem, tokenizer) in [
        ("999 values for", gguf::new(&names, &types[..999], &merges)),
        ("one side", gguf::new(&names, &types, &["alone"])),
        ("not in the vocabulary", gguf::new(&names, &types, &["[INST] [INST]"])),
        ("no token for the byte 255", gguf::new(&names[..1255], &types[..1255], &[])),
    ] {
        assert!(tokenizer.err().unwrap().contains(problem), "{problem}");
    }
}

#[test]
fn ids_decode_to_their_text_without_special_tokens() {
    let tokenizer = built_in();
    for Text { name, text, ids, ids_specials_parsed } in texts() {
        if ids_specials_parsed.is_none() {
            assert_eq!(tokenizer.decode(&ids), text, "{name}");
        }
    }
    let ids = tokenizer.ids("[INST]a red fox[/INST]</s>").unwrap();
    assert_eq!(tokenizer.decode(&ids), "a red fox");
    // The first of two bytes, and ids that no token has.
    assert_eq!(tokenizer.decode(&[1000 + 0xc3, 131_072, u32::MAX]), "\u{fffd}");
}

#[test]
fn qwen3_decodes_added_tokens_that_are_text() {
    let tokenizer = built_in::open(&QWEN3).unwrap();
    let ids = tokenizer.ids("<|im_start|><think>a café</think>").unwrap();
    assert_eq!(tokenizer.decode(&ids), "<think>a café</think>");
}

#[test]
fn malformed_tekken_files_are_errors_that_name_the_problem() {
    let edited = |edit: fn(&mut Value)| {
        let mut file = tekken_json(&few_tokens(), Some(json!([])));
        edit(&mut file);
        file
    };
    for (problem, file) in [
        ("rank 9, expected 5", edited(|f| f["vocab"][5]["rank"] = 9.into())),
        ("token 300", edited(|f| f["vocab"][300]["token_bytes"] = "?".into())),
        ("occurs twice", edited(|f| f["vocab"][300]["token_bytes"] = "YQ==".into())),
        ("no token for the byte 7", edited(|f| f["vocab"][7]["token_bytes"] = "AAAA".into())),
        ("401 tokens, expected at least 402", edited(|f| f["config"]["default_vocab_size"] = 1402.into())),
        ("not plausible", edited(|f| f["config"]["default_vocab_size"] = 999.into())),
        ("not plausible", edited(|f| f["config"]["default_vocab_size"] = u32::MAX.into())),
        ("has rank 1000", edited(|f| f["special_tokens"] = json!([{ "rank": 1000, "token_str": "a" }]))),
        ("invalid type", edited(|f| f["vocab"] = json!([1]))),
        ("missing field `config`", edited(|f| _ = f.as_object_mut().unwrap().remove("config"))),
        ("missing field `vocab`", edited(|f| _ = f.as_object_mut().unwrap().remove("vocab"))),
    ] {
        let error = parse_value(&file).err().unwrap();
        assert!(error.contains(problem), "{problem} is missing in: {error}");
    }
}

#[test]
fn truncated_and_damaged_tekken_files_are_errors() {
    let file = tekken_json(&few_tokens(), None).to_string();
    assert!(parse(file.as_bytes()).is_ok());
    for end in (0..file.len()).step_by(97) {
        assert!(parse(&file.as_bytes()[..end]).is_err(), "{end}");
        let mut damaged = file.clone().into_bytes();
        damaged[end] = 0xff;
        assert!(parse(&damaged).is_err(), "{end}");
    }
}

#[test]
fn the_template_needs_its_special_tokens() {
    let files = TokenizerFiles {
        path: "tokenizer.json".into(),
        tokenizer: TokenizerData::Json(
            include_bytes!("../../../../testdata/tokenizer/tokenizer.json").into(),
        ),
        config: TokenizerConfig::default(),
    };
    assert!(PromptTokenizer::open(&QWEN3, &files).is_ok());
    let error = PromptTokenizer::open(&MISTRAL, &files).err().unwrap().to_string();
    assert!(error.contains("no token `<s>`, which Mistral's template has"), "{error}");
    let mistral = tekken_json(&few_tokens(), None).to_string().into_bytes();
    let files = TokenizerFiles { tokenizer: TokenizerData::Json(mistral), ..files };
    assert!(PromptTokenizer::open(&MISTRAL, &files).is_ok());
    let error = PromptTokenizer::open(&QWEN3, &files).err().unwrap().to_string();
    assert!(error.contains("no padding token `<|endoftext|>`"), "{error}");
}
