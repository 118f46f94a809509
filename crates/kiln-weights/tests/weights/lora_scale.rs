//! The scales of a LoRA file's modules, as PEFT 0.21 and diffusers 0.42 compute them.

use crate::common::{file, lora};
use kiln_weights::{Lora, LoraProblem};
use serde_json::json;

const Q: (&str, usize, usize, usize) = ("transformer_blocks.0.attn.to_q", 4, 6, 6);
const K: (&str, usize, usize, usize) = ("transformer_blocks.0.attn.to_k", 2, 6, 6);

fn with_metadata(modules: &[(&str, usize, usize, usize)], json: &str) -> Result<Lora, kiln_weights::Error> {
    Lora::from_bytes("a", lora(modules, &[("format", "pt"), ("lora_adapter_metadata", json)]))
}

/// The scale of `Q` with these settings, each without its `transformer.` prefix.
fn scale_of_q(settings: &str) -> f64 {
    with_metadata(&[Q], &settings.replace("{\"", "{\"transformer.").replace(",\"", ",\"transformer."))
        .unwrap()
        .scale(Q.0)
        .unwrap()
}

/// One file with a module of rank 4 and an `.alpha` tensor of this dtype, shape and value.
fn with_alpha(
    dtype: &str,
    shape: &[usize],
    bytes: &[u8],
    metadata: &str,
) -> Result<Lora, kiln_weights::Error> {
    let header = json!({
        "__metadata__": { "lora_adapter_metadata": metadata },
        "x.lora_A.weight": { "dtype": "F32", "shape": [4, 1], "data_offsets": [0, 16] },
        "x.lora_B.weight": { "dtype": "F32", "shape": [1, 4], "data_offsets": [16, 32] },
        "x.alpha": { "dtype": dtype, "shape": shape, "data_offsets": [32, 32 + bytes.len()] },
    });
    Lora::from_bytes("a", file(&header.to_string(), &[&[0; 32], bytes].concat()))
}

fn problem(result: Result<Lora, kiln_weights::Error>) -> LoraProblem {
    match result.unwrap_err() {
        kiln_weights::Error::Lora { problem, .. } => *problem,
        other => panic!("{other}"),
    }
}

#[test]
fn without_alpha_every_module_has_scale_1_whatever_its_rank() {
    let lora = Lora::from_bytes("a", lora(&[Q, K], &[("format", "pt")])).unwrap();
    assert_eq!((lora.scale(Q.0), lora.scale(K.0)), (Some(1.0), Some(1.0)));
    assert_eq!(lora.rank(), 4);
}

