//! LoRA files: what is read, what is an error, and which rows change. `lora_layouts.rs` tests the layouts.

use crate::common::{apply, layers, lora, resolve, tensors};
use kiln_weights::{Error, LayerShape, Lora, LoraOptions, LoraUpdates, WeightSource};

fn base() -> WeightSource {
    let shapes: [(&str, &[usize]); 5] = [
        ("blocks.0.attn.to_q.weight", &[4, 3]),
        ("blocks.0.attn.to_k.weight", &[2, 3]),
        ("blocks.0.attn.to_v.weight", &[2, 3]),
        ("blocks.0.attn.to_out.0.weight", &[3, 4]),
        ("blocks.0.attn.to_out.0.bias", &[3]),
    ];
    WeightSource::from_bytes("model.safetensors", tensors(&shapes, &[])).unwrap()
}

fn opened(keys: &[(&str, &[usize])]) -> Result<Lora, Error> {
    Lora::from_bytes("dir/style.safetensors", tensors(keys, &[]))
}

/// The error for a LoRA of these keys, without the file's name.
fn open_error(keys: &[(&str, &[usize])]) -> String {
    let message = opened(keys).unwrap_err().to_string();
    let start = "LoRA `dir/style.safetensors`: ";
    message.strip_prefix(start).unwrap_or_else(|| panic!("no file name: {message}")).to_owned()
}

const Q: (&str, usize, usize, usize) = ("blocks.0.attn.to_q", 2, 4, 3);
const V: (&str, usize, usize, usize) = ("blocks.0.attn.to_v", 1, 2, 3);

#[test]
fn prefixes_are_those_of_diffusers_and_peft_or_none() {
    for prefix in ["transformer.", "base_model.model.", ""] {
        let [a, b] = ["A", "B"].map(|ab| format!("{prefix}blocks.0.attn.to_q.lora_{ab}.weight"));
        let lora = opened(&[(&a, &[2, 3]), (&b, &[4, 2])]).unwrap();
        assert_eq!(lora.modules().collect::<Vec<_>>(), ["blocks.0.attn.to_q"]);
        assert_eq!((lora.rank(), lora.scale("blocks.0.attn.to_q")), (2, Some(1.0)));
    }
}

#[test]
fn delta_changes_its_rows_of_a_stack() {
    let base = base();
    let updates = apply(&base, Lora::from_bytes("a", lora(&[Q, V], &[])).unwrap(), 0.5);
    let attn = base.root().with_loras(&updates).at("blocks").at(0).at("attn");
    let qkv = attn.linear_stack(&[("to_q", 4), ("to_k", 2), ("to_v", 2)], 3).unwrap();
    let at: Vec<_> = qkv.deltas().iter().map(|d| (d.row, d.rows(), d.rank(), d.scale)).collect();
    assert_eq!(at, [(0, 4, 2, 0.5), (6, 2, 1, 0.5)]);
    // The values count up through the file: down of q, up of q, down of v, up of v.
    assert_eq!(qkv.deltas()[1].down.to_f32().unwrap().as_ref(), [14.0, 15.0, 16.0]);
    assert_eq!(qkv.deltas()[1].up.to_f32().unwrap().as_ref(), [17.0, 18.0]);
    assert!(attn.linear("to_out.0", 3, 4).unwrap().deltas().is_empty());
    assert_eq!(attn.linear("to_v", 2, 3).unwrap().deltas()[0].row, 0);
}

#[test]
fn several_loras_add_up_in_their_order() {
    let base = base();
    let first = Lora::from_bytes("a", lora(&[Q], &[])).unwrap();
    let second = Lora::from_bytes("b", lora(&[(Q.0, 1, 4, 3)], &[])).unwrap();
    let (updates, reports) = resolve(&base, [(first, 0.25), (second, -2.0)]).unwrap();
    let q = base.root().with_loras(&updates).linear("blocks.0.attn.to_q", 4, 3).unwrap();
    let at: Vec<_> = q.deltas().iter().map(|d| (d.rank(), d.scale)).collect();
    assert_eq!(at, [(2, 0.25), (1, -2.0)]);
    assert_eq!(reports.len(), 2);
}

#[test]
fn weight_zero_switches_a_lora_off_but_still_checks_it() {
    let base = base();
    let (updates, reports) =
        resolve(&base, [(Lora::from_bytes("a", lora(&[Q], &[])).unwrap(), 0.0)]).unwrap();
    assert!(base.root().with_loras(&updates).linear(Q.0, 4, 3).unwrap().deltas().is_empty());
    assert_eq!(reports[0].matched, 1);
    let narrow = Lora::from_bytes("a", lora(&[(Q.0, 2, 4, 2)], &[])).unwrap();
    assert!(resolve(&base, [(narrow, 0.0)]).is_err());
}

