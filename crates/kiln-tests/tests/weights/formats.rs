//! Conventions of quantized files, built by hand: scales of every kind, both orders of nvfp4, mixed layers.
//! `refusals` has those that Kiln does not read.

use crate::common::file;
use bytes::Bytes;
use kiln_tensor::packed::{Format, PackedTensor, swizzled_index};
use kiln_tensor::{DType, HostLinear, LinearWeight};
use kiln_weights::export::{Container, Options, Storage, TensorNames, export};
use kiln_weights::{Component, LinearPrecision, WeightSource};
use serde_json::{Map, Value, json};

fn packed(layer: &HostLinear) -> &[PackedTensor] {
    match layer.weight() {
        LinearWeight::Packed(packed) => packed,
        other => panic!("expected packed matrices, found {other:?}"),
    }
}

/// Name, dtype, shape and bytes of a tensor.
pub type RawTensor<'t> = (&'t str, &'t str, &'t [usize], Vec<u8>);

/// A file of tensors given by name, dtype, shape and bytes.
pub fn weights(tensors: &[RawTensor<'_>], metadata: &[(&str, &str)]) -> WeightSource {
    open(tensors, metadata).unwrap()
}

pub fn open(tensors: &[RawTensor<'_>], metadata: &[(&str, &str)]) -> kiln_weights::Result<WeightSource> {
    WeightSource::from_bytes("a.safetensors", bytes(tensors, metadata))
}

/// The bytes of such a file.
pub fn bytes(tensors: &[RawTensor<'_>], metadata: &[(&str, &str)]) -> Bytes {
    let (mut entries, mut data) = (Map::new(), Vec::new());
    if !metadata.is_empty() {
        let texts: Map<String, Value> = metadata.iter().map(|(k, v)| ((*k).into(), json!(v))).collect();
        entries.insert("__metadata__".into(), texts.into());
    }
    for (name, dtype, shape, bytes) in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        entries
            .insert((*name).into(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }));
        data.extend(bytes);
    }
    file(&Value::Object(entries).to_string(), &data)
}

pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn values(source: &WeightSource, name: &str) -> Vec<f32> {
    source.tensor(name).unwrap().to_f32().unwrap().into_owned()
}

/// 1, 2, 0.5, -1 as e4m3.
pub const FOUR: [u8; 4] = [0x38, 0x40, 0x30, 0xb8];

#[test]
fn a_scale_is_one_number_or_one_per_row_of_any_float_dtype() {
    type Scales = (&'static str, &'static [usize], Vec<u8>, [f32; 4]);
    let scales: [Scales; 5] = [
        ("F32", &[], floats(&[2.0]), [2.0, 4.0, 1.0, -2.0]),
        ("F32", &[1], floats(&[2.0]), [2.0, 4.0, 1.0, -2.0]),
        ("F32", &[2], floats(&[2.0, 4.0]), [2.0, 4.0, 2.0, -4.0]),
        ("F32", &[2, 1], floats(&[2.0, 4.0]), [2.0, 4.0, 2.0, -4.0]),
        ("BF16", &[], vec![0x00, 0x40], [2.0, 4.0, 1.0, -2.0]),
    ];
    for (dtype, shape, bytes, expected) in scales {
        for name in ["x.weight_scale", "x.scale_weight"] {
            let source = weights(
                &[
                    ("x.weight", "F8_E4M3", &[2, 2], FOUR.to_vec()),
                    (name, dtype, shape, bytes.clone()),
                    ("x.input_scale", "F32", &[], floats(&[9.0])),
                    ("model.scaled_fp8", "F8_E4M3", &[2], vec![0, 0]),
                ],
                &[],
            );
            assert_eq!(values(&source, "x.weight"), expected, "{name} {dtype} {shape:?}");
            assert_eq!(source.names().collect::<Vec<_>>(), ["x.weight"]);
            let linear = source.root().linear("x", 2, 2).unwrap();
            assert_eq!(packed(&linear)[0].format(), Format::F8E4M3);
            assert_eq!(packed(&linear)[0].to_f32().unwrap().to_f32().unwrap().as_ref(), expected);
        }
    }
}

#[test]
fn layers_that_are_stored_in_fp8_have_fp8_products() {
    let source = weights(
        &[
            ("x.weight", "F8_E4M3", &[2, 2], FOUR.to_vec()),
            ("x.weight_scale", "F32", &[], floats(&[2.0])),
            ("y.weight", "F32", &[1, 2], floats(&[1.0, 2.0])),
            ("z.weight", "F8_E5M2", &[2, 2], FOUR.to_vec()),
        ],
        &[],
    );
    assert_eq!(source.preferred_precision(1, false, false), LinearPrecision::Float);
    let vars = source.root().with_precision(source.preferred_precision(1, true, true));
    let linear = |name, rows| vars.linear(name, rows, 2).unwrap();
    assert_eq!(
        [linear("x", 2).fp8_matmul(), linear("y", 1).fp8_matmul(), linear("z", 2).fp8_matmul()],
        [true, false, false]
    );
    assert!(packed(&linear("x", 2))[0].is_fp8());
    assert_eq!(packed(&linear("x", 2))[0].row_scales(), [2.0, 2.0]);
    assert_eq!(source.bytes_per_weight(), 16.0 / 10.0);
}

#[test]
fn plain_casts_and_e5m2_are_read() {
    let source = weights(
        &[
            ("x.weight", "F8_E5M2", &[1, 4], vec![0x3c, 0x40, 0xb8, 0x00]),
            ("norm.weight", "F8_E4M3", &[4], FOUR.to_vec()),
        ],
        &[],
    );
    assert_eq!(values(&source, "x.weight"), [1.0, 2.0, -0.5, 0.0]);
    assert_eq!(values(&source, "norm.weight"), [1.0, 2.0, 0.5, -1.0]);
    assert_eq!(packed(&source.root().linear("x", 1, 4).unwrap()).len(), 1);
}

#[test]
fn a_fused_layer_shares_its_scale_and_is_split_by_rows() {
    let source = weights(
        &[
            ("single_stream_modulation.lin.weight", "F32", &[1, 1], floats(&[0.0])),
            ("double_blocks.0.img_attn.qkv.weight", "F8_E4M3", &[3, 1], vec![0x38, 0x40, 0x48]),
            ("double_blocks.0.img_attn.qkv.weight_scale", "F32", &[], floats(&[10.0])),
            ("double_blocks.0.txt_attn.qkv.weight", "F8_E4M3", &[3, 1], vec![0x38, 0x38, 0x38]),
            ("double_blocks.0.txt_attn.qkv.weight_scale", "F32", &[3], floats(&[1.0, 2.0, 3.0])),
            ("final_layer.adaLN_modulation.1.weight", "F32", &[4, 1], floats(&[1.0, 2.0, 3.0, 4.0])),
        ],
        &[],
    );
    let model = source.component(Component::Transformer).unwrap().unwrap();
    let block = |name: &str| values(&model, &format!("transformer_blocks.0.attn.{name}.weight"));
    assert_eq!((block("to_q"), block("to_k"), block("to_v")), (vec![10.0], vec![20.0], vec![40.0]));
    assert_eq!((block("add_k_proj"), block("add_v_proj")), (vec![2.0], vec![3.0]));
    assert_eq!(values(&model, "norm_out.linear.weight"), [3.0, 4.0, 1.0, 2.0]);
    let swapped = model.root().linear("norm_out.linear", 4, 1).unwrap();
    let LinearWeight::Dense(halves) = swapped.weight() else { panic!("{swapped:?}") };
    assert_eq!(halves.len(), 2, "halves are views, not copies");
}

/// The codes and scales of a 130 × 32 nvfp4 matrix, and its values.
fn nvfp4_matrix() -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let codes: Vec<u8> = (0..130 * 32).map(|i| (i * 7 % 16) as u8).collect();
    // 1, 2 or 4 as e4m3.
    let scales: Vec<u8> = (0..130 * 2).map(|i| 0x38 + 8 * (i % 3) as u8).collect();
    let decoded = codes.iter().enumerate().map(|(i, code)| {
        let scale = 2f32.powi(((i / 32 * 2 + i % 32 / 16) % 3) as i32);
        values[usize::from(*code)] * scale * 0.5
    });
    (codes.clone(), scales, decoded.collect())
}

