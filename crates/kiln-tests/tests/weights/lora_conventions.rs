//! What trainers and converters write besides plain matrices: each is read as its writer means it, left out on request, or
//! an error with its name.

use crate::common::flux::{DIM, File, Matrix, assert_same, effective, loaded, model, split, weights};
use crate::common::{Random, apply, file, layers, resolve, tensors};
use kiln_weights::{Error, Lora, LoraOptions, LoraReport, LoraUpdates, Result};
use serde_json::{Map, Value, json};

/// A file of tensors of any type: key, type, shape and bytes.
fn raw(entries: &[(&str, &str, &[usize], &[u8])]) -> Result<Lora> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (key, dtype, shape, bytes) in entries {
        let start = data.len();
        data.extend_from_slice(bytes);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] });
        header.insert((*key).to_owned(), entry);
    }
    Lora::from_bytes("style.safetensors", file(&Value::Object(header).to_string(), &data))
}

fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("no error"),
        Err(e) => e.to_string().trim_start_matches("LoRA `style.safetensors`: ").to_owned(),
    }
}

/// 4 by 6, as `proj_out` is.
const LOKR_SHAPES: [(&str, [usize; 2]); 3] = [("w1", [2, 2]), ("w2_a", [2, 4]), ("w2_b", [4, 3])];

fn lokr(alpha: f32) -> (File, Matrix) {
    let mut random = Random(2);
    let mut file = File::default();
    let [w1, w2_a, w2_b] = LOKR_SHAPES.map(|(suffix, [rows, cols])| {
        let matrix = Matrix::random(&mut random, rows, cols);
        file.put(format!("lycoris_proj_out.lokr_{suffix}"), &matrix);
        matrix
    });
    file.put_number("lycoris_proj_out.alpha", alpha);
    (file, w1.kron(&w2_a.times(&w2_b)))
}

#[test]
fn lokr_is_scaled_once_and_says_that_lycoris_may_not_have() {
    let base = model(&weights(1));
    let (file, update) = lokr(2.0);
    let (updates, reports) = resolve(&base, [(file.lora(), 1.0)]).unwrap();
    let found = base.root().with_loras(&updates).linear("proj_out", 4, DIM).unwrap();
    effective(&found).assert_near(&weights(1)["final_layer.linear"].plus(0.5, &update), 1e-5, "LoKr");
    let note = "its LoKr is scaled by alpha / rank (0.5); LyCORIS before version 4 trained quantized models without \
                this scale, so divide the weight by it if the effect is wrong";
    assert_eq!(file.lora().notes(), [note]);
    let report = format!("lora style.safetensors: 1 of 1 modules, LoKr, rank 4, weight 1; {note}");
    assert_eq!(reports[0].to_string(), report);
    // If alpha is the rank, all ways are the same.
    assert!(lokr(4.0).0.lora().notes().is_empty());
}

#[test]
fn alpha_of_a_full_rank_update_is_ignored_even_if_it_is_infinite() {
    let one = 1f32.to_le_bytes();
    // 9999999999, which ai-toolkit writes, in f16 and in both types of fp8.
    for (dtype, alpha) in
        [("F16", &0x7c00u16.to_le_bytes()[..]), ("F8_E5M2", &[0x7c]), ("F8_E4M3", &[0x7f]), ("F32", &[0; 4])]
    {
        let alpha = ("x.alpha", dtype, &[][..], alpha);
        let full = raw(&[("x.lokr_w1", "F32", &[1, 1], &one), ("x.lokr_w2", "F32", &[1, 1], &one), alpha]);
        assert_eq!(full.unwrap().scale("x"), Some(1.0), "{dtype}");
        let rank = raw(&[
            ("x.lokr_w1", "F32", &[1, 1], &one),
            ("x.lokr_w2_a", "F32", &[1, 1], &one),
            ("x.lokr_w2_b", "F32", &[1, 1], &one),
            alpha,
        ]);
        assert!(message(rank).ends_with("expected a finite number other than 0"), "{dtype}");
    }
}