#[test]
fn metadata_gives_alpha_over_rank() {
    assert_eq!(scale_of_q(r#"{"r":4,"lora_alpha":8}"#), 2.0);
    assert_eq!(scale_of_q(r#"{"r":4,"lora_alpha":2.5,"use_rslora":false}"#), 0.625);
}

#[test]
fn rank_stabilized_loras_divide_by_the_square_root() {
    assert_eq!(scale_of_q(r#"{"r":4,"lora_alpha":8,"use_rslora":true}"#), 4.0);
}

#[test]
fn missing_settings_have_the_defaults_of_peft() {
    // Both r and lora_alpha are 8 there.
    assert_eq!(scale_of_q(r#"{"r":4}"#), 2.0);
    assert_eq!(scale_of_q(r#"{"r":4,"lora_alpha":null}"#), 2.0);
    assert!(matches!(
        problem(with_metadata(&[Q], r#"{"transformer.lora_alpha":8}"#)),
        LoraProblem::MetadataRank { expected: 8.0, found: 4, .. }
    ));
}

#[test]
fn metadata_without_the_prefix_counts_if_there_is_no_other() {
    let scale = |json| with_metadata(&[Q], json).unwrap().scale(Q.0);
    assert_eq!(scale(r#"{"r":4,"lora_alpha":8}"#), Some(2.0));
    assert_eq!(scale(r#"{"lora_alpha":8,"transformer.r":4,"transformer.lora_alpha":4}"#), Some(1.0));
    assert_eq!(scale(r#"{"text_encoder.r":16,"text_encoder.lora_alpha":32}"#), Some(1.0));
    assert_eq!(scale(""), Some(1.0));
}

#[test]
fn patterns_set_rank_and_alpha_of_single_modules() {
    let json = r#"{"transformer.r":4,"transformer.lora_alpha":4,
        "transformer.rank_pattern":{"attn.to_k":2},"transformer.alpha_pattern":{"^transformer_blocks.0.attn.to_k":6}}"#;
    let lora = with_metadata(&[Q, K], json).unwrap();
    assert_eq!((lora.scale(Q.0), lora.scale(K.0)), (Some(1.0), Some(3.0)));
}

#[test]
fn first_matching_pattern_wins_in_the_order_of_the_file() {
    let scale = |patterns: &str| {
        let json = format!(
            r#"{{"transformer.r":4,"transformer.lora_alpha":4,"transformer.alpha_pattern":{patterns}}}"#
        );
        with_metadata(&[Q], &json).unwrap().scale(Q.0)
    };
    assert_eq!(scale(r#"{"to_q":8,"attn.to_q":16}"#), Some(2.0));
    assert_eq!(scale(r#"{"attn.to_q":16,"to_q":8}"#), Some(4.0));
}

/// Patterns, and the modules below that they match according to `peft.utils.other.get_pattern_key`.
const MATCHES: [(&str, &[usize]); 17] = [
    ("to_q", &[0, 1]),
    ("attn.to_q", &[0, 1]),
    ("^transformer_blocks.0.attn.to_q", &[0]),
    ("transformer_blocks.0.attn.to_q", &[0]),
    ("_q", &[]),
    ("o_q", &[]),
    (r"transformer_blocks\.\d+\.attn\.to_q", &[0, 1]),
    ("^proj_out", &[4]),
    ("out", &[]),
    (".*", &[0, 1, 2, 3, 4, 5, 6, 7]),
    ("linear|proj_out", &[4, 6]),
    ("transformer_blocks.*", &[0, 1, 2, 7]),
    ("attn.to_out", &[3]),
    ("0", &[2]),
    ("q|to_out.0", &[2]),
    ("^attn.to_q", &[]),
    ("(?:x|y)_embedder", &[5]),
];

const MODULES: [&str; 8] = [
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.10.attn.to_q",
    "transformer_blocks.0.attn.to_out.0",
    "single_transformer_blocks.0.attn.to_out",
    "proj_out",
    "x_embedder",
    "norm_out.linear",
    "transformer_blocks.0.ff.linear_in",
];

#[test]
fn patterns_match_as_in_peft() {
    let modules = MODULES.map(|m| (m, 1, 1, 1));
    for (pattern, expected) in MATCHES {
        let json = json!({
            "transformer.r": 1, "transformer.lora_alpha": 1, "transformer.alpha_pattern": { pattern: 7 },
        });
        let lora = with_metadata(&modules, &json.to_string()).unwrap();
        let matched: Vec<usize> =
            (0..MODULES.len()).filter(|&i| lora.scale(MODULES[i]) == Some(7.0)).collect();
        assert_eq!(matched, expected, "{pattern}");
    }
}

#[test]
fn alpha_tensor_comes_before_the_metadata() {
    let eight = 8f32.to_le_bytes();
    assert_eq!(with_alpha("F32", &[], &eight, "").unwrap().scale("x"), Some(2.0));
    assert_eq!(with_alpha("BF16", &[1], &[0x00, 0x41], "").unwrap().scale("x"), Some(2.0));
    let four = r#"{"transformer.r":4,"transformer.lora_alpha":4}"#;
    assert_eq!(with_alpha("F32", &[], &eight, four).unwrap().scale("x"), Some(2.0));
    let root = r#"{"transformer.r":4,"transformer.lora_alpha":4,"transformer.use_rslora":true}"#;
    assert_eq!(with_alpha("F32", &[], &eight, root).unwrap().scale("x"), Some(4.0));
}

#[test]
fn alpha_tensor_must_be_one_finite_number() {
    let nan = problem(with_alpha("F32", &[], &f32::NAN.to_le_bytes(), ""));
    assert_eq!(nan.to_string(), "`x.alpha` is NaN, expected a finite number");
    let two = problem(with_alpha("F32", &[2], &[0; 8], ""));
    assert_eq!(two.to_string(), "`x.alpha` has shape [2], expected one number");
    let flag = problem(with_alpha("BOOL", &[], &[1], ""));
    assert_eq!(flag.to_string(), "`x.alpha` is bool, expected f32, bf16, f16 or f64");
    // Some writers store an integer as such.
    assert_eq!(with_alpha("I64", &[], &8i64.to_le_bytes(), "").unwrap().scale("x"), Some(2.0));
}

#[test]
fn rank_of_the_metadata_must_be_that_of_the_matrices() {
    assert_eq!(
        problem(with_metadata(&[Q], r#"{"transformer.r":16,"transformer.lora_alpha":16}"#)).to_string(),
        "its lora_adapter_metadata gives `transformer_blocks.0.attn.to_q` rank 16, but \
         `transformer.transformer_blocks.0.attn.to_q.lora_A.weight` has 4"
    );
}

#[test]
fn dora_in_the_metadata_requires_magnitudes() {
    let dora = problem(with_metadata(&[Q], r#"{"transformer.r":4,"transformer.use_dora":true}"#));
    assert_eq!(dora.to_string(), "its settings say use_dora, but there is no lora_magnitude_vector in it");
}

#[test]
fn invalid_metadata_is_an_error() {
    for (json, expected) in [
        ("nonsense", "expected"),
        ("[1]", "it is not an object"),
        (r#"{"transformer.r":"four"}"#, "`r` is not a number"),
        (r#"{"transformer.r":4,"transformer.alpha_pattern":[]}"#, "`alpha_pattern` is not an object"),
        (r#"{"transformer.r":4,"transformer.alpha_pattern":{"(":1}}"#, "pattern `(` of `alpha_pattern`: "),
        (r#"{"transformer.r":4,"transformer.alpha_pattern":{"a{9999}{9999}":1}}"#, "of `alpha_pattern`: "),
        (r#"{"transformer.r":4,"transformer.rank_pattern":{"a":"b"}}"#, "`rank_pattern` is not a number"),
    ] {
        let message = problem(with_metadata(&[Q], json)).to_string();
        assert!(
            message.starts_with("its lora_adapter_metadata is not usable: ") && message.contains(expected),
            "{json}: {message}"
        );
    }
}
