//! [`Reference`] against torch, diffusers and transformers: each operation on a small input.
//!
//! `torch.rs` is the output of `tools/golden/ops.py`, computed in f64 and rounded to f32 (rotary embeddings in f32, as in
//! the libraries), so a relative error of 1e-6 covers both roundings.

#[rustfmt::skip]
mod torch;

use kiln_ops::{
    Activation, AttentionMask, AttentionSpec, Backend, ConvGeometry, Reference, Residency, Result,
    RopeLayout, RopeTable, RowGroups,
};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta};

const B: Reference = Reference::new();

/// The inputs: multiples of 1/16 from −30/16 to 30/16, the same as `v` in `tools/golden/ops.py`.
fn v<const N: usize>(seed: u32, shape: [usize; N]) -> HostTensor {
    scaled(1.0, seed, shape)
}

fn scaled<const N: usize>(factor: f32, seed: u32, shape: [usize; N]) -> HostTensor {
    let value = |i: u32| {
        let h = i.wrapping_mul(2654435761).wrapping_add(seed.wrapping_mul(2246822519));
        let h = (h ^ h >> 15).wrapping_mul(2654435769);
        ((h ^ h >> 13) % 61) as f32 - 30.0
    };
    let count: usize = shape.iter().product();
    HostTensor::from_f32(shape, (0..count as u32).map(|i| factor * value(i) / 16.0).collect()).unwrap()
}

#[track_caller]
fn assert_same(found: Result<HostTensor>, expected: &[f32]) {
    let found = found.unwrap();
    let found = found.to_f32().unwrap();
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= 1e-6 * expected.abs() + 1e-7 * scale, "element {i}: {found}, torch says {expected}");
    }
}

fn weight(slabs: &[usize], bias: bool, deltas: Vec<LoraDelta>) -> <Reference as Backend>::Weight {
    let whole = v(2, [7, 5]);
    let mut row = 0;
    let cut = |n: &usize| {
        row += n;
        whole.rows(row - n..row).unwrap()
    };
    let slabs = slabs.iter().map(cut).collect();
    let linear = HostLinear::dense(slabs).unwrap().with_bias(bias.then(|| v(3, [7]))).unwrap();
    B.load_weight(linear.with_deltas(deltas).unwrap(), Residency::Device).unwrap()
}

#[test]
fn linear_equals_torch_for_any_split_of_rows() {
    let x = v(1, [3, 5]);
    assert_same(B.linear(&x, &weight(&[7], true, vec![])), torch::LINEAR);
    assert_same(B.linear(&x, &weight(&[2, 1, 4], true, vec![])), torch::LINEAR);
    let parts = B.linear_split(&x, &weight(&[7], true, vec![]), [4, 0, 3]).unwrap();
    assert_eq!(parts[0].shape().dims(), [3, 4]);
    assert_same(B.concat_columns(&[&parts[0], &parts[1], &parts[2]]), torch::LINEAR);
}

#[test]
fn bf16_results_are_rounded_once_to_nearest() {
    let x = v(1, [3, 5]).to_dtype(DType::BF16).unwrap();
    let y = B.linear(&x, &weight(&[7], true, vec![])).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
    assert_eq!(y.to_f32().unwrap().as_ref(), torch::LINEAR_BF16);
}

#[test]
fn weights_may_be_stored_in_any_float_type() {
    let x = v(1, [3, 5]);
    let whole = v(2, [7, 5]);
    let f16: Vec<u8> =
        whole.to_f32().unwrap().iter().flat_map(|&v| kiln_tensor::f16::from_f32(v).to_le_bytes()).collect();
    let slab = HostTensor::new(DType::F16, [7, 5], f16.into()).unwrap();
    for slab in [slab, whole.to_dtype(DType::BF16).unwrap()] {
        let linear = HostLinear::dense(vec![slab]).unwrap().with_bias(v(3, [7])).unwrap();
        assert_same(B.linear(&x, &B.load_weight(linear, Residency::Device).unwrap()), torch::LINEAR);
    }
}