/// A sum of weight and update, whose columns get these magnitudes.
fn with_column_magnitudes(sum: &Matrix, magnitudes: &[f32]) -> Matrix {
    Matrix::from_fn(sum.rows, sum.cols, |i, j| {
        let norm = (0..sum.rows).map(|i| sum.row(i)[j].powi(2)).sum::<f32>().sqrt();
        magnitudes[j] / norm * sum.row(i)[j]
    })
}

#[test]
fn norms_of_a_dora_per_column_run_over_q_k_and_v() {
    for (stem, fused) in [
        ("diffusion_model.double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.qkv"),
        ("lora_unet_double_blocks_0_txt_attn_qkv", "double_blocks.0.txt_attn.qkv"),
        ("transformer.transformer_blocks.0.attn.qkv", "double_blocks.0.img_attn.qkv"),
        ("transformer.transformer_blocks.0.attn.added_qkv", "double_blocks.0.txt_attn.qkv"),
    ] {
        let mut random = Random(9);
        let (down, up) = (Matrix::random(&mut random, 3, DIM), Matrix::random(&mut random, 3 * DIM, 3));
        let magnitudes: Vec<f32> = (0..DIM).map(|i| 1.0 + i as f32).collect();
        let mut file = File::default();
        file.put(format!("{stem}.lora_down.weight"), &down);
        file.put(format!("{stem}.lora_up.weight"), &up);
        file.put_number(format!("{stem}.alpha"), 6.0);
        file.tensors.insert(format!("{stem}.dora_scale"), (vec![1, DIM], magnitudes.clone()));
        for weight in [1.0, 0.5, -1.0] {
            let base = model(&weights(1));
            let updates = apply(&base, file.lora(), weight);
            let mut all = weights(1);
            let new = with_column_magnitudes(&all[fused].plus(2.0, &up.times(&down)), &magnitudes);
            let changed = all[fused].plus(weight, &new.plus(-1.0, &all[fused]));
            all.insert(fused, changed);
            let vars = base.root().with_loras(&updates);
            assert_same(&loaded(&vars), &split(&all), 2e-5, stem);
            // The three layers as one.
            let stack = if fused.contains("img") {
                ["to_q", "to_k", "to_v"]
            } else {
                ["add_q_proj", "add_k_proj", "add_v_proj"]
            };
            let attn = vars.at("transformer_blocks").at(0).at("attn");
            let qkv = attn.linear_stack(&stack.map(|layer| (layer, DIM)), DIM).unwrap();
            effective(&qkv).assert_near(&all[fused], 2e-5, stem);
        }
    }
}

#[test]
fn norms_of_columns_need_whole_layers() {
    // A slice of `linear1`: the norms of a column of q alone are not those of the layer.
    let mut file = File::default();
    file.put("transformer.single_blocks.0.linear1.0.lora_down.weight", &Matrix::filled(1, DIM, 1.0));
    file.put("transformer.single_blocks.0.linear1.0.lora_up.weight", &Matrix::filled(DIM, 1, 1.0));
    file.put("transformer.single_blocks.0.linear1.0.dora_scale", &Matrix::filled(1, DIM, 1.0));
    let e = message(resolve(&model(&weights(1)), [(file.lora(), 1.0)]));
    assert!(
        e.contains("dora_scale` has shape [1, 6], expected") && e.contains("column of whole layers"),
        "{e}"
    );
}

#[test]
fn ai_toolkits_magnitude_is_a_doras() {
    let mut file = File::default();
    file.put("diffusion_model.img_in.lora_A.weight", &Matrix::filled(1, 4, 0.0));
    file.put("diffusion_model.img_in.lora_B.weight", &Matrix::filled(DIM, 1, 0.0));
    file.tensors.insert("diffusion_model.img_in.magnitude".into(), (vec![DIM], vec![2.0; DIM]));
    assert_eq!(file.lora().kinds(), ["DoRA", "LoRA"]);
    let base = model(&weights(1));
    let found = base.root().with_loras(&apply(&base, file.lora(), 1.0)).linear("x_embedder", DIM, 4).unwrap();
    let norm = effective(&found).row(0).iter().map(|v| v * v).sum::<f32>().sqrt();
    assert!((norm - 2.0).abs() < 1e-5, "{norm}");
}