#[test]
fn report_counts_modules() {
    let lora = Lora::from_bytes("loras/style.safetensors", lora(&[Q, V], &[])).unwrap();
    let (_, reports) = resolve(&base(), [(lora, 0.8)]).unwrap();
    assert_eq!(reports[0].to_string(), "lora style.safetensors: 2 of 2 modules, rank 2, weight 0.8");
}

#[test]
fn module_without_a_layer_is_an_error() {
    let other = ("blocks.7.attn.to_q", 2, 4, 3);
    let lora = Lora::from_bytes("style.safetensors", lora(&[Q, other], &[])).unwrap();
    let e = resolve(&base(), [(lora, 1.0)]).unwrap_err();
    assert!(
        matches!(&e, Error::LoraUnmatched { keys, total: 2, .. } if keys == &["transformer.blocks.7.attn.to_q"])
    );
    assert_eq!(
        e.to_string(),
        "LoRA `style.safetensors`: 1 of its 2 modules match nothing in `model.safetensors`: \
         `transformer.blocks.7.attn.to_q`; it was made for another model"
    );
}

#[test]
fn lora_of_another_size_is_an_error_with_its_layer() {
    let load = |module| {
        let lora = Lora::from_bytes("style.safetensors", lora(&[module], &[])).unwrap();
        resolve(&base(), [(lora, 1.0)]).unwrap_err().to_string()
    };
    assert_eq!(
        load((Q.0, 2, 4, 5)),
        "LoRA `style.safetensors`: `transformer.blocks.0.attn.to_q.lora_A.weight` has shape [2, 5], but for \
         `blocks.0.attn.to_q` of 4 by 3 it must be [2, 3]; it was made for a model of another size"
    );
    assert!(load((Q.0, 2, 6, 3)).contains("lora_B.weight` has shape [6, 2], but"));
}

#[test]
fn missing_tensor_of_a_module_is_an_error() {
    assert_eq!(
        open_error(&[("transformer.x.lora_B.weight", &[4, 2])]),
        "`transformer.x.lora_B.weight` has no `transformer.x.lora_A.weight` beside it"
    );
    assert_eq!(
        open_error(&[("x.lora_A.weight", &[4, 2])]),
        "`x.lora_A.weight` has no `x.lora_B.weight` beside it"
    );
    assert_eq!(open_error(&[("x.alpha", &[])]), "`x.alpha` has no `x.lora_A.weight` beside it");
}

#[test]
fn different_ranks_are_an_error() {
    assert_eq!(
        open_error(&[("x.lora_A.weight", &[4, 8]), ("x.lora_B.weight", &[8, 3])]),
        "`x.lora_A.weight` has rank 4 (shape [4, 8]), but `x.lora_B.weight` has shape [8, 3]"
    );
}

#[test]
fn tensors_must_be_matrices() {
    for shape in [&[4][..], &[0, 3]] {
        let message = open_error(&[("x.lora_A.weight", shape), ("x.lora_B.weight", &[8, 4])]);
        assert!(message.ends_with("expected a matrix that is not empty"), "{message}");
    }
}

#[test]
fn integer_matrices_are_an_error() {
    let header = r#"{"x.lora_A.weight":{"dtype":"I8","shape":[1,1],"data_offsets":[0,1]},
                     "x.lora_B.weight":{"dtype":"I8","shape":[1,1],"data_offsets":[1,2]}}"#;
    let e = Lora::from_bytes("a", crate::common::file(header, &[0; 2])).unwrap_err().to_string();
    assert_eq!(e, "LoRA `a`: `x.lora_B.weight` is i8, expected f32, bf16, f16, f64 or fp8");
}

#[test]
fn one_module_under_two_prefixes_is_an_error() {
    assert_eq!(
        open_error(&[
            ("transformer.x.lora_A.weight", &[1, 1]),
            ("transformer.x.lora_B.weight", &[1, 1]),
            ("x.lora_A.weight", &[1, 1]),
            ("x.lora_B.weight", &[1, 1]),
        ]),
        "both `transformer.x.lora_A.weight` and `x.lora_A.weight` are for one module"
    );
}

#[test]
fn unsupported_kinds_are_an_error_with_their_name() {
    for (key, kind) in [
        ("transformer.x.lora_B.bias", "LoRA with biases"),
        ("transformer.x.lora_B.style.bias", "LoRA with biases"),
        ("lora_unet_x.oft_blocks", "OFT"),
        ("lora_unet_x.oft_R.weight", "OFT"),
        ("base_model.model.x.boft_R", "BOFT"),
        ("lora_unet_x.a1.weight", "GLoRA"),
        ("lora_unet_x.bm.weight", "GLoRA"),
        ("lora_unet_x.on_input", "IA3"),
        ("base_model.model.x.ia3_l", "IA3"),
        ("lycoris_x.lambda_layer", "T-LoRA"),
        ("base_model.model.x.lora_E", "AdaLoRA"),
        ("base_model.model.x.lora_diag.weight", "KaSA"),
        ("base_model.model.x.vera_lambda_b", "VeRA"),
        ("base_model.model.x.hra_u", "HRA"),
        ("base_model.model.x.shira_weight", "SHiRA"),
        ("base_model.model.x.c3a_kernel", "C3A"),
        ("diffusion_model.img_in.reshape_weight", "LoRA that resizes layers"),
    ] {
        assert_eq!(
            open_error(&[(key, &[1])]),
            format!("it is an adapter of type {kind} (`{key}`), which is not supported")
        );
    }
}