#[test]
fn overlapping_deltas_add_up() {
    let deltas = vec![
        LoraDelta { row: 0, down: v(4, [2, 5]), up: v(5, [4, 2]), scale: 0.5 },
        LoraDelta { row: 3, down: v(6, [3, 5]), up: v(7, [4, 3]), scale: -1.5 },
    ];
    assert_same(B.linear(&v(1, [3, 5]), &weight(&[3, 4], false, deltas)), torch::LINEAR_DELTAS);
}

#[test]
fn gated_add_uses_the_gate_of_each_row() {
    let x = v(1, [3, 5]).to_f32().unwrap().into_owned();
    let cut = |from: usize, to: usize| {
        let part: Vec<f32> = x.chunks(5).flat_map(|row| row[from..to].to_vec()).collect();
        HostTensor::from_f32([3, to - from], part).unwrap()
    };
    let groups = RowGroups::from_lengths(&[2, 1]);
    let gate = v(8, [2, 7]);
    let (left, right, residual) = (cut(0, 3), cut(3, 5), v(9, [3, 7]));
    let w = weight(&[7], true, vec![]);
    assert_same(
        B.linear_gated_add(&[&left, &right], &w, Some((&gate, &groups)), &residual),
        torch::LINEAR_GATED_ADD,
    );
    let plain = B.linear_gated_add(&[&left, &right], &w, None, &HostTensor::zeros([3, 7]));
    assert_same(plain, torch::LINEAR);
}

#[test]
fn norms_equal_torch() {
    let x = v(1, [3, 7]);
    assert_same(B.rms_norm(&x, &v(2, [7]), 1e-3), torch::RMS_NORM);
    let groups = RowGroups::from_lengths(&[1, 2]);
    assert_same(B.ada_layer_norm(&x, &v(3, [2, 7]), &v(4, [2, 7]), &groups, 1e-3), torch::ADA_LAYER_NORM);
    let (image, weight, bias) = (v(5, [3, 2, 6]), v(6, [6]), v(7, [6]));
    assert_same(B.group_norm(&image, 3, &weight, &bias, 1e-3, None), torch::GROUP_NORM);
    assert_same(
        B.group_norm(&image, 3, &weight, &bias, 1e-3, Some(Activation::Silu)),
        torch::GROUP_NORM_SILU,
    );
}

#[test]
fn rope_layouts_equal_diffusers_and_qwen3() {
    let angles = v(3, [3, 4]);
    let table = |pairs| {
        let map = |f: fn(f64) -> f64| {
            let values = angles.to_f32().unwrap().iter().map(|&a| f(a.into()) as f32).collect();
            HostTensor::from_f32([3, 4], values).unwrap()
        };
        RopeTable { cos: map(f64::cos), sin: map(f64::sin), pairs }
    };
    let (x, weight) = (v(1, [3, 16]), v(2, [8]));
    assert_same(B.norm_rope(&x, Some(&weight), &table(RopeLayout::Interleaved), 1e-6), torch::ROPE_ADJACENT);
    assert_same(B.norm_rope(&x, Some(&weight), &table(RopeLayout::HalfSplit), 1e-6), torch::ROPE_HALVES);
}

#[test]
fn attention_equals_torch_for_any_row_blocks() {
    let spec = |heads, kv_heads, mask| AttentionSpec::new(heads, kv_heads, mask);
    let (q, k, val) = (v(1, [3, 8]), v(2, [5, 8]), v(3, [5, 8]));
    assert_same(B.attention(&[&q], &[&k], &[&val], &spec(2, 2, AttentionMask::None)), torch::ATTENTION);
    let (q0, q1) = (q.rows(0..1).unwrap(), q.rows(1..3).unwrap());
    let (k0, k1) = (k.rows(0..4).unwrap(), k.rows(4..5).unwrap());
    let (v0, v1) = (val.rows(0..2).unwrap(), val.rows(2..5).unwrap());
    assert_same(
        B.attention(&[&q0, &q1], &[&k0, &k1], &[&v0, &v1], &spec(2, 2, AttentionMask::None)),
        torch::ATTENTION,
    );
    let grouped = [v(1, [2, 8]), v(2, [5, 4]), v(3, [5, 4])];
    let [q, k, val] = grouped.each_ref();
    assert_same(B.attention(&[q], &[k], &[val], &spec(4, 2, AttentionMask::None)), torch::ATTENTION_GROUPED);
}

