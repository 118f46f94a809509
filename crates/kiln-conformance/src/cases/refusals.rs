//! Calls whose arguments don't fit: each has to be refused, in the same words by every backend, and never to panic.

use kiln_ops::{
    Activation, AttentionSpec, Backend, ConvGeometry, Groups, Mask, Residency, Result, RopePairs, RopeTable,
};
use kiln_tensor::{DType, Delta, HostTensor, LinearParts, Shape};

use super::List;
use crate::bench::{Bench, Scenario};

pub(super) fn list<B: Backend>(list: &mut List<B>) {
    list.add_once("refusals/host_tensors", HostTensors);
    list.add_once("refusals/movement", Movement);
    list.add_once("refusals/linear", Linear);
    list.add_once("refusals/norms", Norms);
    list.add_once("refusals/attention", Attention);
    list.add_once("refusals/elementwise", Elementwise);
    list.add_once("refusals/images", Images);
}

fn f32s<B: Backend, const N: usize>(t: &Bench<'_, B>, shape: [usize; N]) -> Result<B::Tensor> {
    t.b.upload(&HostTensor::zeros(shape), DType::F32)
}

fn bf16s<B: Backend, const N: usize>(t: &Bench<'_, B>, shape: [usize; N]) -> Result<B::Tensor> {
    t.b.upload(&HostTensor::zeros(shape), DType::BF16)
}

struct HostTensors;

impl Scenario for HostTensors {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let b = t.b;
        let integers = HostTensor::new(DType::I32, [1], vec![0; 4].into())?;
        t.refused("integers", b.upload(&integers, DType::F32));
        t.refused("upload to f16", b.upload(&HostTensor::zeros([1]), DType::F16));
        let w = b.weight(LinearParts::dense(vec![HostTensor::zeros([6, 4])])?, Residency::Device)?;
        for (label, row, down, up) in [
            ("a narrow delta", 0, &[2, 3][..], [6, 2]),
            ("a delta of two ranks", 0, &[2, 4], [6, 3]),
            ("a delta past the end", 1, &[2, 4], [6, 2]),
            ("a delta past every end", usize::MAX, &[2, 4], [6, 2]),
            ("a delta that is no matrix", 0, &[4], [6, 2]),
        ] {
            let delta = Delta { row, down: HostTensor::zeros(down), up: HostTensor::zeros(up), scale: 1.0 };
            t.refused(label, b.with_deltas(&w, vec![delta]));
        }
        t.refused("a kernel of rank 3", b.conv(&HostTensor::zeros([2, 3, 3]), None));
        t.refused("an empty kernel", b.conv(&HostTensor::zeros([2, 3, 0, 3]), None));
        let kernel = HostTensor::zeros([2, 3, 1, 1]);
        t.refused("a long conv bias", b.conv(&kernel, Some(&HostTensor::zeros([3]))));
        Ok(())
    }
}

struct Movement;

impl Scenario for Movement {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, narrow, half) = (f32s(t, [4, 6])?, f32s(t, [4, 5])?, bf16s(t, [4, 6])?);
        let (short, flat) = (f32s(t, [3, 6])?, f32s(t, [6])?);
        let scalar = b.upload(&HostTensor::zeros(Vec::new()), DType::F32)?;
        t.refused("cast to f16", b.cast(&x, DType::F16));
        t.refused("cast to integers", b.cast(&x, DType::I32));
        t.refused("reshape to more", b.reshape(&x, [5, 5].into()));
        t.refused("reshape to too many", b.reshape(&x, [usize::MAX, 2].into()));
        t.refused("rows past the end", b.slice_rows(&x, 2..5));
        #[allow(clippy::reversed_empty_ranges)]
        t.refused("rows backwards", b.slice_rows(&x, 3..2));
        t.refused("rows of a scalar", b.slice_rows(&scalar, 0..0));
        t.refused("no rows to join", b.concat_rows(&[]));
        t.refused("rows of two widths", b.concat_rows(&[&x, &narrow]));
        t.refused("rows of two types", b.concat_rows(&[&x, &half]));
        t.refused("vectors below each other", b.concat_rows(&[&flat, &flat]));
        t.refused("no columns to join", b.concat_columns(&[]));
        t.refused("columns of two heights", b.concat_columns(&[&x, &short]));
        t.refused("columns of two types", b.concat_columns(&[&x, &half]));
        t.refused("vectors side by side", b.concat_columns(&[&flat]));
        Ok(())
    }
}