#[test]
fn nvfp4_is_read_in_both_orders() {
    let (codes, scales, expected) = nvfp4_matrix();
    let pairs = |high_first: bool| {
        let pack = |p: &[u8]| if high_first { p[0] << 4 | p[1] } else { p[1] << 4 | p[0] };
        codes.chunks(2).map(pack).collect::<Vec<u8>>()
    };
    let mut tiles = vec![0u8; 256 * 4];
    for (i, scale) in scales.iter().enumerate() {
        tiles[swizzled_index(i / 2, i % 2, 2)] = *scale;
    }
    let global = ("x.weight_scale_2", "F32", &[] as &[usize], floats(&[0.5]));
    let comfy_quant = ("x.comfy_quant", "U8", &[18usize] as &[usize], br#"{"format":"nvfp4"}"#.to_vec());
    let mut layer: Vec<RawTensor<'_>> = vec![
        ("x.weight", "U8", &[130, 16], pairs(true)),
        ("x.weight_scale", "F8_E4M3", &[256, 4], tiles),
        global.clone(),
        comfy_quant,
    ];
    let comfy = weights(&layer, &[]);
    let unrounded = br#"{"format":"nvfp4","full_precision_matrix_mult":true}"#.to_vec();
    layer[3] = ("x.comfy_quant", "U8", &[52], unrounded);
    let full_precision = weights(&layer, &[]);
    assert!(values(&full_precision, "x.weight") == expected);
    assert_eq!(full_precision.preferred_precision(1, true, true), LinearPrecision::Float);
    let vars = full_precision.root().with_precision(LinearPrecision::Stored { nvfp4: true });
    assert!(!vars.linear("x", 130, 32).unwrap().nvfp4_matmul());
    let other = weights(
        &[
            ("x.weight", "U8", &[130, 16], pairs(false)),
            ("x.weight_scale", "F8_E4M3", &[130, 2], scales),
            global,
            ("x.input_scale", "F32", &[], floats(&[3.0])),
        ],
        &[],
    );
    for source in [comfy, other] {
        assert_eq!(source.packed_format("x.weight"), Some(Format::NvFp4));
        assert_eq!(source.entry("x.weight").unwrap().1.dims(), [130, 32]);
        assert!(values(&source, "x.weight") == expected);
        assert_eq!(source.names().count(), 1);
        for (has_nvfp4, precision) in
            [(false, LinearPrecision::Float), (true, LinearPrecision::Stored { nvfp4: true })]
        {
            assert_eq!(source.preferred_precision(1, true, has_nvfp4), precision);
            let linear = source.root().with_precision(precision).linear("x", 130, 32).unwrap();
            assert_eq!(linear.nvfp4_matmul(), has_nvfp4);
        }
    }
}