#[test]
fn partial_ignores_keys_that_match_nothing() {
    let base = base();
    let resolved = |partial| {
        let keys: [(&str, &[usize]); 6] = [
            ("transformer.blocks.0.attn.to_q.lora_A.weight", &[1, 3]),
            ("transformer.blocks.0.attn.to_q.lora_B.weight", &[4, 1]),
            ("lora_unet_nowhere.lora_down.weight", &[1, 3]),
            ("lora_unet_nowhere.lora_up.weight", &[4, 1]),
            ("text_encoder.q_proj.lora_A.weight", &[1, 1]),
            ("some.norm.weight", &[1]),
        ];
        let options = LoraOptions { partial, ..LoraOptions::default() };
        LoraUpdates::resolve(&base, &layers(&base), [(opened(&keys).unwrap(), 1.0)], options)
    };
    assert!(resolved(false).unwrap_err().to_string().contains("text encoder"));
    let (updates, reports) = resolved(true).unwrap();
    assert_eq!(base.root().with_loras(&updates).linear(Q.0, 4, 3).unwrap().deltas().len(), 1);
    assert_eq!(
        reports[0].to_string(),
        "lora style.safetensors: 1 of 2 modules, rank 1, weight 1; left out: `lora_unet_nowhere`, \
         `text_encoder.q_proj.lora_A.weight`, `some.norm.weight`"
    );
}

#[test]
fn a_lora_that_does_not_fit_at_all_is_an_error_even_if_partial() {
    let (base, options) = (base(), LoraOptions { partial: true, ..LoraOptions::default() });
    let lora = Lora::from_bytes("a", lora(&[("elsewhere", 1, 2, 2)], &[])).unwrap();
    let resolved = LoraUpdates::resolve(&base, &layers(&base), [(lora, 1.0)], options);
    assert!(matches!(resolved, Err(Error::LoraUnmatched { total: 1, .. })));
}

#[test]
fn a_layer_must_have_the_shape_that_loras_were_resolved_for() {
    let (base, lora) = (base(), Lora::from_bytes("a", lora(&[(Q.0, 2, 5, 3)], &[])).unwrap());
    let taller = [LayerShape { name: Q.0.into(), rows: 5, cols: 3 }];
    let (updates, _) = LoraUpdates::resolve(&base, &taller, [(lora, 1.0)], LoraOptions::default()).unwrap();
    let e = base.root().with_loras(&updates).linear(Q.0, 4, 3).unwrap_err();
    assert!(matches!(e, Error::Shape { .. }), "{e}");
}

#[test]
fn text_encoder_keys_are_an_error() {
    for key in ["text_encoder.layers.0.q_proj.lora_A.weight", "lora_te1_x.lora_down.weight"] {
        assert_eq!(
            open_error(&[(key, &[1, 1])]),
            format!("it changes the text encoder (`{key}`); only LoRAs of the transformer are supported")
        );
    }
}

#[test]
fn unknown_keys_are_listed() {
    let names: Vec<String> = (0..11).map(|i| format!("blocks.{i:02}.weight")).collect();
    let keys: Vec<(&str, &[usize])> = names.iter().map(|n| (n.as_str(), &[1][..])).collect();
    assert_eq!(
        open_error(&keys[..2]),
        "2 of its keys are not LoRA keys: `blocks.00.weight`, `blocks.01.weight`"
    );
    assert!(open_error(&keys).ends_with("`blocks.07.weight` and 3 more"));
    assert_eq!(open_error(&[]), "there is no tensor in it");
    assert_eq!(
        open_error(&[(".lora_A.weight", &[1, 1])]),
        "1 of its keys are not LoRA keys: `.lora_A.weight`"
    );
}

#[test]
fn malformed_file_is_reported_as_such() {
    let e = Lora::from_bytes("a.safetensors", bytes::Bytes::from_static(b"short")).unwrap_err();
    assert!(matches!(e, Error::Malformed { .. }), "{e}");
}

#[test]
fn fingerprint_covers_the_scale() {
    let print = |metadata: &[(&str, &str)]| {
        Lora::from_bytes("a", lora(&[Q], metadata)).unwrap().fingerprint().unwrap()
    };
    let plain = print(&[]);
    assert_eq!(plain, print(&[("format", "pt")]));
    assert_ne!(
        plain,
        print(&[("lora_adapter_metadata", r#"{"transformer.r":2,"transformer.lora_alpha":4}"#)])
    );
}