struct Linear;

impl Scenario for Linear {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let b = t.b;
        let w = b.weight(
            LinearParts::dense(vec![HostTensor::zeros([6, 4]), HostTensor::zeros([2, 4])])?,
            Residency::Device,
        )?;
        let (x, narrow, flat) = (f32s(t, [3, 4])?, f32s(t, [3, 3])?, f32s(t, [4])?);
        t.refused("a narrow x", b.linear(&narrow, &w));
        t.refused("a vector", b.linear(&flat, &w));
        t.refused("a narrow x to split", b.linear_split(&narrow, &w, [6, 2]));
        t.refused("widths too small", b.linear_split(&x, &w, [5, 2]));
        t.refused("widths too large", b.linear_split(&x, &w, [8, 1]));
        t.refused("widths that overflow", b.linear_split(&x, &w, [usize::MAX, 9]));
        t.refused("no widths", b.linear_split(&x, &w, []).map(|_: [B::Tensor; 0]| ()));

        let (left, right, short) = (f32s(t, [3, 3])?, f32s(t, [3, 1])?, f32s(t, [2, 1])?);
        let (residual, gate) = (f32s(t, [3, 8])?, f32s(t, [2, 8])?);
        let groups = Groups::of_lengths(&[1, 2]);
        let gated = Some((&gate, &groups));
        t.refused("no inputs", b.linear_gated_add(&[], &w, gated, &residual));
        t.refused("too few columns", b.linear_gated_add(&[&left], &w, gated, &residual));
        t.refused("too many columns", b.linear_gated_add(&[&left, &left], &w, gated, &residual));
        t.refused("inputs of two heights", b.linear_gated_add(&[&left, &short], &w, gated, &residual));
        let halves = bf16s(t, [3, 1])?;
        t.refused("inputs of two types", b.linear_gated_add(&[&left, &halves], &w, gated, &residual));
        let wide = f32s(t, [3, 9])?;
        t.refused("a wide residual", b.linear_gated_add(&[&left, &right], &w, None, &wide));
        let half = bf16s(t, [3, 8])?;
        t.refused("a bf16 residual", b.linear_gated_add(&[&left, &right], &w, None, &half));
        for (label, gate, groups) in [
            ("groups of too few rows", f32s(t, [2, 8])?, Groups::of_lengths(&[1, 1])),
            ("groups of too many rows", f32s(t, [2, 8])?, Groups::of_lengths(&[2, 2])),
            ("a gate short of a group", f32s(t, [1, 8])?, Groups::of_lengths(&[1, 2])),
            ("a narrow gate", f32s(t, [2, 7])?, Groups::of_lengths(&[1, 2])),
            ("a bf16 gate", bf16s(t, [2, 8])?, Groups::of_lengths(&[1, 2])),
        ] {
            t.refused(label, b.linear_gated_add(&[&left, &right], &w, Some((&gate, &groups)), &residual));
        }
        Ok(())
    }
}

struct Norms;