#[test]
fn unsupported_quantization_is_an_error_with_the_layer() {
    let error_with = |quant: &str| {
        let error = open(
            &[
                ("a.weight", "F8_E4M3", &[2, 2], FOUR.to_vec()),
                ("a.comfy_quant", "U8", &[quant.len()], quant.as_bytes().to_vec()),
            ],
            &[],
        );
        error.unwrap_err().to_string()
    };
    let message = error_with(r#"{"format":"mxfp8"}"#);
    assert!(
        message.starts_with("layer `a` in `a.safetensors` is stored as `mxfp8`; Kiln reads"),
        "{message}"
    );
    assert!(error_with(r#"{"format":"int8_tensorwise","convrot":true}"#).contains("rotation"));
    assert!(error_with("[").contains("not JSON"));
    let header = [("_quantization_metadata", r#"{"layers":{"a":{"format":"awq_w4a16"}}}"#)];
    let error = open(&[("a.weight", "F8_E4M3", &[2, 2], FOUR.to_vec())], &header).unwrap_err().to_string();
    assert!(error.contains("awq_w4a16"), "{error}");
}

#[test]
fn tensors_that_can_not_be_split_are_errors() {
    let qkv = [
        ("single_stream_modulation.lin.weight", "F32", &[1usize, 1] as &[usize], floats(&[0.0])),
        ("double_blocks.0.img_attn.qkv.weight", "F32", &[4, 1], floats(&[0.0; 4])),
    ];
    let message = weights(&qkv, &[]).component(Component::Transformer).unwrap_err().to_string();
    assert!(message.contains("img_attn.qkv") && message.contains("can't be split"), "{message}");
}

/// e4m3 codes of 1, 2 and 0.5, and their values.
fn fp8_pattern(count: usize) -> (Vec<u8>, Vec<f32>) {
    (0..count).map(|i| [(0x38, 1.0), (0x40, 2.0), (0x30, 0.5)][i * 7 % 3]).unzip()
}

/// What fp8 values stand for with scales of tiles.
fn tiled(plain: &[f32], cols: usize, scales: &[f32], tile: usize) -> Vec<f32> {
    let scale = |at: usize| scales[at / cols / tile * cols.div_ceil(tile) + at % cols / tile];
    plain.iter().enumerate().map(|(at, value)| value * scale(at)).collect()
}

#[test]
fn block_wise_fp8_has_a_scale_per_tile() {
    let (codes, plain) = fp8_pattern(200 * 300);
    // The usual tile, one that only the shape tells, and bf16 scales.
    let bf16 = |values: &[f32]| floats(values).chunks(4).flat_map(|v| [v[2], v[3]]).collect::<Vec<u8>>();
    let scales: Vec<f32> = (1..=20).map(|i| i as f32 * 0.25).collect();
    for (tile, dtype, shape) in [(128, "F32", [2, 3]), (64, "F32", [4, 5]), (128, "BF16", [2, 3])] {
        let scales = &scales[..shape[0] * shape[1]];
        let stored = if dtype == "F32" { floats(scales) } else { bf16(scales) };
        let source = weights(
            &[
                ("x.weight", "F8_E4M3", &[200, 300], codes.clone()),
                ("x.weight_scale_inv", dtype, &shape, stored),
                ("x.activation_scale", "F32", &[], floats(&[9.0])),
            ],
            &[],
        );
        assert_eq!(source.names().collect::<Vec<_>>(), ["x.weight"]);
        assert!(values(&source, "x.weight") == tiled(&plain, 300, scales, tile), "{tile} {dtype}");
        let vars = source.root().with_precision(LinearPrecision::Stored { nvfp4: true });
        let linear = vars.linear("x", 200, 300).unwrap();
        assert!(
            !linear.fp8_matmul() && !packed(&linear)[0].is_fp8(),
            "tiles are no operand of an fp8 matmul"
        );
        assert!(
            packed(&linear)[0].to_f32().unwrap().to_f32().unwrap()[..] == tiled(&plain, 300, scales, tile)
        );
        assert_eq!(source.preferred_precision(1, true, true), LinearPrecision::Float);
    }
}

#[test]
fn fused_layers_are_split_inside_of_a_tile() {
    let ((codes, plain), cols) = (fp8_pattern(300 * 130), 130);
    let scales = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let source = weights(
        &[
            ("single_stream_modulation.lin.weight", "F32", &[1, 1], floats(&[0.0])),
            ("double_blocks.0.img_attn.qkv.weight", "F8_E4M3", &[300, cols], codes.clone()),
            ("double_blocks.0.img_attn.qkv.weight_scale_inv", "F32", &[3, 2], floats(&scales)),
            ("final_layer.adaLN_modulation.1.weight", "F8_E4M3", &[300, cols], codes),
            ("final_layer.adaLN_modulation.1.weight_scale_inv", "F32", &[3, 2], floats(&scales)),
        ],
        &[],
    );
    let model = source.component(Component::Transformer).unwrap().unwrap();
    let expected = tiled(&plain, cols, &scales, 128);
    for (i, name) in ["to_q", "to_k", "to_v"].iter().enumerate() {
        let found = values(&model, &format!("transformer_blocks.0.attn.{name}.weight"));
        assert!(found == expected[i * 100 * cols..][..100 * cols], "{name}");
    }
    let swapped = [&expected[150 * cols..], &expected[..150 * cols]].concat();
    assert!(values(&model, "norm_out.linear.weight") == swapped);
    let linear = model.root().linear("norm_out.linear", 300, cols).unwrap();
    let rows = packed(&linear).iter().flat_map(|m| m.to_f32().unwrap().to_f32().unwrap().into_owned());
    assert!(rows.collect::<Vec<_>>() == swapped);
}

#[test]
fn converting_block_wise_fp8_keeps_its_values() {
    let ((codes, plain), cols) = (fp8_pattern(300 * 130), 130);
    let scales = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let name = "double_blocks.0.img_attn.qkv.weight";
    let source = weights(
        &[
            ("single_stream_modulation.lin.weight", "F32", &[1, 1], floats(&[0.0])),
            (name, "F8_E4M3", &[300, cols], codes),
            ("double_blocks.0.img_attn.qkv.weight_scale_inv", "F32", &[3, 2], floats(&scales)),
            ("single_blocks.0.norm.query_norm.scale", "F8_E4M3", &[4], FOUR.to_vec()),
        ],
        &[("quantization_config", r#"{"quant_method":"modelopt","quant_algo":"FP8_PB_WO"}"#)],
    );
    let options = Options {
        component: Component::Transformer,
        container: Container::Safetensors,
        names: TensorNames::Original,
        storage: Storage::Keep,
        threads: 1,
    };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("b.safetensors");
    let model = source.component(Component::Transformer).unwrap().unwrap();
    export(&model, &out, &options, &mut |_, _| Ok(())).unwrap();
    let written = WeightSource::open(&out).unwrap();
    assert!(values(&written, name) == tiled(&plain, cols, &scales, 128), "bf16 has enough digits");
    assert_eq!(values(&written, "single_blocks.0.norm.query_norm.scale"), [1.0, 2.0, 0.5, -1.0]);
    assert!(!written.metadata().contains_key("quantization_config"), "it described the old file");
}

#[test]
fn one_scale_of_int8_serves_all_slices_of_a_fused_layer() {
    let tensors = |scale: &'static [usize], values: &[f32]| {
        weights(
            &[
                ("single_stream_modulation.lin.weight", "F32", &[1, 1], floats(&[0.0])),
                ("double_blocks.0.img_attn.qkv.weight", "I8", &[6, 1], vec![1, 2, 3, 4, 5, 0xfa]),
                ("double_blocks.0.img_attn.qkv.weight_scale", "F32", scale, floats(values)),
                ("final_layer.adaLN_modulation.1.weight", "I8", &[6, 1], vec![1, 2, 3, 4, 5, 0xfa]),
                ("final_layer.adaLN_modulation.1.weight_scale", "F32", scale, floats(values)),
            ],
            &[],
        )
    };
    let each = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    for (scale, scales, expected) in [
        (&[] as &[usize], &[0.5][..], [0.5, 1.0, 1.5, 2.0, 2.5, -3.0]),
        (&[1], &[0.5], [0.5, 1.0, 1.5, 2.0, 2.5, -3.0]),
        (&[6], &each, [1.0, 4.0, 9.0, 16.0, 25.0, -36.0]),
        (&[6, 1], &each, [1.0, 4.0, 9.0, 16.0, 25.0, -36.0]),
    ] {
        let model = tensors(scale, scales).component(Component::Transformer).unwrap().unwrap();
        let rows = |name: &str| values(&model, &format!("{name}.weight"));
        let qkv = ["to_q", "to_k", "to_v"].map(|name| rows(&format!("transformer_blocks.0.attn.{name}")));
        assert_eq!(qkv.concat(), expected, "{scale:?}");
        assert_eq!(rows("norm_out.linear"), [&expected[3..], &expected[..3]].concat(), "{scale:?}");
        let int8 =
            model.root().with_precision(LinearPrecision::Int8 { threads: 1 }).at("transformer_blocks.0.attn");
        let linear = int8.linear_stack(&[("to_q", 2), ("to_k", 2), ("to_v", 2)], 1).unwrap();
        assert!(matches!(linear.weight(), LinearWeight::Int8 { .. }), "multiplied as stored");
    }
}

#[test]
fn int8_values_are_exact() {
    // In bf16 the product has too many digits.
    let (integer, scale) = (127i8, 0.012_345_678f32);
    let source = weights(
        &[
            ("x.weight", "I8", &[1, 2], vec![integer as u8, 0x81]),
            ("x.weight_scale", "F32", &[1], floats(&[scale])),
        ],
        &[],
    );
    let expected = [127.0 * scale, -127.0 * scale];
    assert_eq!(values(&source, "x.weight"), expected);
    let linear = source.root().linear("x", 1, 2).unwrap();
    assert_eq!(packed(&linear)[0].to_f32().unwrap().to_f32().unwrap()[..], expected);
    assert_eq!(source.bytes_per_weight(), 1.0, "kept as stored");
}

#[test]
fn files_cast_to_fp8_as_a_whole_are_read() {
    let source = weights(
        &[
            ("x.weight", "F8_E4M3", &[2, 2], FOUR.to_vec()),
            ("x.bias", "F8_E4M3", &[2], vec![0x38, 0x40]),
            ("norm.weight", "F8_E5M2", &[2], vec![0x3c, 0xc0]),
            ("conv.weight", "F8_E4M3", &[1, 1, 2, 2], FOUR.to_vec()),
        ],
        &[],
    );
    let linear = source.root().linear("x", 2, 2).unwrap();
    assert_eq!(linear.bias().unwrap().to_f32().unwrap()[..], [1.0, 2.0]);
    let tensor = |name: &str, shape: &[usize]| source.root().tensor(name, shape).unwrap();
    assert_eq!(tensor("norm.weight", &[2]).dtype(), DType::BF16, "what backends load, and exact");
    assert_eq!(tensor("norm.weight", &[2]).to_f32().unwrap()[..], [1.0, -2.0]);
    assert_eq!(tensor("conv.weight", &[1, 1, 2, 2]).to_f32().unwrap()[..], [1.0, 2.0, 0.5, -1.0]);
}

/// The codes of an nvfp4 matrix, two in a byte, and its block scales.
type NvFp4Bytes = (Vec<u8>, Vec<u8>);

/// A matrix whose scales have the same shape in rows and in tiles, as nvfp4 in ModelOpt's order and in ComfyUI's.
fn ambiguous_nvfp4() -> ([NvFp4Bytes; 2], Vec<f32>) {
    let (rows, cols, blocks) = (128, 64, 4);
    let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 5 % 8) as u8).collect();
    let scales: Vec<u8> = (0..rows * blocks).map(|i| 0x38 + 8 * (i * i % 5) as u8).collect();
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let expected = codes.iter().enumerate().map(|(i, code)| {
        let block = i / 16;
        magnitudes[usize::from(*code)] * 2f32.powi((block * block % 5) as i32) * 0.5
    });
    let mut tiles = vec![0u8; scales.len()];
    for (i, scale) in scales.iter().enumerate() {
        tiles[swizzled_index(i / blocks, i % blocks, blocks)] = *scale;
    }
    let low_first = codes.chunks(2).map(|p| p[1] << 4 | p[0]).collect();
    let high_first = codes.chunks(2).map(|p| p[0] << 4 | p[1]).collect();
    ([(low_first, scales), (high_first, tiles)], expected.collect())
}

/// The tensors of an nvfp4 layer of 128 × 64.
fn nvfp4_layer<'t>(names: &'t [String; 3], (codes, scales): &NvFp4Bytes) -> Vec<RawTensor<'t>> {
    vec![
        (&names[0], "U8", &[128, 32], codes.clone()),
        (&names[1], "F8_E4M3", &[128, 4], scales.clone()),
        (&names[2], "F32", &[], floats(&[0.5])),
    ]
}

#[test]
fn the_header_tells_the_order_of_nvfp4() {
    let ([modelopt, comfy], expected) = ambiguous_nvfp4();
    let names =
        |module: &str| ["weight", "weight_scale", "weight_scale_2"].map(|leaf| format!("{module}.{leaf}"));
    let (fused, split) = (names("double_blocks.0.img_attn.qkv"), names("transformer_blocks.0.attn.to_q"));
    let list = json!({ "layers": { "double_blocks.0.img_attn.qkv": { "format": "nvfp4" } } }).to_string();
    let listed = [("_quantization_metadata", list.as_str())];
    let exported = [("quantization_config", r#"{"quant_method":"modelopt","quant_algo":"NVFP4"}"#)];

    // Black Forest Labs and ComfyUI list the layers; ModelOpt and diffusers write separate q, k and v.
    let source = weights(&nvfp4_layer(&fused, &comfy), &listed);
    assert!(values(&source, &fused[0]) == expected);
    let source = weights(&nvfp4_layer(&split, &modelopt), &[]);
    assert!(values(&source, &split[0]) == expected);

    // Fused and not listed, or exported by ModelOpt for other programs: both orders remain.
    for (names, metadata) in [(&fused, &[][..]), (&fused, &exported), (&split, &exported)] {
        let message = open(&nvfp4_layer(names, &modelopt), metadata).unwrap_err().to_string();
        assert!(message.contains(names[0].trim_end_matches(".weight")), "{message}");
        assert!(message.contains("may be in"), "{message}");
    }

    // A list of other names, or of some of the layers only.
    let elsewhere = [("_quantization_metadata", r#"{"layers":{"other.x":{"format":"nvfp4"}}}"#)];
    let message = open(&nvfp4_layer(&split, &comfy), &elsewhere).unwrap_err().to_string();
    assert!(message.contains("under other names"), "{message}");
    let two: Vec<_> = nvfp4_layer(&fused, &comfy).into_iter().chain(nvfp4_layer(&split, &modelopt)).collect();
    let message = open(&two, &listed).unwrap_err().to_string();
    assert!(message.contains("without ComfyUI's mark"), "{message}");

    // A padded layer decides for all.
    let (codes, scales, padded) = nvfp4_matrix();
    let low_first: Vec<u8> = codes.chunks(2).map(|p| p[1] << 4 | p[0]).collect();
    let other = names("double_blocks.0.img_mlp.0");
    let mut tensors = nvfp4_layer(&fused, &modelopt);
    tensors.extend([
        (other[0].as_str(), "U8", &[130usize, 16] as &[usize], low_first),
        (&other[1], "F8_E4M3", &[130, 2], scales),
        (&other[2], "F32", &[], floats(&[0.5])),
    ]);
    let source = weights(&tensors, &[]);
    assert!(values(&source, &fused[0]) == expected && values(&source, &other[0]) == padded);
}

#[test]
fn comfyuis_description_must_fit_the_weight() {
    let layer = |quant: &str, dtype: &'static str| {
        let text = format!(r#"{{"format":"{quant}"}}"#).into_bytes();
        let tensors = [
            ("x.weight", dtype, &[2usize, 16] as &[usize], vec![0x38; 32]),
            ("x.comfy_quant", "U8", &[text.len()], text.clone()),
        ];
        open(&tensors, &[]).map(drop).map_err(|e| e.to_string())
    };
    assert!(layer("float8_e5m2", "F8_E4M3").unwrap_err().contains("said to be `float8_e5m2`"));
    assert!(layer("nvfp4", "F8_E4M3").unwrap_err().contains("said to be `nvfp4`"));
    assert!(layer("float8_e4m3fn", "F8_E4M3").unwrap_err().contains("has no scale"));
}
