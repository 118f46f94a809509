//! Quantized files that Kiln does not read: each is refused with the name of its format, or with the tensor that it would
//! otherwise have to ignore.

use std::fs;
use std::path::Path;

use crate::formats::{FOUR, RawTensor, bytes, floats, open, values, weights};
use kiln_weights::WeightSource;
use serde_json::{Value, json};
use tempfile::TempDir;

fn refused(tensors: &[RawTensor<'_>], metadata: &[(&str, &str)]) -> String {
    open(tensors, metadata).unwrap_err().to_string()
}

#[test]
fn formats_of_other_programs_are_named_by_their_tensors() {
    for (tensor, format) in [
        ("x.weight.quant_state.bitsandbytes__nf4", "bitsandbytes nf4"),
        ("x.weight.quant_state.bitsandbytes__fp4", "bitsandbytes fp4"),
        ("x.weight.absmax", "bitsandbytes (4 bits)"),
        ("x.weight.quant_map", "bitsandbytes (4 bits)"),
        ("x.SCB", "bitsandbytes int8"),
        ("x.weight._data", "quanto"),
        ("x._weight_qdata", "torchao"),
        ("x.wscales", "SVDQuant (Nunchaku)"),
        ("x.smooth_factor", "SVDQuant (Nunchaku)"),
        ("x.svdquant_lora_a", "SVDQuant (ModelOpt)"),
        ("x.pre_quant_scale", "ModelOpt AWQ"),
        ("x.weight_packed", "compressed-tensors, packed"),
        ("x.weight_zero_point", "asymmetric integers"),
        ("x.qweight", "GPTQ or AWQ"),
        ("x.qzeros", "GPTQ or AWQ"),
        ("x.W_q", "HQQ"),
        ("x.weight_scales", "EETQ"),
        ("x.codebooks", "AQLM"),
        ("x.svd_up", "SDNQ"),
        ("x.weight_quantizer._scale", "ModelOpt's own quantizers, not exported"),
        ("x.scales", "scales of an unknown kind"),
    ] {
        let message = refused(
            &[
                ("x.weight", "BF16", &[1, 1], vec![0, 0]),
                (tensor, "F32", &[1], floats(&[1.0])),
                ("x.other", "F32", &[1], floats(&[1.0])),
            ],
            &[],
        );
        assert_eq!(
            message,
            format!(
                "`a.safetensors` stores its weights with {format} (tensor `{tensor}`), which Kiln does not read; use the \
                 original safetensors, a GGUF file, or the original quantized with `kiln quantize`"
            )
        );
    }
    let described = r#"{"_type":"Int8Tensor","_data":{},"_tensor_data_names":["qdata","scale"]}"#;
    let message = refused(&[("x._other", "I8", &[1], vec![0])], &[("x.weight", described)]);
    assert!(message.contains("torchao"), "{message}");
    // MLX's weights are of a dtype that no other format has.
    let message = refused(&[("x.weight", "U32", &[1], vec![0; 4])], &[]);
    assert!(message.contains("U32, which MLX's quantized weights have"), "{message}");
}

#[test]
fn names_that_only_look_like_scales_are_read() {
    let source = weights(
        &[
            ("double_blocks.0.img_attn.norm.query_norm.scale", "F32", &[1], floats(&[2.0])),
            ("norm.weight", "F32", &[1], floats(&[3.0])),
            ("norm.scale", "F32", &[1], floats(&[4.0])),
            ("model.layers.0.self_attn.k_proj.k_scale", "F32", &[], floats(&[5.0])),
        ],
        &[],
    );
    assert_eq!(source.names().count(), 3, "scales of a cache are no weights");
}

#[test]
fn scales_that_do_not_fit_are_errors() {
    let fp8 = |name: &'static str, shape: &'static [usize]| {
        let scale = floats(&vec![2.0; shape.iter().product()]);
        refused(&[("x.weight", "F8_E4M3", &[2, 2], FOUR.to_vec()), (name, "F32", shape, scale)], &[])
    };
    assert_eq!(
        fp8("x.weight_scale", &[3]),
        "layer `x` in `a.safetensors` has scales of shape [3] for a weight of [2, 2], expected one, one per row, or one \
         per 128 × 128 values (`x.weight_scale`)"
    );
    assert!(fp8("x.weight_scale", &[1, 2]).contains("[1, 2]"), "one per column");
    assert!(fp8("x.weight_scale_inv", &[2, 2]).contains("[2, 2]"), "smaller than a tile");
    let int8 = [
        ("x.weight", "I8", &[2usize, 4] as &[usize], vec![1; 8]),
        ("x.weight_scale", "F32", &[2, 2], floats(&[1.0; 4])),
    ];
    let message = refused(&int8, &[]);
    assert!(message.contains("expected one, or one per row (`x.weight_scale`)"), "{message}");
    let integers = [
        ("x.weight", "F8_E4M3", &[2usize, 2] as &[usize], FOUR.to_vec()),
        ("x.weight_scale", "U8", &[], vec![1]),
    ];
    assert!(refused(&integers, &[]).contains("expected floats"));
}

#[test]
fn scales_beside_weights_that_have_none_are_errors_unless_they_are_1() {
    let scaled = |scale: f32| -> [RawTensor<'static>; 2] {
        [("x.weight", "F32", &[1, 2], floats(&[3.0, 4.0])), ("x.weight_scale", "F32", &[1], floats(&[scale]))]
    };
    assert_eq!(
        refused(&scaled(2.0), &[]),
        "layer `x` in `a.safetensors` has a scale (`x.weight_scale`), though its weight is f32; Kiln does not know what \
         it means"
    );
    let source = weights(&scaled(1.0), &[]);
    assert_eq!((values(&source, "x.weight"), source.names().count()), (vec![3.0, 4.0], 1));
}

#[test]
fn combinations_that_nobody_writes_are_errors() {
    let one = || floats(&[2.0]);
    let x = ("x.weight", "F8_E4M3", &[2usize, 2] as &[usize], FOUR.to_vec());
    let both = [x.clone(), ("x.weight_scale", "F32", &[], one()), ("x.weight_scale_inv", "F32", &[], one())];
    assert!(refused(&both, &[]).contains("`x.weight_scale` and `x.weight_scale_inv`"));
    assert!(refused(&[x, ("x.weight_scale_2", "F32", &[], one())], &[]).contains("`x.weight_scale_2`"));
    for dtype in ["I8", "U8"] {
        let bytes = ("x.weight", dtype, &[2usize, 2] as &[usize], vec![0; 4]);
        let message = refused(&[bytes.clone(), ("x.scale_weight", "F32", &[], one())], &[]);
        assert!(message.contains("of unknown meaning"), "{message}");
        // Half as many columns, as two values in a byte have, is not called a wrong shape.
        let message = weights(&[bytes], &[]).root().linear("x", 2, 4).unwrap_err().to_string();
        assert!(message.contains("of unknown meaning"), "{message}");
    }
}

#[test]
fn nvfp4_needs_its_scales() {
    let layer = |scales: &'static [usize]| {
        let count = scales.iter().product();
        [
            ("x.weight", "U8", &[4usize, 16] as &[usize], vec![0; 64]),
            ("x.weight_scale", "F8_E4M3", scales, vec![0x38; count]),
            ("x.weight_scale_2", "F32", &[], floats(&[1.0])),
        ]
    };
    assert_eq!(
        refused(&layer(&[4, 3]), &[]),
        "layer `x` in `a.safetensors` has nvfp4 scales of shape [4, 3], expected [4, 2]"
    );
    let message = refused(&layer(&[4, 2])[..2], &[]);
    assert!(message.ends_with("is nvfp4, but there is no `x.weight_scale_2`"), "{message}");
    let [weight, scales, _] = layer(&[4, 2]);
    let message = refused(&[weight, scales, ("x.weight_scale_2", "F32", &[2], floats(&[1.0; 2]))], &[]);
    assert!(message.contains("expected one float"), "{message}");
}