#[test]
fn large_scores_do_not_overflow() {
    let spec = AttentionSpec::new(2, 2, AttentionMask::None);
    let (q, k) = (scaled(32.0, 1, [3, 8]), scaled(32.0, 2, [5, 8]));
    assert_same(B.attention(&[&q], &[&k], &[&v(3, [5, 8])], &spec), torch::ATTENTION_STEEP);
}

#[test]
fn masks_equal_torch() {
    let (q, k, val) = (v(1, [5, 4]), v(2, [5, 2]), v(3, [5, 2]));
    let attend = |mask| B.attention(&[&q], &[&k], &[&val], &AttentionSpec::new(2, 1, mask));
    assert_same(attend(AttentionMask::Causal { valid: 3 }), torch::ATTENTION_CAUSAL);
    assert_same(attend(AttentionMask::Isolated { rows: 1..3 }), torch::ATTENTION_ISOLATED);
}

#[test]
fn elementwise_operations_equal_torch() {
    let (x, y) = (v(1, [3, 6]), v(2, [3, 6]));
    let steep = scaled(4.0, 1, [3, 6]);
    assert_same(B.swiglu(&x), torch::SWIGLU);
    assert_same(B.activation(&steep, Activation::Silu), torch::SILU);
    assert_same(B.activation(&x, Activation::Relu), torch::RELU);
    assert_same(B.activation(&steep, Activation::SoftClamp), torch::SOFT_CLAMP);
    assert_same(B.add_scaled(&x, &y, -0.5), torch::ADD_SCALED);
    assert_same(B.add(&x, &scaled(-0.5, 2, [3, 6])), torch::ADD_SCALED);
    assert_same(B.lerp(&x, &y, 0.3), torch::LERP);
    assert_same(B.guide(&x, &y, 4.0), torch::GUIDE);
    assert_same(B.blend_rows(&x, &y, &v(3, [3])), torch::BLEND_ROWS);
    assert_same(B.affine(&x, &v(4, [6]), &v(5, [6])), torch::AFFINE);
}

#[test]
fn patches_are_ordered_as_in_diffusers() {
    let x = v(1, [4, 6, 3]);
    let deep = B.space_to_depth(&x).unwrap();
    assert_eq!(deep.shape().dims(), [2, 3, 12]);
    assert_eq!(B.depth_to_space(&deep).unwrap(), x);
    assert_same(Ok(deep), torch::SPACE_TO_DEPTH);
    assert_same(B.depth_to_space(&v(2, [2, 3, 8])), torch::DEPTH_TO_SPACE);
}

#[test]
fn convolutions_equal_torch() {
    let (x, bias) = (v(3, [5, 4, 2]), v(5, [3]));
    let full = B.load_conv(&v(4, [3, 2, 3, 3]), Some(&bias)).unwrap();
    let same_size = ConvGeometry::same(3);
    assert_same(B.conv2d(&x, &full, same_size, None), torch::CONV);
    assert_same(B.conv2d(&x, &full, same_size, Some(&v(6, [5, 4, 3]))), torch::CONV_RESIDUAL);
    let point = B.load_conv(&v(4, [3, 2, 1, 1]), None).unwrap();
    assert_same(B.conv2d(&x, &point, ConvGeometry::same(1), None), torch::CONV_POINT);
    let tall = B.load_conv(&v(4, [3, 2, 3, 1]), None).unwrap();
    let padding = [1, 1, 0, 0];
    assert_same(
        B.conv2d(&x, &tall, ConvGeometry { stride: 1, padding, upsample: false }, None),
        torch::CONV_TALL,
    );
    let down = ConvGeometry { stride: 2, padding: [0, 1, 0, 1], upsample: false };
    assert_same(B.conv2d(&x, &full, down, None), torch::CONV_DOWN);
    let up = ConvGeometry { upsample: true, ..same_size };
    assert_same(B.conv2d(&v(3, [2, 3, 2]), &full, up, None), torch::CONV_UP);
}
