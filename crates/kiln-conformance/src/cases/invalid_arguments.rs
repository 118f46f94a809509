//! Calls with invalid arguments: every backend must reject each with the same message, and never panic.

use kiln_ops::{
    Activation, AttentionMask, AttentionSpec, Backend, ConvGeometry, Residency, Result, RopeLayout,
    RopeTable, RowGroups,
};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape};

use super::CaseList;
use crate::case_run::{CaseRun, Scenario};

pub(super) fn add_cases<B: Backend>(list: &mut CaseList<B>) {
    list.add_once("invalid_arguments/host_tensors", HostTensors);
    list.add_once("invalid_arguments/movement", Movement);
    list.add_once("invalid_arguments/linear", Linear);
    list.add_once("invalid_arguments/norms", Norms);
    list.add_once("invalid_arguments/attention", Attention);
    list.add_once("invalid_arguments/elementwise", Elementwise);
    list.add_once("invalid_arguments/images", Images);
}

fn f32s<B: Backend, const N: usize>(t: &CaseRun<'_, B>, shape: [usize; N]) -> Result<B::Tensor> {
    t.b.upload(&HostTensor::zeros(shape), DType::F32)
}

fn bf16s<B: Backend, const N: usize>(t: &CaseRun<'_, B>, shape: [usize; N]) -> Result<B::Tensor> {
    t.b.upload(&HostTensor::zeros(shape), DType::BF16)
}

struct HostTensors;

impl Scenario for HostTensors {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let integers = HostTensor::new(DType::I32, [1], vec![0; 4].into())?;
        t.record_rejection("integers", b.upload(&integers, DType::F32));
        t.record_rejection("upload to f16", b.upload(&HostTensor::zeros([1]), DType::F16));
        let w = b.load_weight(HostLinear::dense(vec![HostTensor::zeros([6, 4])])?, Residency::Device)?;
        for (label, row, down, up) in [
            ("a narrow delta", 0, &[2, 3][..], [6, 2]),
            ("a delta of two ranks", 0, &[2, 4], [6, 3]),
            ("a delta past the end", 1, &[2, 4], [6, 2]),
            ("a delta past every end", usize::MAX, &[2, 4], [6, 2]),
            ("a delta that is no matrix", 0, &[4], [6, 2]),
        ] {
            let delta =
                LoraDelta { row, down: HostTensor::zeros(down), up: HostTensor::zeros(up), scale: 1.0 };
            t.record_rejection(label, b.with_deltas(&w, vec![delta]));
        }
        t.record_rejection("a kernel of rank 3", b.load_conv(&HostTensor::zeros([2, 3, 3]), None));
        t.record_rejection("an empty kernel", b.load_conv(&HostTensor::zeros([2, 3, 0, 3]), None));
        let kernel = HostTensor::zeros([2, 3, 1, 1]);
        t.record_rejection("a long conv bias", b.load_conv(&kernel, Some(&HostTensor::zeros([3]))));
        Ok(())
    }
}

struct Movement;