#[test]
fn rotations_are_found_wherever_they_are_stated() {
    let int8 = |list: Value| {
        let list = json!({ "layers": list }).to_string();
        let tensors = [
            ("model.diffusion_model.x.weight", "I8", &[1usize, 1] as &[usize], vec![1]),
            ("model.diffusion_model.x.weight_scale", "F32", &[], floats(&[1.0])),
        ];
        open(&tensors, &[("_quantization_metadata", &list)]).map_err(|e| e.to_string())
    };
    let format = "int8_tensorwise";
    // Some lists leave out the prefix of the names, some have parameters of their own, some only the format.
    for list in [
        json!({ "x": { "format": format, "convrot": true } }),
        json!({ "model.diffusion_model.x": { "format": format, "params": { "convrot": true } } }),
    ] {
        let message = int8(list).unwrap_err();
        assert!(message.contains("`model.diffusion_model.x`") && message.contains("rotation"), "{message}");
    }
    assert!(int8(json!({ "x": format })).is_ok());
    assert!(int8(json!({ "x": "asym_w4a8_int8" })).unwrap_err().contains("asym_w4a8_int8"));
    assert!(int8(json!({ "x": { "format": format, "params": {} } })).is_ok());
    assert!(int8(json!(7)).unwrap_err().contains("not ComfyUI's list"));
}

