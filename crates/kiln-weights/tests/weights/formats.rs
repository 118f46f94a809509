//! Conventions of quantized files, built by hand: scales of every kind, both orders of nvfp4, mixed layers.

use crate::common::file;
use kiln_tensor::packed::{Format, PackedTensor, swizzled_index};
use kiln_tensor::{HostLinear, LinearWeight};
use kiln_weights::{Component, LinearPrecision, WeightSource};
use serde_json::{Map, Value, json};

fn packed(layer: &HostLinear) -> &[PackedTensor] {
    match layer.weight() {
        LinearWeight::Packed(packed) => packed,
        other => panic!("expected packed matrices, found {other:?}"),
    }
}

/// A file of tensors given by name, dtype, shape and bytes.
fn weights(tensors: &[(&str, &str, &[usize], Vec<u8>)], metadata: &[(&str, &str)]) -> WeightSource {
    open(tensors, metadata).unwrap()
}

fn open(
    tensors: &[(&str, &str, &[usize], Vec<u8>)],
    metadata: &[(&str, &str)],
) -> kiln_weights::Result<WeightSource> {
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
    WeightSource::from_bytes("a.safetensors", file(&Value::Object(entries).to_string(), &data))
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn values(source: &WeightSource, name: &str) -> Vec<f32> {
    source.tensor(name).unwrap().to_f32().unwrap().into_owned()
}

/// 1, 2, 0.5, -1 as e4m3.
const FOUR: [u8; 4] = [0x38, 0x40, 0x30, 0xb8];

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
                    ("scaled_fp8", "F8_E4M3", &[2], vec![0, 0]),
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
    assert_eq!(source.preferred_precision(1, false), LinearPrecision::Float);
    let vars = source.root().with_precision(source.preferred_precision(1, true));
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
    let comfy = weights(
        &[
            ("x.weight", "U8", &[130, 16], pairs(true)),
            ("x.weight_scale", "F8_E4M3", &[256, 4], tiles),
            global.clone(),
            comfy_quant,
        ],
        &[],
    );
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
fn scales_that_do_not_fit_are_errors_when_they_are_used() {
    let three = floats(&[1.0, 2.0, 3.0]);
    let source = weights(
        &[("x.weight", "F8_E4M3", &[2, 2], FOUR.to_vec()), ("x.weight_scale", "F32", &[3], three)],
        &[],
    );
    let message = source.tensor("x.weight").unwrap_err().to_string();
    assert!(message.contains("x.weight") && message.contains("3 scales"), "{message}");
    let qkv = [
        ("single_stream_modulation.lin.weight", "F32", &[1usize, 1] as &[usize], floats(&[0.0])),
        ("double_blocks.0.img_attn.qkv.weight", "F32", &[4, 1], floats(&[0.0; 4])),
    ];
    let message = weights(&qkv, &[]).component(Component::Transformer).unwrap_err().to_string();
    assert!(message.contains("img_attn.qkv") && message.contains("can't be split"), "{message}");
}