#[test]
fn two_adapters_in_a_file_are_an_error() {
    let opened = |names: [&str; 2]| {
        let keys: Vec<String> = (names.iter().zip(["proj_out", "x_embedder"]))
            .flat_map(|(name, module)| ["A", "B"].map(|ab| format!("{module}.lora_{ab}.{name}.weight")))
            .collect();
        let keys: Vec<(&str, &[usize])> = keys.iter().map(|key| (key.as_str(), &[1, 1][..])).collect();
        Lora::from_bytes("style.safetensors", tensors(&keys, &[]))
    };
    assert_eq!(opened(["style", "style"]).unwrap().modules().count(), 2);
    let expected = "it holds two adapters, `default_0` and `default_1`; expected one";
    assert_eq!(message(opened(["default_0", "default_1"])), expected);
    // The same tensor with and without a name.
    let keys: [(&str, &[usize]); 3] =
        [("x.lora_A.default.weight", &[1, 1]), ("x.lora_A.weight", &[1, 1]), ("x.lora_B.weight", &[1, 1])];
    let e = message(Lora::from_bytes("style.safetensors", tensors(&keys, &[])));
    assert_eq!(e, "it holds two adapters, `default` and one without a name; expected one");
}

#[test]
fn a_lokr_of_peft_may_name_its_adapter() {
    let keys: [(&str, &[usize]); 2] =
        [("base_model.model.x.lokr_w1.style", &[1, 2]), ("base_model.model.x.lokr_w2.style", &[3, 1])];
    let lora = Lora::from_bytes("a", tensors(&keys, &[])).unwrap();
    assert_eq!((lora.kinds(), lora.modules().collect::<Vec<_>>()), (vec!["LoKr"], vec!["x"]));
}

/// Names and shapes of tensors.
type Shapes<'a> = [(&'a str, &'a [usize])];

/// Keys of which `proj_out` alone is a matrix of the transformer.
const MIXED: [(&str, &[usize]); 2] =
    [("transformer.proj_out.lora_A.weight", &[1, DIM]), ("transformer.proj_out.lora_B.weight", &[4, 1])];

fn resolve_mixed(others: &Shapes<'_>, partial: bool) -> Result<(LoraUpdates, Vec<LoraReport>)> {
    let base = model(&weights(1));
    let lora = Lora::from_bytes("style.safetensors", tensors(&[&MIXED[..], others].concat(), &[]))?;
    let options = LoraOptions { partial, ..LoraOptions::default() };
    LoraUpdates::resolve(&base, &layers(&base), [(lora, 1.0)], options)
}