/// A folder of a component with this `quantization_config` and an fp8 layer in tiles of 16.
fn component(config: Value) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [
        ("x.weight", "F8_E4M3", &[32usize, 40] as &[usize], vec![0x38; 32 * 40]),
        ("x.weight_scale_inv", "F32", &[2, 3], floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
    ];
    fs::write(dir.path().join("model.safetensors"), bytes(&tensors, &[])).unwrap();
    let config = json!({ "quantization_config": config });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn a_quantization_config_states_the_size_of_tiles() {
    let fp8 = |size: Value| component(json!({ "quant_method": "fp8", "weight_block_size": size }));
    let source = WeightSource::open(fp8(json!([16, 16])).path()).unwrap();
    assert_eq!(values(&source, "x.weight")[16 * 40 + 39], 6.0);
    // 24 columns fit, too, but no power of two does.
    let source = WeightSource::open(fp8(json!([30, 16])).path()).unwrap();
    assert_eq!(values(&source, "x.weight")[29 * 40 + 39], 3.0);
    let message = WeightSource::open(fp8(json!([128, 128])).path()).unwrap_err().to_string();
    assert!(message.contains("expected one per 128 × 128 values, as its config.json says"), "{message}");
    let message = WeightSource::open(fp8(json!([16])).path()).unwrap_err().to_string();
    assert!(message.contains("fp8 in blocks of [16]"), "{message}");
}

#[test]
fn the_configuration_of_a_folder_counts_for_the_files_it_is_about() {
    let dir = component(json!({ "quant_method": "fp8", "weight_block_size": [30, 16] }));
    let file = dir.path().join("model.safetensors");
    let last = |file: &Path| values(&WeightSource::open(file).unwrap(), "x.weight")[29 * 40 + 39];
    assert_eq!(last(&file), 3.0);
    let index = dir.path().join("model.safetensors.index.json");
    let map = json!({ "weight_map": { "x.weight": "model.safetensors", "x.weight_scale_inv": "model.safetensors" } });
    fs::write(&index, map.to_string()).unwrap();
    assert_eq!(last(&index), 3.0);
    // A file of another name has only its shapes: tiles of 16.
    let other = dir.path().join("other.safetensors");
    fs::rename(&file, &other).unwrap();
    assert_eq!(last(&other), 6.0);
}

#[test]
fn fp8_must_have_the_scales_that_its_configuration_announces() {
    let dir = component(json!({ "quant_method": "fp8", "activation_scheme": "dynamic" }));
    let cast = [("x.weight", "F8_E4M3", &[2usize, 2] as &[usize], FOUR.to_vec())];
    fs::write(dir.path().join("model.safetensors"), bytes(&cast, &[])).unwrap();
    let message = WeightSource::open(dir.path()).unwrap_err().to_string();
    assert!(message.ends_with("is fp8 without the scales that its configuration announces"), "{message}");
}

#[test]
fn a_packed_model_has_a_configuration_for_each_component() {
    let packed = |config: Value| {
        let config = json!({ "quantization_config": config }).to_string();
        let tensors = [
            ("text_encoder.x.weight", "F8_E4M3", &[32usize, 40] as &[usize], vec![0x38; 32 * 40]),
            ("text_encoder.x.weight_scale_inv", "F32", &[2, 3], floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
            ("transformer.x.weight", "F8_E4M3", &[2, 2], FOUR.to_vec()),
        ];
        open(&tensors, &[("text_encoder/config.json", &config)]).map_err(|e| e.to_string())
    };
    let source = packed(json!({ "quant_method": "fp8", "weight_block_size": [30, 16] })).unwrap();
    assert_eq!(values(&source, "text_encoder.x.weight")[29 * 40 + 39], 3.0);
    let message = packed(json!({ "quant_method": "hqq" })).unwrap_err();
    assert!(
        message.starts_with("`a.safetensors` stores its weights with hqq (`text_encoder/config.json`)"),
        "{message}"
    );
}

#[test]
fn a_file_may_have_its_configuration_in_its_header() {
    let tensors = [
        ("x.weight", "F8_E4M3", &[32usize, 40] as &[usize], vec![0x38; 32 * 40]),
        ("x.weight_scale_inv", "F32", &[2, 3], floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
    ];
    let fp8 = r#"{"quant_method":"fp8","weight_block_size":[30,16]}"#;
    let source = weights(&tensors, &[("quantization_config", fp8)]);
    assert_eq!(values(&source, "x.weight")[29 * 40 + 39], 3.0);
    let message = refused(&tensors, &[("quantization_config", r#"{"quant_method":"awq"}"#)]);
    assert!(message.contains("stores its weights with awq (`quantization_config`)"), "{message}");
}

#[test]
fn every_other_quantization_config_is_refused_by_name() {
    let compressed = |format: &str| json!({ "quant_method": "compressed-tensors", "format": format });
    for (config, format) in [
        (
            json!({ "quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4" }),
            "bitsandbytes nf4",
        ),
        (
            json!({ "load_in_8bit": true, "bnb_4bit_quant_type": "fp4", "load_in_4bit": false }),
            "bitsandbytes int8",
        ),
        (json!({ "quant_method": "torchao", "quant_type": "int8wo" }), "torchao (int8wo)"),
        (json!({ "quant_method": "torchao", "quant_type": { "default": {} } }), "torchao"),
        (json!({ "quant_method": "quanto", "weights": "int8" }), "quanto (int8)"),
        (json!({ "quant_method": "gptq", "bits": 4 }), "gptq (4 bits)"),
        (json!({ "quant_method": "awq", "bits": 4 }), "awq (4 bits)"),
        (json!({ "quant_method": "mxfp4" }), "mxfp4"),
        (json!({ "quant_method": "nunchaku_lite" }), "nunchaku_lite"),
        (json!({ "quant_method": "sdnq" }), "sdnq"),
        (json!({ "quant_method": "something_new" }), "something_new"),
        (json!({ "group_size": 64, "bits": 4 }), "mlx (4 bits)"),
        (json!({ "a": 1 }), "an unnamed method"),
        (compressed("pack-quantized"), "compressed-tensors (pack-quantized)"),
        (compressed("nvfp4-pack-quantized"), "compressed-tensors (nvfp4-pack-quantized)"),
        (
            json!({ "quant_method": "compressed-tensors", "format": "float-quantized",
                    "transform_config": { "config_groups": { "u": {} } } }),
            "compressed-tensors with transforms",
        ),
        (json!({ "quant_method": "modelopt", "quant_algo": "NVFP4_AWQ" }), "ModelOpt NVFP4_AWQ"),
        (json!({ "quant_method": "modelopt", "quant_type": "FP8" }), "ModelOpt's own quantizers (FP8)"),
        (json!({ "quant_method": "gguf" }), "gguf"),
    ] {
        let dir = component(config.clone());
        let message = WeightSource::open(dir.path()).unwrap_err().to_string();
        let expected = format!("`{}` stores its weights with {format} (", dir.path().display());
        assert!(message.starts_with(&expected) && message.contains("`config.json`"), "{config}: {message}");
    }
}

#[test]
fn configurations_of_readable_formats_pass() {
    for config in [
        json!({ "quant_method": "fp8", "weight_block_size": null }),
        json!({ "quant_method": "modelopt", "quant_algo": "FP8", "producer": { "name": "modelopt" } }),
        json!({ "quant_method": "compressed-tensors", "format": "float-quantized", "transform_config": {} }),
        json!({ "quant_method": "fbgemm_fp8" }),
        json!({ "quant_method": "bfl" }),
        json!({}),
        Value::Null,
    ] {
        assert!(WeightSource::open(component(config.clone()).path()).is_ok(), "{config}");
    }
}

#[test]
fn a_format_is_named_even_if_its_files_are_pickles() {
    let dir = component(json!({ "quant_method": "torchao", "quant_type": "int8wo" }));
    fs::rename(dir.path().join("model.safetensors"), dir.path().join("pytorch_model.bin")).unwrap();
    let message = WeightSource::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("torchao (int8wo)"), "{message}");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    // A GGUF file describes itself.
    let config = json!({ "quantization_config": { "quant_method": "torchao" } });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs::write(dir.path().join("model.gguf"), bytes(&[("x.weight", "F32", &[1], floats(&[1.0]))], &[]))
        .unwrap();
    assert!(WeightSource::open(dir.path()).is_ok());
    fs::remove_file(dir.path().join("model.gguf")).unwrap();
    fs::remove_file(dir.path().join("config.json")).unwrap();
    // ModelOpt has a file of its own.
    let modelopt =
        json!({ "producer": { "name": "modelopt" }, "quantization": { "quant_algo": "W4A8_AWQ" } });
    fs::write(dir.path().join("hf_quant_config.json"), modelopt.to_string()).unwrap();
    let message = WeightSource::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("ModelOpt W4A8_AWQ (`hf_quant_config.json`)"), "{message}");
}