impl Scenario for Norms {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, flat) = (f32s(t, [3, 8])?, f32s(t, [8])?);
        let one = Groups::one(3);
        let (row, short) = (f32s(t, [1, 8])?, f32s(t, [7])?);
        t.refused("rms: a short weight", b.rms_norm(&x, &short, 1e-6));
        t.refused("rms: a weight row", b.rms_norm(&x, &row, 1e-6));
        t.refused("rms: a bf16 weight", b.rms_norm(&x, &bf16s(t, [8])?, 1e-6));
        t.refused("rms: a vector", b.rms_norm(&flat, &flat, 1e-6));
        t.refused("layer: too few rows in groups", b.ada_layer_norm(&x, &row, &row, &Groups::one(2), 1e-6));
        t.refused("layer: no groups", b.ada_layer_norm(&x, &row, &row, &Groups::of_lengths(&[]), 1e-6));
        t.refused("layer: a scale for two", b.ada_layer_norm(&x, &f32s(t, [2, 8])?, &row, &one, 1e-6));
        t.refused("layer: a narrow shift", b.ada_layer_norm(&x, &row, &f32s(t, [1, 7])?, &one, 1e-6));
        t.refused("layer: a bf16 shift", b.ada_layer_norm(&x, &row, &bf16s(t, [1, 8])?, &one, 1e-6));
        t.refused("layer: a vector", b.ada_layer_norm(&flat, &row, &row, &one, 1e-6));

        let rope = |cos: [usize; 2], sin: [usize; 2]| -> Result<RopeTable<B>> {
            let of = |shape: [usize; 2]| b.upload(&HostTensor::zeros(shape), DType::F32);
            Ok(RopeTable { cos: of(cos)?, sin: of(sin)?, pairs: RopePairs::Adjacent })
        };
        let good = rope([3, 2], [3, 2])?;
        let head = f32s(t, [4])?;
        t.refused("rope: an odd head", b.norm_rope(&x, &f32s(t, [1])?, &good, 1e-6));
        t.refused("rope: an empty head", b.norm_rope(&x, &f32s(t, [0])?, &good, 1e-6));
        t.refused("rope: heads that don't fit", b.norm_rope(&x, &f32s(t, [6])?, &good, 1e-6));
        t.refused("rope: a bf16 weight", b.norm_rope(&x, &bf16s(t, [4])?, &good, 1e-6));
        t.refused("rope: a weight matrix", b.norm_rope(&x, &f32s(t, [2, 2])?, &good, 1e-6));
        t.refused("rope: a short table", b.norm_rope(&x, &head, &rope([2, 2], [2, 2])?, 1e-6));
        t.refused("rope: a wide table", b.norm_rope(&x, &head, &rope([3, 4], [3, 4])?, 1e-6));
        t.refused("rope: other sines", b.norm_rope(&x, &head, &rope([3, 2], [3, 1])?, 1e-6));

        let (image, half) = (f32s(t, [2, 2, 8])?, bf16s(t, [8])?);
        let group =
            |x, groups, weight, bias| b.group_norm(x, groups, weight, bias, 1e-6, Some(Activation::Silu));
        t.refused("group: no groups", group(&image, 0, &flat, &flat));
        t.refused("group: uneven groups", group(&image, 3, &flat, &flat));
        t.refused("group: a short weight", group(&image, 4, &short, &flat));
        t.refused("group: a short bias", group(&image, 4, &flat, &short));
        t.refused("group: a bf16 bias", group(&image, 4, &flat, &half));
        t.refused("group: a matrix", group(&x, 4, &flat, &flat));
        Ok(())
    }
}

struct Attention;

impl Scenario for Attention {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let b = t.b;
        let spec = |heads, kv_heads, mask| AttentionSpec { heads, kv_heads, mask };
        let (x, longer, wider) = (f32s(t, [5, 8])?, f32s(t, [6, 8])?, f32s(t, [5, 12])?);
        let (none, half, flat) = (f32s(t, [0, 8])?, bf16s(t, [5, 8])?, f32s(t, [8])?);
        let plain = spec(2, 2, Mask::None);
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
            t.refused(label, b.attention(q, k, v, &plain));
        }
        for (label, heads, kv_heads) in [
            ("no heads", 0, 0),
            ("no key heads", 2, 0),
            ("more key heads than heads", 2, 4),
            ("heads shared unevenly", 4, 3),
            ("columns shared unevenly", 3, 3),
            ("keys for one head of two", 2, 1),
        ] {
            t.refused(label, b.attention(all, all, all, &spec(heads, kv_heads, Mask::None)));
        }
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 3..2;
        for (label, mask) in [
            ("no valid keys", Mask::Causal { valid: 0 }),
            ("too many valid keys", Mask::Causal { valid: 6 }),
            ("isolated rows past the end", Mask::Isolated { rows: 2..6 }),
            ("isolated rows backwards", Mask::Isolated { rows: backwards }),
        ] {
            t.refused(label, b.attention(all, all, all, &spec(2, 2, mask)));
        }
        for mask in [Mask::Causal { valid: 2 }, Mask::Isolated { rows: 0..2 }] {
            let label = format!("more keys than queries, {mask:?}");
            t.refused(label, b.attention(all, &[&longer], &[&longer], &spec(2, 2, mask)));
        }
        Ok(())
    }
}