impl Scenario for Movement {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, narrow, half) = (f32s(t, [4, 6])?, f32s(t, [4, 5])?, bf16s(t, [4, 6])?);
        let (short, flat) = (f32s(t, [3, 6])?, f32s(t, [6])?);
        let scalar = b.upload(&HostTensor::zeros(Vec::new()), DType::F32)?;
        t.record_rejection("cast to f16", b.cast(&x, DType::F16));
        t.record_rejection("cast to integers", b.cast(&x, DType::I32));
        t.record_rejection("reshape to more", b.reshape(&x, [5, 5].into()));
        t.record_rejection("reshape to too many", b.reshape(&x, [usize::MAX, 2].into()));
        t.record_rejection("rows past the end", b.slice_rows(&x, 2..5));
        #[allow(clippy::reversed_empty_ranges)]
        t.record_rejection("rows backwards", b.slice_rows(&x, 3..2));
        t.record_rejection("rows of a scalar", b.slice_rows(&scalar, 0..0));
        t.record_rejection("no rows to join", b.concat_rows(&[]));
        t.record_rejection("rows of two widths", b.concat_rows(&[&x, &narrow]));
        t.record_rejection("rows of two types", b.concat_rows(&[&x, &half]));
        t.record_rejection("vectors below each other", b.concat_rows(&[&flat, &flat]));
        let mut to = f32s(t, [4, 6])?;
        t.record_rejection("written rows past the end", b.write_rows(&mut to, 2, &short));
        t.record_rejection("written rows of another width", b.write_rows(&mut to, 0, &narrow));
        t.record_rejection("written rows of another type", b.write_rows(&mut to, 0, &half));
        t.record_rejection("a vector to write", b.write_rows(&mut to, 0, &flat));
        t.record_rejection("no columns to join", b.concat_columns(&[]));
        t.record_rejection("columns of two heights", b.concat_columns(&[&x, &short]));
        t.record_rejection("columns of two types", b.concat_columns(&[&x, &half]));
        t.record_rejection("vectors side by side", b.concat_columns(&[&flat]));
        Ok(())
    }
}

struct Linear;

impl Scenario for Linear {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let w = b.load_weight(
            HostLinear::dense(vec![HostTensor::zeros([6, 4]), HostTensor::zeros([2, 4])])?,
            Residency::Device,
        )?;
        let (x, narrow, flat) = (f32s(t, [3, 4])?, f32s(t, [3, 3])?, f32s(t, [4])?);
        t.record_rejection("a narrow x", b.linear(&narrow, &w));
        t.record_rejection("a vector", b.linear(&flat, &w));
        t.record_rejection("a narrow x to split", b.linear_split(&narrow, &w, [6, 2]));
        t.record_rejection("widths too small", b.linear_split(&x, &w, [5, 2]));
        t.record_rejection("widths too large", b.linear_split(&x, &w, [8, 1]));
        t.record_rejection("widths that overflow", b.linear_split(&x, &w, [usize::MAX, 9]));
        t.record_rejection("no widths", b.linear_split(&x, &w, []).map(|_: [B::Tensor; 0]| ()));

        let (left, right, short) = (f32s(t, [3, 3])?, f32s(t, [3, 1])?, f32s(t, [2, 1])?);
        let (residual, gate) = (f32s(t, [3, 8])?, f32s(t, [2, 8])?);
        let groups = RowGroups::from_lengths(&[1, 2]);
        let gated = Some((&gate, &groups));
        t.record_rejection("no inputs", b.linear_gated_add(&[], &w, gated, &residual));
        t.record_rejection("too few columns", b.linear_gated_add(&[&left], &w, gated, &residual));
        t.record_rejection("too many columns", b.linear_gated_add(&[&left, &left], &w, gated, &residual));
        t.record_rejection(
            "inputs of two heights",
            b.linear_gated_add(&[&left, &short], &w, gated, &residual),
        );
        let halves = bf16s(t, [3, 1])?;
        t.record_rejection(
            "inputs of two types",
            b.linear_gated_add(&[&left, &halves], &w, gated, &residual),
        );
        let wide = f32s(t, [3, 9])?;
        t.record_rejection("a wide residual", b.linear_gated_add(&[&left, &right], &w, None, &wide));
        let half = bf16s(t, [3, 8])?;
        t.record_rejection("a bf16 residual", b.linear_gated_add(&[&left, &right], &w, None, &half));
        for (label, gate, groups) in [
            ("groups of too few rows", f32s(t, [2, 8])?, RowGroups::from_lengths(&[1, 1])),
            ("groups of too many rows", f32s(t, [2, 8])?, RowGroups::from_lengths(&[2, 2])),
            ("a gate short of a group", f32s(t, [1, 8])?, RowGroups::from_lengths(&[1, 2])),
            ("a narrow gate", f32s(t, [2, 7])?, RowGroups::from_lengths(&[1, 2])),
            ("a bf16 gate", bf16s(t, [2, 8])?, RowGroups::from_lengths(&[1, 2])),
        ] {
            t.record_rejection(
                label,
                b.linear_gated_add(&[&left, &right], &w, Some((&gate, &groups)), &residual),
            );
        }
        Ok(())
    }
}

