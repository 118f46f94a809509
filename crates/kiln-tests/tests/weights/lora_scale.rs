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

fn problem<T: std::fmt::Debug>(result: Result<T, kiln_weights::Error>) -> LoraProblem {
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
fn alpha_tensor_comes_before_the_defaults_of_the_metadata() {
    let eight = 8f32.to_le_bytes();
    assert_eq!(with_alpha("F32", &[], &eight, "").unwrap().scale("x"), Some(2.0));
    assert_eq!(with_alpha("BF16", &[1], &[0x00, 0x41], "").unwrap().scale("x"), Some(2.0));
    let two = 2f32.to_le_bytes();
    assert_eq!(with_alpha("F32", &[], &two, r#"{"transformer.r":4}"#).unwrap().scale("x"), Some(0.5));
    let root = r#"{"transformer.r":4,"transformer.lora_alpha":8,"transformer.use_rslora":true}"#;
    assert_eq!(with_alpha("F32", &[], &eight, root).unwrap().scale("x"), Some(4.0));
}

#[test]
fn an_alpha_tensor_and_another_alpha_in_the_metadata_are_refused() {
    let eight = 8f32.to_le_bytes();
    let four = r#"{"transformer.r":4,"transformer.lora_alpha":4}"#;
    let found = problem(with_alpha("F32", &[], &eight, four));
    assert_eq!(
        found.to_string(),
        "`x.alpha` is 8, but its lora_adapter_metadata has an alpha of 4; expected one alpha"
    );
    let pattern = r#"{"transformer.r":4,"transformer.alpha_pattern":{"x":2}}"#;
    assert!(matches!(problem(with_alpha("F32", &[], &eight, pattern)), LoraProblem::MetadataAlpha { .. }));
    // What the tensor's type rounds is no difference: bf16 has no 1.001.
    let close = r#"{"transformer.r":4,"transformer.lora_alpha":1.001}"#;
    assert_eq!(with_alpha("BF16", &[1], &[0x80, 0x3f], close).unwrap().scale("x"), Some(0.25));
}

#[test]
fn an_alpha_or_rank_of_null_is_refused_as_peft_does() {
    for (metadata, name) in [
        (r#"{"transformer.r":4,"transformer.lora_alpha":null}"#, "lora_alpha"),
        (r#"{"transformer.r":null,"transformer.lora_alpha":4}"#, "r"),
    ] {
        let found = problem(with_metadata(&[Q], metadata)).to_string();
        assert!(found.contains(&format!("`{name}` is null, expected a number")), "{found}");
    }
}

#[test]
fn alpha_tensor_must_be_one_finite_number() {
    let nan = problem(with_alpha("F32", &[], &f32::NAN.to_le_bytes(), ""));
    assert_eq!(nan.to_string(), "`x.alpha` is NaN, expected a finite number other than 0");
    let two = problem(with_alpha("F32", &[2], &[0; 8], ""));
    assert_eq!(two.to_string(), "`x.alpha` has shape [2], expected one number");
    let flag = problem(with_alpha("BOOL", &[], &[1], ""));
    assert_eq!(flag.to_string(), "`x.alpha` is bool, expected f32, bf16, f16, f64, fp8, i32 or i64");
    // It means no update to ComfyUI, and no alpha to LyCORIS.
    let zero = problem(with_alpha("F32", &[], &[0; 4], ""));
    assert_eq!(zero.to_string(), "`x.alpha` is 0, expected a finite number other than 0");
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
    assert_eq!(
        dora.to_string(),
        "its lora_adapter_metadata says use_dora, but there is no lora_magnitude_vector for every module"
    );
    let magnitude = |settings| {
        let keys =
            ["x.lora_A.weight", "x.lora_B.weight", "x.dora_scale", "y.lora_A.weight", "y.lora_B.weight"];
        let keys: Vec<(&str, &[usize])> = keys.iter().map(|key| (*key, &[1, 1][..])).collect();
        Lora::from_bytes("a", crate::common::tensors(&keys, &[("lora_adapter_metadata", settings)]))
    };
    let some = problem(magnitude(r#"{"r":1,"use_dora":true}"#));
    assert!(matches!(some, LoraProblem::DoraWithoutMagnitude { .. }), "{some}");
    let other = problem(magnitude(r#"{"r":1,"use_dora":false}"#));
    let expected =
        "its lora_adapter_metadata says that use_dora is false, but there are magnitudes in the LoRA";
    assert_eq!(other.to_string(), expected);
    assert!(magnitude(r#"{"r":1}"#).is_ok());
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

const LOKR: [(&str, [usize; 2]); 3] = [("lokr_w1", [2, 2]), ("lokr_w2_a", [2, 4]), ("lokr_w2_b", [4, 3])];
const FULL_LOKR: [(&str, [usize; 2]); 2] = [("lokr_w1", [2, 2]), ("lokr_w2", [2, 3])];
const LOHA: [(&str, [usize; 2]); 4] =
    [("hada_w1_a", [4, 4]), ("hada_w1_b", [4, 6]), ("hada_w2_a", [4, 4]), ("hada_w2_b", [4, 6])];

/// A file with the module `x` of these tensors, which PEFT saved with these settings.
fn peft(suffixes: &[(&str, [usize; 2])], settings: &str) -> Result<Lora, kiln_weights::Error> {
    let keys: Vec<_> = suffixes.iter().map(|(s, shape)| (format!("base_model.model.x.{s}"), shape)).collect();
    let keys: Vec<(&str, &[usize])> = keys.iter().map(|(key, shape)| (key.as_str(), &shape[..])).collect();
    Lora::from_bytes("a", crate::common::tensors(&keys, &[("lora_adapter_metadata", settings)]))
}

#[test]
fn lokr_and_loha_of_peft_have_their_alpha_in_alpha() {
    let scale = |suffixes: &[_], settings: &str| peft(suffixes, settings).unwrap().scale("x");
    for (kind, suffixes) in [("LOKR", &LOKR[..]), ("LOKR", &FULL_LOKR), ("LOHA", &LOHA)] {
        // PEFT divides by the rank in the settings, also if a LoKr has no low-rank factor.
        let settings = format!(r#"{{"peft_type":"{kind}","r":4,"alpha":6,"use_effective_conv2d":false}}"#);
        assert_eq!(scale(suffixes, &settings), Some(1.5), "{kind}");
        assert_eq!(scale(suffixes, r#"{"r":4,"alpha":2}"#), Some(0.5), "{kind}");
        // Both are 8 by default.
        assert_eq!(scale(suffixes, &format!(r#"{{"peft_type":"{kind}","r":4}}"#)), Some(2.0), "{kind}");
        let patterns = r#"{"r":2,"alpha":2,"rank_pattern":{"x":4},"alpha_pattern":{"x":20}}"#;
        assert_eq!(scale(suffixes, patterns), Some(5.0), "{kind}");
    }
    let prefixed = r#"{"transformer.peft_type":"LOKR","transformer.r":4,"transformer.alpha":6}"#;
    assert_eq!(scale(&LOKR, prefixed), Some(1.5));
}

#[test]
fn settings_must_be_those_of_the_tensors_kind() {
    let message = |suffixes: &[_], settings: &str| problem(peft(suffixes, settings)).to_string();
    assert_eq!(
        message(&LOKR, r#"{"peft_type":"LORA","r":4,"lora_alpha":4}"#),
        "its lora_adapter_metadata is that of a LoRA, but `base_model.model.x.lokr_w2_a` is of a LoKr"
    );
    let lora = [("lora_A.weight", [4, 6]), ("lora_B.weight", [4, 4])];
    assert!(
        message(&lora, r#"{"r":4,"alpha":4}"#)
            .starts_with("its lora_adapter_metadata is that of a LoKr or LoHa, but")
    );
    assert!(message(&lora, r#"{"r":4,"alpha":4,"lora_alpha":4}"#).contains("both `alpha` and `lora_alpha`"));
    assert!(message(&LOKR, r#"{"r":3,"alpha":4}"#).contains("gives `x` rank 3"));
    assert!(message(&FULL_LOKR, r#"{"r":0,"alpha":4}"#).contains("the rank of `x` is 0"));
}

#[test]
fn types_and_settings_of_peft_that_are_not_supported_are_errors_with_their_names() {
    let scale = |settings: &str| with_metadata(&[Q], settings).map(|lora| lora.scale(Q.0));
    for kind in [
        "ADALORA",
        "BOFT",
        "BONE",
        "C3A",
        "DELORA",
        "FOURIERFT",
        "GLORA",
        "GRALORA",
        "HRA",
        "IA3",
        "LN_TUNING",
        "MISS",
        "OFT",
        "POLY",
        "RANDLORA",
        "ROAD",
        "SHIRA",
        "VBLORA",
        "VERA",
        "WAVEFT",
        "XLORA",
    ] {
        let message = problem(scale(&format!(r#"{{"transformer.peft_type":"{kind}"}}"#))).to_string();
        assert_eq!(
            message,
            format!("its lora_adapter_metadata has peft_type ({kind}), which is not supported")
        );
    }
    for setting in [
        r#""use_qalora":true"#,
        r#""lora_bias":true"#,
        r#""layer_replication":[[0,4],[2,5]]"#,
        r#""alora_invocation_tokens":[5]"#,
        r#""trainable_token_indices":[5]"#,
        r#""target_parameters":["x"]"#,
        r#""use_bdlora":{"nblocks":2}"#,
        r#""arrow_config":{"top_k":3}"#,
        r#""kasa_config":{"beta":0.1}"#,
        r#""monteclora_config":{"num_samples":8}"#,
        // These change the weights that the LoRA is added to.
        r#""init_lora_weights":"pissa""#,
        r#""init_lora_weights":"pissa_niter_16""#,
        r#""init_lora_weights":"olora""#,
        r#""init_lora_weights":"corda""#,
        r#""init_lora_weights":"loftq""#,
        r#""init_lora_weights":"lora_ga""#,
    ] {
        let message = problem(scale(&format!(r#"{{"r":4,"lora_alpha":8,{setting}}}"#))).to_string();
        let name = setting.split('"').nth(1).unwrap();
        assert!(message.starts_with(&format!("its lora_adapter_metadata has {name} (")), "{message}");
    }
    let harmless = r#"{"peft_type":"LORA","r":4,"lora_alpha":8,"bias":"none","fan_in_fan_out":true,
        "modules_to_save":null,"init_lora_weights":"gaussian","lora_dropout":0.1,"exclude_modules":["a"],
        "target_modules":["to_q"],"megatron_config":null,"megatron_core":"megatron.core","use_qalora":false,
        "layer_replication":null,"alora_invocation_tokens":null,"target_parameters":[],"lora_bias":false,
        "velora_config":{"rank":1},"runtime_config":{"ephemeral_gpu_offload":false},"task_type":null}"#;
    assert_eq!(scale(harmless).unwrap(), Some(2.0));
}
