//! What diffusers follows in the files of a tokenizer: ids by transformers 5.23 for the prompt "a fox", called as klein's
//! pipeline does (`apply_chat_template` with `enable_thinking=False`, then `padding="max_length", truncation=True`), with the
//! tokenizer of `testdata/tokenizer` and one change.

use kiln_family::flux2::QWEN3;
use serde_json::{Value, json};

use super::*;

/// The ids of the prompt in its template.
const IDS: [u32; 18] = [417, 403, 198, 64, 220, 69, 78, 87, 418, 198, 417, 409, 387, 198, 440, 354, 441, 354];
const PAD: u32 = 416;

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// Opens the tokenizer with changed files and perhaps a `chat_template.jinja`.
fn open(
    tokenizer: impl Fn(&mut Value),
    config: impl Fn(&mut Value),
    jinja: Option<&str>,
) -> Result<PromptTokenizer> {
    let mut file = json(include_bytes!("../../../../testdata/tokenizer/tokenizer.json"));
    let mut settings = json(include_bytes!("../../../../testdata/tokenizer/tokenizer_config.json"));
    tokenizer(&mut file);
    config(&mut settings);
    let settings: TokenizerConfig = serde_json::from_value(settings).unwrap();
    let files = TokenizerFiles {
        path: "tokenizer.json".into(),
        tokenizer: TokenizerData::Json(file.to_string().into_bytes()),
        config: settings.with_chat_template(jinja.map(str::to_owned)),
    };
    PromptTokenizer::open(&QWEN3, &files)
}

fn encode(tokenizer: &Result<PromptTokenizer>, max: usize) -> Tokens {
    tokenizer.as_ref().unwrap().encode("a fox", max).unwrap()
}

fn padded(ids: &[u32], max: usize) -> Vec<u32> {
    [ids, &vec![PAD; max - ids.len()]].concat()
}

fn nothing(_: &mut Value) {}

#[test]
fn the_published_form_is_the_built_in_template() {
    let tokenizer = open(nothing, nothing, None);
    assert_eq!(encode(&tokenizer, 40), Tokens { ids: padded(&IDS, 40), real: 0..18 });
    assert_eq!(encode(&tokenizer, 12), Tokens { ids: IDS[..12].to_vec(), real: 0..12 });
    assert_eq!(tokenizer.unwrap().count("a fox").unwrap(), 18);
}

#[test]
fn the_sides_of_padding_and_truncation_are_followed() {
    let left = open(nothing, |c| c["padding_side"] = "left".into(), None);
    let expected = [vec![PAD; 22], IDS.to_vec()].concat();
    assert_eq!(encode(&left, 40), Tokens { ids: expected.clone(), real: 22..40 });
    let left = open(nothing, |c| c["truncation_side"] = "left".into(), None);
    assert_eq!(encode(&left, 12), Tokens { ids: IDS[6..].to_vec(), real: 0..12 });
    // The lengths in the file are not used, the sides are.
    let file = |t: &mut Value| {
        t["padding"] =
            json!({ "strategy": { "Fixed": 50 }, "direction": "Left", "pad_id": 0, "pad_token": "!" });
        t["truncation"] =
            json!({ "direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0 });
    };
    assert_eq!(encode(&open(file, nothing, None), 40).ids, expected);
    let both = open(file, |c| c["padding_side"] = "right".into(), None);
    assert_eq!(encode(&both, 40).ids, padded(&IDS, 40));
}

#[test]
fn what_a_post_processor_adds_is_added_and_not_cut_off() {
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<|endoftext|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [],
        "special_tokens": { "<|endoftext|>": { "id": "<|endoftext|>", "ids": [416], "tokens": ["<|endoftext|>"] } },
    });
    let sequence = json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" }, template] });
    let expected = [&[416], &IDS[..]].concat();
    for processor in [template, sequence] {
        let tokenizer = open(|t| t["post_processor"] = processor.clone(), nothing, None);
        assert_eq!(encode(&tokenizer, 40), Tokens { ids: padded(&expected, 40), real: 0..19 });
        assert_eq!(encode(&tokenizer, 12).ids, expected[..12]);
        assert_eq!(tokenizer.unwrap().count("a fox").unwrap(), 19);
    }
    let other = json!({ "type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2] });
    let error = open(|t| t["post_processor"] = other.clone(), nothing, None).err().unwrap().to_string();
    assert!(error.contains("BertProcessing"), "{error}");
}

#[test]
fn another_chat_template_is_followed_and_its_own_file_comes_first() {
    let letters = |first: u32, last: u32| [first, 64, 220, 69, 78, 87, last];
    let config = |c: &mut Value| c["chat_template"] = "A{{ messages[0]['content'] }}B".into();
    assert_eq!(encode(&open(nothing, config, None), 40).ids, padded(&letters(32, 33), 40));
    let jinja = Some("X{{messages[0].content}}Y");
    assert_eq!(encode(&open(nothing, config, jinja), 40).ids, padded(&letters(55, 56), 40));
    let list = json!([
        { "name": "tool_use", "template": "T" },
        { "name": "default", "template": "D{{ messages[0]['content'] }}" },
    ]);
    let list = open(nothing, |c| c["chat_template"] = list.clone(), None);
    assert_eq!(encode(&list, 40).ids, padded(&letters(35, 0)[..6], 40));
    let refused =
        open(nothing, nothing, Some("{{ messages[0].content | upper }}")).err().unwrap().to_string();
    assert!(refused.contains("the chat template is not supported: it leaves out the prompt"), "{refused}");
}

#[test]
fn tokens_that_only_the_configuration_has_are_refused_by_name() {
    let new =
        json!({ "content": " fox", "lstrip": false, "normalized": false, "rstrip": false, "special": true });
    type Change<'a> = &'a dyn Fn(&mut Value);
    let cases: [(Change<'_>, &str); 6] = [
        (
            &|c| c["added_tokens_decoder"]["900"] = new.clone(),
            "added_tokens_decoder of tokenizer_config.json has `900:  fox`",
        ),
        (
            &|c| _ = c["added_tokens_decoder"].as_object_mut().unwrap().remove("418"),
            "lacks `418: <|im_end|>`",
        ),
        (&|c| c["additional_special_tokens"] = json!([" fox"]), "additional_special_tokens"),
        (&|c| c["extra_special_tokens"] = json!({ "x_token": "fox" }), "extra_special_tokens"),
        (&|c| c["split_special_tokens"] = true.into(), "split_special_tokens"),
        (&|c| c["add_prefix_space"] = true.into(), "add_prefix_space"),
    ];
    for (change, word) in cases {
        let error = open(nothing, change, None).err().unwrap().to_string();
        assert!(error.contains(word), "{word} is missing in: {error}");
    }
    // What transformers does not heed.
    for change in [
        (|c: &mut Value| c["add_bos_token"] = true.into()) as fn(&mut Value),
        |c| c["added_tokens_decoder"]["418"]["lstrip"] = true.into(),
        |c| c["additional_special_tokens"] = json!(["<|im_end|>"]),
    ] {
        assert_eq!(encode(&open(nothing, change, None), 40).ids, padded(&IDS, 40));
    }
}