struct Norms;

impl Scenario for Norms {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, flat) = (f32s(t, [3, 8])?, f32s(t, [8])?);
        let one = RowGroups::single(3);
        let (row, short) = (f32s(t, [1, 8])?, f32s(t, [7])?);
        t.record_rejection("rms: a short weight", b.rms_norm(&x, &short, 1e-6));
        t.record_rejection("rms: a weight row", b.rms_norm(&x, &row, 1e-6));
        t.record_rejection("rms: a bf16 weight", b.rms_norm(&x, &bf16s(t, [8])?, 1e-6));
        t.record_rejection("rms: a vector", b.rms_norm(&flat, &flat, 1e-6));
        t.record_rejection(
            "layer: too few rows in groups",
            b.ada_layer_norm(&x, &row, &row, &RowGroups::single(2), 1e-6),
        );
        t.record_rejection(
            "layer: no groups",
            b.ada_layer_norm(&x, &row, &row, &RowGroups::from_lengths(&[]), 1e-6),
        );
        t.record_rejection(
            "layer: a scale for two",
            b.ada_layer_norm(&x, &f32s(t, [2, 8])?, &row, &one, 1e-6),
        );
        t.record_rejection(
            "layer: a narrow shift",
            b.ada_layer_norm(&x, &row, &f32s(t, [1, 7])?, &one, 1e-6),
        );
        t.record_rejection("layer: a bf16 shift", b.ada_layer_norm(&x, &row, &bf16s(t, [1, 8])?, &one, 1e-6));
        t.record_rejection("layer: a vector", b.ada_layer_norm(&flat, &row, &row, &one, 1e-6));

        let rope = |cos: [usize; 2], sin: [usize; 2]| -> Result<RopeTable<B::Tensor>> {
            let of = |shape: [usize; 2]| b.upload(&HostTensor::zeros(shape), DType::F32);
            Ok(RopeTable { cos: of(cos)?, sin: of(sin)?, pairs: RopeLayout::Interleaved })
        };
        let good = rope([3, 2], [3, 2])?;
        let head = f32s(t, [4])?;
        t.record_rejection("rope: an odd head", b.norm_rope(&x, Some(&f32s(t, [1])?), &good, 1e-6));
        t.record_rejection("rope: an empty head", b.norm_rope(&x, Some(&f32s(t, [0])?), &good, 1e-6));
        t.record_rejection("rope: heads that don't fit", b.norm_rope(&x, Some(&f32s(t, [6])?), &good, 1e-6));
        t.record_rejection("rope: a bf16 weight", b.norm_rope(&x, Some(&bf16s(t, [4])?), &good, 1e-6));
        t.record_rejection("rope: a weight matrix", b.norm_rope(&x, Some(&f32s(t, [2, 2])?), &good, 1e-6));
        t.record_rejection("rope: a short table", b.norm_rope(&x, Some(&head), &rope([2, 2], [2, 2])?, 1e-6));
        t.record_rejection("rope: a wide table", b.norm_rope(&x, Some(&head), &rope([3, 4], [3, 4])?, 1e-6));
        t.record_rejection("rope: no angles", b.norm_rope(&x, None, &rope([3, 0], [3, 0])?, 1e-6));
        t.record_rejection(
            "rope: angles that don't fit",
            b.norm_rope(&x, None, &rope([3, 3], [3, 3])?, 1e-6),
        );
        t.record_rejection("rope: a short table alone", b.norm_rope(&x, None, &rope([2, 2], [2, 2])?, 1e-6));
        t.record_rejection("rope: other sines", b.norm_rope(&x, Some(&head), &rope([3, 2], [3, 1])?, 1e-6));

        let (image, half) = (f32s(t, [2, 2, 8])?, bf16s(t, [8])?);
        let group =
            |x, groups, weight, bias| b.group_norm(x, groups, weight, bias, 1e-6, Some(Activation::Silu));
        t.record_rejection("group: no groups", group(&image, 0, &flat, &flat));
        t.record_rejection("group: uneven groups", group(&image, 3, &flat, &flat));
        t.record_rejection("group: a short weight", group(&image, 4, &short, &flat));
        t.record_rejection("group: a short bias", group(&image, 4, &flat, &short));
        t.record_rejection("group: a bf16 bias", group(&image, 4, &flat, &half));
        t.record_rejection("group: a matrix", group(&x, 4, &flat, &flat));
        Ok(())
    }
}