#[test]
fn what_is_not_a_matrix_of_the_transformer_is_an_error_and_can_be_left_out() {
    const VAE: &str = "it changes the VAE";
    const CONVOLUTION: &str = "it changes a convolution";
    const NORM: &str = "it changes a norm or a bias";
    const TEXT: &str = "it changes the text encoder";
    let cases: [(&Shapes<'_>, &str); 12] = [
        (&[("vae.decoder.conv_in.lora_A.weight", &[1, 4, 3, 3])], VAE),
        (&[("first_stage_model.decoder.mid.attn_1.q.lora_up.weight", &[4, 1])], VAE),
        (&[("conv.lora_down.weight", &[1, 4, 3, 3]), ("conv.lora_up.weight", &[4, 1, 1, 1])], CONVOLUTION),
        (
            &[
                ("lora_unet_x.lora_down.weight", &[1, 4]),
                ("lora_unet_x.lora_mid.weight", &[1, 1, 3, 3]),
                ("lora_unet_x.lora_up.weight", &[4, 1]),
            ],
            CONVOLUTION,
        ),
        (
            &[
                ("lycoris_x.lokr_t2", &[1, 1, 3, 3]),
                ("lycoris_x.lokr_w1", &[1, 1]),
                ("lycoris_x.lokr_w2_a", &[1, 4]),
                ("lycoris_x.lokr_w2_b", &[1, 4]),
            ],
            CONVOLUTION,
        ),
        (
            &[
                ("lycoris_x.hada_t1", &[1, 1, 3, 3]),
                ("lycoris_x.hada_t2", &[1, 1, 3, 3]),
                ("lycoris_x.hada_w1_a", &[1, 4]),
            ],
            CONVOLUTION,
        ),
        (&[("diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff", &[2])], NORM),
        (&[("diffusion_model.img_in.diff_b", &[6])], NORM),
        (&[("lycoris_norm.b_norm", &[6]), ("lycoris_norm.w_norm", &[6])], NORM),
        (&[("base_model.model.proj_out.bias", &[6])], NORM),
        (&[("diffusion_model.single_blocks.0.norm.key_norm.scale.set_weight", &[2])], "it replaces a weight"),
        (&[("bundle_emb.style.qwen", &[6, 6])], TEXT),
    ];
    for (others, what) in cases {
        let e = message(resolve_mixed(others, false));
        assert!(e.starts_with(&format!("{what} (`{}`); only", others[0].0)), "{e}");
        let (_, reports) = resolve_mixed(others, true).unwrap();
        assert_eq!((reports[0].matched, reports[0].total), (1, 1), "{what}");
        assert_eq!(reports[0].unmatched, others.iter().map(|(key, _)| *key).collect::<Vec<_>>());
        // A file with nothing else is an error when it is opened.
        let alone = Lora::from_bytes("style.safetensors", tensors(others, &[]));
        assert!(message(alone).starts_with(what), "{what}");
    }
}

#[test]
fn a_module_of_which_a_layer_is_missing_is_left_out_whole() {
    let base = model(&weights(1));
    let mut present = layers(&base);
    present.retain(|layer| layer.name != "transformer_blocks.0.attn.to_v");
    let mut file = File::default();
    for (stem, rows) in [("diffusion_model.double_blocks.0.img_attn.qkv", 3 * DIM), ("proj_out", 4)] {
        file.put(format!("{stem}.lora_A.weight"), &Matrix::filled(1, DIM, 1.0));
        file.put(format!("{stem}.lora_B.weight"), &Matrix::filled(rows, 1, 1.0));
    }
    let options = LoraOptions { partial: true, ..LoraOptions::default() };
    let (updates, reports) = LoraUpdates::resolve(&base, &present, [(file.lora(), 1.0)], options).unwrap();
    assert_eq!(reports[0].unmatched, ["diffusion_model.double_blocks.0.img_attn.qkv"]);
    let vars = base.root().with_loras(&updates);
    assert!(vars.linear("transformer_blocks.0.attn.to_q", DIM, DIM).unwrap().deltas().is_empty());
    assert_eq!(vars.linear("proj_out", 4, DIM).unwrap().deltas().len(), 1);
}

/// 1.5, -2, 0.25 and 448 or 57344, the largest, in both types of fp8.
const FP8: [(&str, [u8; 4], f32); 2] =
    [("F8_E4M3", [0x3c, 0xc0, 0x28, 0x7e], 448.0), ("F8_E5M2", [0x3e, 0xc0, 0x34, 0x7b], 57344.0)];

#[test]
fn matrices_cast_to_fp8_have_their_exact_values() {
    for (dtype, bytes, largest) in FP8 {
        let down = [bytes, [bytes[0]; 4]].concat()[..DIM].to_vec();
        let lora = raw(&[
            ("proj_out.lora_A.weight", dtype, &[1, DIM], &down),
            ("proj_out.lora_B.weight", dtype, &[4, 1], &bytes),
            ("proj_out.alpha", dtype, &[], &[bytes[0]]),
        ]);
        let values = [1.5, -2.0, 0.25, largest, 1.5, 1.5];
        let base = model(&weights(1));
        let (updates, _) = resolve(&base, [(lora.unwrap(), 1.0)]).unwrap();
        let linear = base.root().with_loras(&updates).linear("proj_out", 4, DIM).unwrap();
        let delta = &linear.deltas()[0];
        assert_eq!(delta.down.to_f32().unwrap().as_ref(), values, "{dtype}");
        assert_eq!(delta.up.to_f32().unwrap().as_ref(), &values[..4], "{dtype}");
        assert_eq!(delta.scale, 1.5, "{dtype}");
    }
}

#[test]
fn a_cast_to_fp8_that_lost_values_is_an_error() {
    for (dtype, lost) in [("F8_E4M3", 0x7f), ("F8_E5M2", 0x7c), ("F8_E5M2", 0x7e)] {
        let lora = raw(&[
            ("x.lora_A.weight", dtype, &[1, 2], &[0x30, lost]),
            ("x.lora_B.weight", dtype, &[1, 1], &[0x30]),
        ]);
        let e = message(lora);
        assert!(e.starts_with("`x.lora_A.weight` is f8_e") && e.contains("not finite everywhere"), "{e}");
    }
}

#[test]
fn an_alpha_that_fp8_may_have_rounded_is_noted() {
    let notes = |dtype: &str, alpha: u8, rank: usize| {
        let (a, b) = (vec![0; rank], vec![0; rank]);
        let matrices =
            [("x.lora_A.weight", dtype, &[rank, 1][..], &a[..]), ("x.lora_B.weight", dtype, &[1, rank], &b)];
        raw(&[matrices[0], matrices[1], ("x.alpha", dtype, &[], &[alpha])]).unwrap().notes()
    };
    // 15, 16 (which 17 becomes), 18 (which 17.5 may become), 1.5 and 20.
    assert!(notes("F8_E4M3", 0x57, 32).is_empty());
    assert_eq!(notes("F8_E4M3", 0x58, 32).len(), 1);
    assert!(notes("F8_E4M3", 0x58, 16).is_empty());
    assert_eq!(notes("F8_E4M3", 0x59, 17), ["`x.alpha` is fp8, which may have rounded it"]);
    assert_eq!(notes("F8_E4M3", 0x3c, 17).len(), 1);
    assert_eq!(notes("F8_E5M2", 0x4d, 16).len(), 1);
    assert!(notes("F8_E5M2", 0x4d, 20).is_empty());
}

#[test]
fn tensors_that_nobody_uses_are_an_error() {
    for extra in ["scale", "rescale", "lora_A.scale", "weight", "lokr_w3"] {
        let key = format!("transformer.proj_out.{extra}");
        let e = message(resolve_mixed(&[(&key, &[1, 1])], false));
        let is_named = e.contains("not LoRA keys") || e.contains("are for one module") || e.contains(&key);
        assert!(is_named, "{extra}: {e}");
    }
    let both = [("transformer.proj_out.lokr_w1", &[1, 1][..]), ("transformer.proj_out.lokr_w2", &[4, 6])];
    assert!(message(resolve_mixed(&both, false)).contains("are for one module"));
    assert!(matches!(resolve_mixed(&both, true), Err(Error::Lora { .. })));
}

#[test]
fn values_that_are_not_finite_are_an_error_with_their_key() {
    let one = 1f32.to_le_bytes();
    for (dtype, bytes) in [
        ("F32", &f32::NAN.to_le_bytes()[..]),
        ("F32", &f32::NEG_INFINITY.to_le_bytes()),
        ("F16", &0x7c00u16.to_le_bytes()),
        ("BF16", &0x7fc0u16.to_le_bytes()),
        ("F64", &f64::NAN.to_le_bytes()),
        ("F64", &1e300f64.to_le_bytes()),
    ] {
        let bad = |key| (key, dtype, &[1, 1][..], bytes);
        let good = |key| (key, "F32", &[1, 1][..], &one[..]);
        for (key, others) in [
            ("x.lora_A.weight", vec![good("x.lora_B.weight")]),
            ("x.lora_B.weight", vec![good("x.lora_A.weight")]),
            ("x.dora_scale", vec![good("x.lora_A.weight"), good("x.lora_B.weight")]),
            ("x.diff", vec![]),
            ("x.lokr_w1", vec![good("x.lokr_w2")]),
        ] {
            let e = message(raw(&[&others[..], &[bad(key)]].concat()));
            assert!(e.starts_with(&format!("`{key}` is ")) && e.contains("not finite everywhere"), "{e}");
        }
    }
    // Also far behind the beginning, and hidden between other values.
    let mut values = vec![0f32; (1 << 18) + 3];
    values[1 << 18] = f32::NAN;
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    assert!(message(raw(&[("x.diff", "F32", &[1, values.len()], &bytes)])).contains("not finite"));
}

#[test]
fn scales_are_not_taken_for_names_of_adapters() {
    let int8 = raw(&[
        ("x.lora_A.weight", "I8", &[1, 1], &[1]),
        ("x.lora_A.weight_scale", "F32", &[1], &1f32.to_le_bytes()),
        ("x.lora_B.weight", "F32", &[1, 1], &1f32.to_le_bytes()),
    ]);
    assert!(message(int8).starts_with("`x.lora_A.weight_scale` belongs to a quantized tensor"));
    for extra in ["lora_A.scale", "lora_B.absmax", "lora_A.weight_zero_point"] {
        let key = format!("transformer.proj_out.{extra}");
        for partial in [false, true] {
            let e = message(resolve_mixed(&[(&key, &[1, 1])], partial));
            assert!(e.contains(&format!("`{key}`")) && !e.contains("are for one module"), "{e}");
        }
    }
}

#[test]
fn unknown_keys_of_a_module_that_is_used_can_not_be_left_out() {
    for extra in ["weight_scale", "scale", "scaling", "lora_alpha", "network_alpha", "scalar", "weight"] {
        let key = format!("transformer.proj_out.{extra}");
        for partial in [false, true] {
            let e = message(resolve_mixed(&[(&key, &[1])], partial));
            assert!(e.starts_with(&format!("`{key}` belongs to the module `transformer.proj_out`")), "{e}");
        }
    }
    // Of another module.
    assert!(resolve_mixed(&[("transformer.proj_out.0.weight", &[1])], true).is_ok());
    assert!(resolve_mixed(&[("transformer.other.scale", &[1])], true).is_ok());
}

#[test]
fn swapped_matrices_are_named_as_such() {
    let keys: [(&str, &[usize]); 2] =
        [("transformer.proj_out.lora_A.weight", &[4, 1]), ("transformer.proj_out.lora_B.weight", &[1, DIM])];
    let e = message(Lora::from_bytes("style.safetensors", tensors(&keys, &[])));
    assert!(e.contains("lora_A.weight` (shape [4, 1]) and") && e.ends_with("are swapped"), "{e}");
    // Of a square layer, which both orders could be of.
    let [down, up] =
        ["A", "B"].map(|ab| format!("transformer.transformer_blocks.0.attn.to_q.lora_{ab}.weight"));
    let keys: [(&str, &[usize]); 2] = [(&down, &[DIM, 1]), (&up, &[1, DIM])];
    let lora = Lora::from_bytes("style.safetensors", tensors(&keys, &[])).unwrap();
    let base = model(&weights(1));
    let layers: Vec<_> = layers(&base).into_iter().filter(|layer| layer.name != "x_embedder").collect();
    let e = message(LoraUpdates::resolve(&base, &layers, [(lora, 1.0)], LoraOptions::default()));
    assert!(e.contains("lora_A.weight` (shape [6, 1]) and") && e.ends_with("are swapped"), "{e}");
}

#[test]
fn matrices_and_magnitudes_of_1_by_1_convolutions_are_those_of_linear_layers() {
    let mut random = Random(7);
    let (down, up) = (Matrix::random(&mut random, 2, DIM), Matrix::random(&mut random, 4, 2));
    let mut plain = File::default();
    plain.put("proj_out.lora_down.weight", &down);
    plain.put("proj_out.lora_up.weight", &up);
    plain.put("proj_out.dora_scale", &Matrix::filled(4, 1, 2.0));
    let mut convolution = plain.clone();
    convolution.tensors.values_mut().for_each(|(shape, _)| shape.extend([1, 1]));
    let base = model(&weights(1));
    let found =
        [plain, convolution].map(|file| loaded(&base.root().with_loras(&apply(&base, file.lora(), 1.0))));
    assert_eq!(found[0], found[1]);
    assert_ne!(found[0], loaded(&base.root()));
}

#[test]
fn a_name_of_an_adapter_beside_none_means_two_adapters() {
    let keys: [(&str, &[usize]); 2] = [("x.lora_A.weight", &[1, 1]), ("x.lora_B.default.weight", &[1, 1])];
    let e = message(Lora::from_bytes("style.safetensors", tensors(&keys, &[])));
    assert_eq!(e, "it holds two adapters, `default` and one without a name; expected one");
}

#[test]
fn a_scale_of_zero_is_noted() {
    let lora = raw(&[
        ("x.lora_A.weight", "F8_E4M3", &[1, 2], &[0x38; 2]),
        ("x.lora_A.weight_scale", "F32", &[], &[0; 4]),
        ("x.lora_B.weight", "F32", &[1, 1], &1f32.to_le_bytes()),
    ]);
    assert_eq!(lora.unwrap().notes(), ["its scales make these zero: `x.lora_A.weight`"]);
}

#[test]
fn every_key_that_makes_a_file_a_lora_is_known() {
    let is_lora = |key: &str| {
        let source = kiln_weights::WeightSource::from_bytes("a", tensors(&[(key, &[1, 1])], &[])).unwrap();
        Lora::is_lora(&source)
    };
    for suffix in [
        "lora_A.weight",
        "lora_B.default.weight",
        "lora_up.weight",
        "lora.up.weight",
        "diff",
        "diff_b",
        "set_weight",
        "magnitude",
        "lora_magnitude_vector",
        "boft_R",
        "ia3_l.weight",
        "vera_lambda_b",
        "a1.weight",
        "lora_E",
        "oft_blocks",
    ] {
        assert!(is_lora(&format!("transformer.x.{suffix}")), "{suffix}");
    }
    for suffix in ["weight", "bias", "alpha", "norm.scale", "weight_scale"] {
        assert!(!is_lora(&format!("transformer.x.{suffix}")), "{suffix}");
    }
}

#[test]
fn what_every_model_refuses_is_known_without_one() {
    let problem = |others: &Shapes<'_>| {
        let keys = [&MIXED[..], others].concat();
        Lora::from_bytes("style.safetensors", tensors(&keys, &[])).unwrap().problem().map(|e| e.to_string())
    };
    assert_eq!(problem(&[]), None);
    assert!(problem(&[("text_encoder.x.lora_A.weight", &[1, 1])]).unwrap().contains("text encoder"));
    assert!(problem(&[("x_embedder.weight", &[1, 1])]).unwrap().contains("not LoRA keys"));
    let flux1 = problem(&[("diffusion_model.double_blocks.0.img_mod.lin.diff", &[18432, 3])]).unwrap();
    assert!(flux1.ends_with("it was made for FLUX.1, and only FLUX.2 is supported"), "{flux1}");
    for stem in ["transformer.foo.bar", "lora_unet_foo_bar"] {
        let [down, up] = ["A", "B"].map(|ab| format!("{stem}.lora_{ab}.weight"));
        let keys: [(&str, &[usize]); 4] = [MIXED[0], MIXED[1], (&down, &[1, 1]), (&up, &[1, 1])];
        let lora = Lora::from_bytes("style.safetensors", tensors(&keys, &[])).unwrap();
        let problem = lora.problem().unwrap().to_string();
        assert!(
            problem.ends_with(&format!("FLUX.2 does not have 1 of its 2 modules: `{stem}`")),
            "{problem}"
        );
        assert_eq!(lora.layers().collect::<Vec<_>>(), ["proj_out"]);
    }
}