struct Elementwise;

impl Scenario for Elementwise {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, flat) = (f32s(t, [3, 8])?, f32s(t, [8])?);
        t.refused("swiglu: odd columns", b.swiglu(&f32s(t, [3, 7])?));
        t.refused("swiglu: a vector", b.swiglu(&flat));
        for (kind, y) in
            [("shapes", f32s(t, [8, 3])?), ("ranks", f32s(t, [24])?), ("types", bf16s(t, [3, 8])?)]
        {
            t.refused(format!("add: other {kind}"), b.add(&x, &y));
            t.refused(format!("add_scaled: other {kind}"), b.add_scaled(&x, &y, 2.0));
            t.refused(format!("lerp: other {kind}"), b.lerp(&x, &y, 0.5));
            t.refused(format!("guide: other {kind}"), b.guide(&x, &y, 4.0));
            t.refused(format!("blend_rows: other {kind}"), b.blend_rows(&x, &y, &f32s(t, [3])?));
        }
        t.refused("blend_rows: a long mask", b.blend_rows(&x, &x, &f32s(t, [4])?));
        t.refused("blend_rows: a mask column", b.blend_rows(&x, &x, &f32s(t, [3, 1])?));
        t.refused("blend_rows: a bf16 mask", b.blend_rows(&x, &x, &bf16s(t, [3])?));
        t.refused("blend_rows: vectors", b.blend_rows(&flat, &flat, &flat));
        let scalar = b.upload(&HostTensor::zeros(Shape::default()), DType::F32)?;
        t.refused("affine: a scalar", b.affine(&scalar, &flat, &flat));
        t.refused("affine: a short scale", b.affine(&x, &f32s(t, [7])?, &flat));
        t.refused("affine: a short shift", b.affine(&x, &flat, &f32s(t, [7])?));
        t.refused("affine: a bf16 shift", b.affine(&x, &flat, &bf16s(t, [8])?));
        Ok(())
    }
}

struct Images;

impl Scenario for Images {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let b = t.b;
        t.refused("space_to_depth: odd height", b.space_to_depth(&f32s(t, [3, 2, 4])?));
        t.refused("space_to_depth: odd width", b.space_to_depth(&f32s(t, [2, 3, 4])?));
        t.refused("space_to_depth: a matrix", b.space_to_depth(&f32s(t, [2, 2])?));
        t.refused("depth_to_space: 6 channels", b.depth_to_space(&f32s(t, [2, 2, 6])?));
        t.refused("depth_to_space: a matrix", b.depth_to_space(&f32s(t, [2, 4])?));

        let conv = b.conv(&HostTensor::zeros([5, 3, 3, 3]), None)?;
        let same = ConvGeometry::same(3);
        let x = f32s(t, [4, 6, 3])?;
        t.refused("conv2d: other channels", b.conv2d(&f32s(t, [4, 6, 4])?, &conv, same, None));
        t.refused("conv2d: a matrix", b.conv2d(&f32s(t, [4, 3])?, &conv, same, None));
        t.refused("conv2d: no stride", b.conv2d(&x, &conv, ConvGeometry { stride: 0, ..same }, None));
        let bare = ConvGeometry { padding: [0; 4], ..same };
        t.refused("conv2d: too low", b.conv2d(&f32s(t, [2, 6, 3])?, &conv, bare, None));
        t.refused("conv2d: too narrow", b.conv2d(&f32s(t, [6, 2, 3])?, &conv, bare, None));
        let endless = ConvGeometry { padding: [usize::MAX, 1, 1, 1], ..same };
        t.refused("conv2d: endless padding", b.conv2d(&x, &conv, endless, None));
        t.refused(
            "conv2d: a residual of another size",
            b.conv2d(&x, &conv, bare, Some(&f32s(t, [4, 6, 5])?)),
        );
        t.refused(
            "conv2d: a residual of other channels",
            b.conv2d(&x, &conv, same, Some(&f32s(t, [4, 6, 3])?)),
        );
        t.refused("conv2d: a bf16 residual", b.conv2d(&x, &conv, same, Some(&bf16s(t, [4, 6, 5])?)));
        Ok(())
    }
}