struct Attention;

impl Scenario for Attention {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let spec = |heads, kv_heads, mask| AttentionSpec { heads, kv_heads, mask };
        let (x, longer, wider) = (f32s(t, [5, 8])?, f32s(t, [6, 8])?, f32s(t, [5, 12])?);
        let (none, half, flat) = (f32s(t, [0, 8])?, bf16s(t, [5, 8])?, f32s(t, [8])?);
        let plain = spec(2, 2, AttentionMask::None);
        let all: &[&B::Tensor] = &[&x];
        for (label, q, k, v) in [
            ("no queries at all", &[][..], all, all),
            ("no keys at all", all, &[], all),
            ("no values at all", all, all, &[]),
            ("keys without rows", all, &[&none], &[&none]),
            ("fewer keys than values", all, all, &[&longer]),
            ("wide keys", all, &[&wider], all),
            ("wide values", all, all, &[&wider]),
            ("query blocks of two widths", &[&x, &wider], all, all),
            ("bf16 keys", all, &[&half], all),
            ("bf16 values", all, all, &[&half]),
            ("a bf16 block of queries", &[&x, &half], all, all),
            ("a query vector", &[&flat], all, all),
        ] {
            t.record_rejection(label, b.attention(q, k, v, &plain));
        }
        for (label, heads, kv_heads) in [
            ("no heads", 0, 0),
            ("no key heads", 2, 0),
            ("more key heads than heads", 2, 4),
            ("heads shared unevenly", 4, 3),
            ("columns shared unevenly", 3, 3),
            ("keys for one head of two", 2, 1),
        ] {
            t.record_rejection(
                label,
                b.attention(all, all, all, &spec(heads, kv_heads, AttentionMask::None)),
            );
        }
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 3..2;
        for (label, mask) in [
            ("no valid keys", AttentionMask::Causal { valid: 0 }),
            ("too many valid keys", AttentionMask::Causal { valid: 6 }),
            ("isolated rows past the end", AttentionMask::Isolated { rows: 2..6 }),
            ("isolated rows backwards", AttentionMask::Isolated { rows: backwards }),
        ] {
            t.record_rejection(label, b.attention(all, all, all, &spec(2, 2, mask)));
        }
        for mask in [AttentionMask::Causal { valid: 2 }, AttentionMask::Isolated { rows: 0..2 }] {
            let label = format!("more keys than queries, {mask:?}");
            t.record_rejection(label, b.attention(all, &[&longer], &[&longer], &spec(2, 2, mask)));
        }
        Ok(())
    }
}

struct Elementwise;

impl Scenario for Elementwise {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, flat) = (f32s(t, [3, 8])?, f32s(t, [8])?);
        t.record_rejection("swiglu: odd columns", b.swiglu(&f32s(t, [3, 7])?));
        t.record_rejection("swiglu: a vector", b.swiglu(&flat));
        for (kind, y) in
            [("shapes", f32s(t, [8, 3])?), ("ranks", f32s(t, [24])?), ("types", bf16s(t, [3, 8])?)]
        {
            t.record_rejection(format!("add: other {kind}"), b.add(&x, &y));
            t.record_rejection(format!("add_scaled: other {kind}"), b.add_scaled(&x, &y, 2.0));
            t.record_rejection(format!("lerp: other {kind}"), b.lerp(&x, &y, 0.5));
            t.record_rejection(format!("guide: other {kind}"), b.guide(&x, &y, 4.0));
            t.record_rejection(format!("relative_l1: other {kind}"), b.relative_l1(&x, &y));
            t.record_rejection(format!("blend_rows: other {kind}"), b.blend_rows(&x, &y, &f32s(t, [3])?));
        }
        t.record_rejection("blend_rows: a long mask", b.blend_rows(&x, &x, &f32s(t, [4])?));
        t.record_rejection("blend_rows: a mask column", b.blend_rows(&x, &x, &f32s(t, [3, 1])?));
        t.record_rejection("blend_rows: a bf16 mask", b.blend_rows(&x, &x, &bf16s(t, [3])?));
        t.record_rejection("blend_rows: vectors", b.blend_rows(&flat, &flat, &flat));
        let scalar = b.upload(&HostTensor::zeros(Shape::default()), DType::F32)?;
        t.record_rejection("affine: a scalar", b.affine(&scalar, &flat, &flat));
        t.record_rejection("affine: a short scale", b.affine(&x, &f32s(t, [7])?, &flat));
        t.record_rejection("affine: a short shift", b.affine(&x, &flat, &f32s(t, [7])?));
        t.record_rejection("affine: a bf16 shift", b.affine(&x, &flat, &bf16s(t, [8])?));
        Ok(())
    }
}

struct Images;

impl Scenario for Images {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        t.record_rejection("space_to_depth: odd height", b.space_to_depth(&f32s(t, [3, 2, 4])?));
        t.record_rejection("space_to_depth: odd width", b.space_to_depth(&f32s(t, [2, 3, 4])?));
        t.record_rejection("space_to_depth: a matrix", b.space_to_depth(&f32s(t, [2, 2])?));
        t.record_rejection("depth_to_space: 6 channels", b.depth_to_space(&f32s(t, [2, 2, 6])?));
        t.record_rejection("depth_to_space: a matrix", b.depth_to_space(&f32s(t, [2, 4])?));

        let conv = b.load_conv(&HostTensor::zeros([5, 3, 3, 3]), None)?;
        let same = ConvGeometry::same(3);
        let x = f32s(t, [4, 6, 3])?;
        t.record_rejection("conv2d: other channels", b.conv2d(&f32s(t, [4, 6, 4])?, &conv, same, None));
        t.record_rejection("conv2d: a matrix", b.conv2d(&f32s(t, [4, 3])?, &conv, same, None));
        t.record_rejection(
            "conv2d: no stride",
            b.conv2d(&x, &conv, ConvGeometry { stride: 0, ..same }, None),
        );
        let bare = ConvGeometry { padding: [0; 4], ..same };
        t.record_rejection("conv2d: too low", b.conv2d(&f32s(t, [2, 6, 3])?, &conv, bare, None));
        t.record_rejection("conv2d: too narrow", b.conv2d(&f32s(t, [6, 2, 3])?, &conv, bare, None));
        let endless = ConvGeometry { padding: [usize::MAX, 1, 1, 1], ..same };
        t.record_rejection("conv2d: endless padding", b.conv2d(&x, &conv, endless, None));
        t.record_rejection(
            "conv2d: a residual of another size",
            b.conv2d(&x, &conv, bare, Some(&f32s(t, [4, 6, 5])?)),
        );
        t.record_rejection(
            "conv2d: a residual of other channels",
            b.conv2d(&x, &conv, same, Some(&f32s(t, [4, 6, 3])?)),
        );
        t.record_rejection("conv2d: a bf16 residual", b.conv2d(&x, &conv, same, Some(&bf16s(t, [4, 6, 5])?)));
        Ok(())
    }
}
