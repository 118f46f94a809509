//! Gradients and optimizer steps.

use kiln_ops::training::{
    AdamWStep, AdamWTensor, BLOCK, CodeBook, LowRank, ProdigyStep, ProdigyTensor, Quantized8,
    QuantizedAdamWTensor,
};
use kiln_ops::{AttentionMask, AttentionSpec, Result, RopeLayout, RopeTable, RowGroups, TrainingBackend};
use kiln_tensor::packed::{Format, PackedTensor};
use kiln_tensor::{DType, HostLinear, HostTensor, Rotation};

use super::fp8::{fp8_layer, tolerance as fp8_tolerance};
use super::list::{CaseList, ODD};
use super::nvfp4;
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario, load};
use crate::random::{HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let mut sizes: Vec<[usize; 3]> = ODD.map(|n| [5, n, 19]).to_vec();
    sizes.extend([[1, 33, 65], [130, 31, 401], [67, 129, 16], [0, 3, 4]]);
    list.add("training/products", Products { sizes: sizes.clone() });
    list.add("training/products_full_size", Products { sizes: vec![[257, 1024, 16], [257, 16, 3072]] });
    list.add("training/linear_backward", LinearBackward { sizes });
    list.add("training/linear_backward_int8", Int8Backward);
    list.add("training/linear_backward_fp8/side_by_side", Fp8Backward);
    list.add("training/linear_backward_nvfp4/dequantized", Nvfp4Backward);
    let odd = LowRankUpdates { rows: 23, cols: 37, widths: [16, 16, 31], ranks: [5, 3, 4] };
    list.add("training/linear_low_rank", odd);
    let whole_tiles = LowRankUpdates { rows: 300, cols: 256, widths: [128, 256, 384], ranks: [16, 7, 20] };
    list.add("training/linear_low_rank_whole_tiles", whole_tiles);
    list.add_once("training/row_norms", RowNorms);
    list.add("training/mix_rows", MixRows);
    list.add("training/norms", Norms);
    list.add("training/norm_rope", NormRope);
    list.add("training/elementwise", Elementwise);
    for (name, mask) in [
        ("plain", AttentionMask::None),
        ("causal", AttentionMask::Causal { valid: 100 }),
        ("isolated", AttentionMask::Isolated { rows: 3..70 }),
    ] {
        let sizes = vec![[133, 2, 2, 24], [131, 4, 2, 16]];
        list.add(&format!("training/attention_{name}"), Attention { mask, sizes });
    }
    let wide = Attention { mask: AttentionMask::None, sizes: vec![[150, 2, 2, 128], [150, 2, 2, 64]] };
    list.add("training/attention_wide", wide);
    let full = Attention { mask: AttentionMask::None, sizes: vec![[400, 2, 2, 128], [140, 70, 70, 128]] };
    list.add("training/attention_full_size", full);
    list.add_once("training/optimizers", Optimizers);
    list.add_once("training/adamw_8bit_small_moments", SmallMoments);
    list.add_once("training/invalid_arguments", Invalid);
}

/// `[rows, out, in]`.
struct Products {
    sizes: Vec<[usize; 3]>,
}

impl Scenario for Products {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for &[rows, out, cols] in &self.sizes {
            let (x, dy) = (t.activation(NORMAL, [rows, cols])?, t.activation(NORMAL, [rows, out])?);
            let w = t.parameter(NORMAL, [out, cols])?;
            let (add_y, add_x) = (t.activation(NORMAL, [rows, out])?, t.activation(NORMAL, [rows, cols])?);
            let add_w = t.parameter(NORMAL, [out, cols])?;
            let label = format!("{rows}x{out}x{cols}");
            let sum = |terms: usize| Tolerance::sum(terms);
            let y = b.matmul_nt(&x, &w, 0.5, None)?;
            t.record(format!("nt {label}"), &y, sum(cols).rounded_inside(t.dtype))?;
            let y = b.matmul_nt(&x, &w, -2.0, Some(&add_y))?;
            t.record(format!("nt, added, {label}"), &y, sum(cols).rounded_inside(t.dtype))?;
            let dx = b.matmul_nn(&dy, &w, 0.5, Some(&add_x))?;
            t.record(format!("nn {label}"), &dx, sum(out).rounded_inside(t.dtype))?;
            let dw = b.matmul_tn(&dy, &x, 0.5, Some(&add_w))?;
            t.record_as(format!("tn {label}"), &dw, DType::F32, sum(rows))?;
        }
        Ok(())
    }
}

struct LinearBackward {
    sizes: Vec<[usize; 3]>,
}

impl Scenario for LinearBackward {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for &[rows, out, cols] in &self.sizes {
            for stored in [DType::F32, DType::BF16, DType::F16] {
                // Two matrices and two gradients side by side, but for a single output.
                let splits = if out > 1 { vec![out / 2, out - out / 2] } else { vec![1] };
                let matrices = splits.iter().map(|&n| t.stored(NORMAL, [n, cols], stored));
                let matrices = matrices.collect::<Result<Vec<_>>>()?;
                let w = load(b, HostLinear::dense(matrices)?)?;
                let dys = splits.iter().rev().map(|&n| t.activation(NORMAL, [rows, n]));
                let dys = dys.collect::<Result<Vec<_>>>()?;
                let add = t.activation(NORMAL, [rows, cols])?;
                let dx = b.linear_backward(&dys.iter().collect::<Vec<_>>(), &w, Some(&add))?;
                let tolerance = Tolerance::sum(out).rounded_inside(t.dtype);
                t.record(format!("{rows}x{out}x{cols}, {stored}"), &dx, tolerance)?;
            }
        }
        let host = t.draw(NORMAL, [64, 64]).to_f32()?.into_owned();
        let bytes: Vec<u8> = host
            .chunks(32)
            .flat_map(|block| {
                let largest = block.iter().fold(0f32, |m, v| m.max(v.abs()));
                let scale = kiln_tensor::f16::from_f32(largest / 127.0);
                let codes = block.iter().map(move |v| (v / scale.to_f32()).round() as i8 as u8);
                scale.to_le_bytes().into_iter().chain(codes).collect::<Vec<u8>>()
            })
            .collect();
        let packed = PackedTensor::new(Format::Q8_0, [64, 64], bytes.into())?;
        let w = load(b, HostLinear::packed(vec![packed])?)?;
        let dy = t.activation(NORMAL, [9, 64])?;
        let dx = b.linear_backward(&[&dy], &w, None)?;
        t.record("Q8_0", &dx, Tolerance::sum(64).rounded_inside(t.dtype))
    }
}

/// The gradient of an int8 matmul is that of the dequantized weight.
struct Int8Backward;

impl Scenario for Int8Backward {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for [rows, out, cols] in
            [[7, 33, 65], [130, 64, 32], [3, 81, 203], [1, 5, 3], [9, 40, 192], [5, 33, 768]]
        {
            let integers = t.bytes(out * cols);
            let integers = HostTensor::new(DType::I8, [out, cols], integers.into())?;
            let scales = t.draw(NORMAL.scaled(1e-3).shifted(1e-2), [out]);
            let rotation = Rotation::for_width(cols);
            let w = load(b, HostLinear::int8(vec![integers], vec![scales], rotation)?)?;
            let dy = t.activation(HEAVY_TAILED, [rows, out])?;
            let dx = b.linear_backward(&[&dy], &w, None)?;
            let tolerance = Tolerance::sum(out).rounded_inside(t.dtype);
            let label = format!("{rows}x{out}x{cols}");
            t.record(label.clone(), &dx, tolerance)?;
            let norms = b.row_norms(&w, &[])?;
            t.record_as(format!("norms, {label}"), &norms, DType::F32, Tolerance::sum(cols))?;
        }
        Ok(())
    }
}

/// The gradient of an fp8 matmul is an fp8 matmul. `[rows, out of each gradient, in]`.
struct Fp8Backward;

impl Scenario for Fp8Backward {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let cases: [(usize, &[usize], usize); 6] = [
            (130, &[48, 64, 16], 96),
            (17, &[128, 256, 64, 64], 272),
            (33, &[5, 60], 129),
            (1, &[3], 7),
            (9, &[16, 8, 40, 24, 8], 64),
            (0, &[16], 32),
        ];
        for (rows, widths, cols) in cases {
            let out = widths.iter().sum();
            let w = load(b, fp8_layer(t, [out, cols], 1, DType::BF16)?)?;
            let dys = widths.iter().map(|&n| t.activation(HEAVY_TAILED, [rows, n]));
            let dys = dys.collect::<Result<Vec<_>>>()?;
            let add = t.activation(NORMAL, [rows, cols])?;
            for add in [None, Some(&add)] {
                let dx = b.linear_backward(&dys.iter().collect::<Vec<_>>(), &w, add)?;
                let label = format!("{rows}x{widths:?}x{cols}, added: {}", add.is_some());
                t.record(label, &dx, fp8_tolerance(out, t.dtype))?;
            }
        }
        Ok(())
    }
}

/// The gradient of an nvfp4 matmul is that of the dequantized weight.
struct Nvfp4Backward;

impl Scenario for Nvfp4Backward {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for [rows, out, cols] in [[7, 33, 48], [130, 64, 128], [1, 5, 272]] {
            let w = load(b, nvfp4::layer(t, [out, cols], 2, nvfp4::COMFYUI)?)?;
            let dy = t.activation(NORMAL, [rows, out])?;
            let dx = b.linear_backward(&[&dy], &w, None)?;
            t.record(format!("{rows}x{out}x{cols}"), &dx, Tolerance::sum(out).rounded_inside(t.dtype))?;
        }
        Ok(())
    }
}

/// Updates of a layer with three outputs: one of all, or one of the first and one of the others.
struct LowRankUpdates {
    rows: usize,
    cols: usize,
    widths: [usize; 3],
    /// Of the one update, and of the two.
    ranks: [usize; 3],
}

impl Scenario for LowRankUpdates {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let LowRankUpdates { rows, cols, widths, ranks } = *self;
        let out: usize = widths.iter().sum();
        let stored = t.stored(NORMAL, [out, cols], DType::BF16)?;
        let w = load(b, HostLinear::dense(vec![stored])?)?;
        let (x, other) = (t.activation(NORMAL, [rows, cols])?, t.activation(NORMAL, [rows, cols])?);
        let dys = [
            t.activation(NORMAL, [rows, widths[0]])?,
            t.activation(NORMAL, [rows, widths[1]])?,
            t.activation(NORMAL, [rows, widths[2]])?,
        ];
        let all = vec![(0, out, ranks[0])];
        let both = vec![(0, widths[0], ranks[1]), (widths[0], out - widths[0], ranks[2])];
        for updates in [all, both] {
            let (mut factors, mut earlier) = (Vec::new(), Vec::new());
            for &(_, n, rank) in &updates {
                factors.push([t.parameter(NORMAL, [rank, cols])?, t.parameter(NORMAL, [n, rank])?]);
                earlier.push([t.parameter(NORMAL, [rank, cols])?, t.parameter(NORMAL, [n, rank])?]);
            }
            let low_rank: Vec<LowRank<'_, B::Tensor>> = updates
                .iter()
                .zip(&factors)
                .map(|(&(first, ..), [down, up])| {
                    // The second has its own input.
                    let input = (first > 0).then_some(&other);
                    LowRank { first, down, up, scale: 0.25, input }
                })
                .collect();
            let output = b.linear_low_rank(&x, &w, &low_rank, &widths)?;
            let label = format!("{} updates", updates.len());
            let dtype = t.dtype;
            let tolerance =
                |terms| Tolerance::sum(terms).conditioned(4.0).rounded_inside(dtype).rounded_inside(dtype);
            for y in &output.ys {
                t.record(format!("y, {label}"), y, tolerance(cols))?;
            }
            let refs = [&dys[0], &dys[1], &dys[2]];
            let none = vec![None; updates.len()];
            let added: Vec<_> = earlier.iter().map(|[down, up]| Some([down, up])).collect();
            for add in [none, added] {
                let label = format!("{label}, added: {}", add[0].is_some());
                for gradient in b.low_rank_backward(&refs, &x, &low_rank, &output.inner, &add)? {
                    t.record_as(format!("up, {label}"), &gradient.up, DType::F32, tolerance(rows))?;
                    t.record_as(format!("down, {label}"), &gradient.down, DType::F32, tolerance(rows))?;
                    t.record(format!("inner, {label}"), &gradient.inner, tolerance(out))?;
                }
            }
        }
        Ok(())
    }
}

struct RowNorms;

impl Scenario for RowNorms {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for [out, cols] in [[33, 65], [50, 7], [1, 129]] {
            let stored = t.stored(NORMAL, [out, cols], DType::BF16)?;
            let w = load(b, HostLinear::dense(vec![stored])?)?;
            let (down, up) = (t.parameter(NORMAL, [3, cols])?, t.parameter(NORMAL, [out / 2 + 1, 3])?);
            let plain = b.row_norms(&w, &[])?;
            t.record(format!("{out}x{cols}"), &plain, Tolerance::sum(cols))?;
            let update = LowRank { first: out - out / 2 - 1, down: &down, up: &up, scale: 0.5, input: None };
            let updated = b.row_norms(&w, &[update])?;
            t.record(format!("{out}x{cols}, updated"), &updated, Tolerance::sum(cols).conditioned(4.0))?;
        }
        Ok(())
    }
}

struct MixRows;

impl Scenario for MixRows {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for [blocks, out, cols, dim] in [[5, 3, 4, 17], [9, 16, 8, 33], [1, 1, 7, 65], [3, 9, 1, 2]] {
            let a = t.parameter(NORMAL, [out, cols])?;
            let x = t.activation(NORMAL, [blocks * cols, dim])?;
            let dy = t.activation(NORMAL, [blocks * out, dim])?;
            let label = format!("{blocks} blocks, {out}x{cols}, {dim}");
            let y = b.mix_rows(&x, &a, false)?;
            t.record(format!("y, {label}"), &y, Tolerance::sum(cols).rounded_inside(t.dtype))?;
            let dx = b.mix_rows(&dy, &a, true)?;
            t.record(format!("dx, {label}"), &dx, Tolerance::sum(out).rounded_inside(t.dtype))?;
            let add = t.parameter(NORMAL, [out, cols])?;
            let da = b.mix_rows_gradient(&dy, &x, [out, cols], 0.5, Some(&add))?;
            t.record_as(format!("da, {label}"), &da, DType::F32, Tolerance::sum(blocks * dim))?;
        }
        Ok(())
    }
}

struct Norms;

impl Scenario for Norms {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let groups = RowGroups::from_lengths(&[1, 4, 2]);
        for dim in ODD {
            let (dy, x) = (t.activation(NORMAL, [7, dim])?, t.activation(HEAVY_TAILED, [7, dim])?);
            let scale = t.parameter(NORMAL, [3, dim])?;
            let add = t.activation(NORMAL, [7, dim])?;
            let dx = b.ada_layer_norm_backward(&dy, &x, &scale, &groups, 1e-2, Some(&add))?;
            let tolerance = Tolerance::sum(dim).conditioned(8.0).rounded(t.dtype);
            t.record(format!("layer norm, {dim}"), &dx, tolerance)?;
        }
        Ok(())
    }
}

struct NormRope;

impl Scenario for NormRope {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for pairs in [RopeLayout::Interleaved, RopeLayout::HalfSplit] {
            for [tokens, heads, dim] in [[5, 3, 2], [3, 2, 34], [7, 1, 128]] {
                let (dy, x) = (
                    t.activation(NORMAL, [tokens, heads * dim])?,
                    t.activation(NORMAL, [tokens, heads * dim])?,
                );
                let weight = t.parameter(NORMAL, [dim])?;
                let rope: RopeTable<B::Tensor> = t.rope(tokens, dim / 2, pairs)?;
                for weight in [Some(&weight), None] {
                    let dx = b.norm_rope_backward(&dy, &x, weight, &rope, 1e-6)?;
                    let label = format!("{tokens}x{heads}x{dim}, {pairs:?}, weight {}", weight.is_some());
                    t.record(label, &dx, Tolerance::sum(dim).conditioned(16.0).rounded(t.dtype))?;
                }
            }
        }
        Ok(())
    }
}

struct Elementwise;

impl Scenario for Elementwise {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for n in ODD {
            let (x, dy) = (t.activation(NORMAL.scaled(3.0), [5, 2 * n])?, t.activation(NORMAL, [5, n])?);
            let dx = b.swiglu_backward(&dy, &x)?;
            t.record(format!("swiglu, {n}"), &dx, Tolerance::ELEMENTWISE.conditioned(4.0).rounded(t.dtype))?;
            let gate = t.parameter(NORMAL, [2, n])?;
            let gated = b.gate_rows(&dy, &gate, &RowGroups::from_lengths(&[3, 2]))?;
            t.record(format!("gate, {n}"), &gated, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
            let residual = t.activation(NORMAL, [5, n])?;
            let sum = b.gated_add(&dy, &gate, &RowGroups::from_lengths(&[3, 2]), &residual)?;
            t.record(format!("gated sum, {n}"), &sum, Tolerance::sum(2).rounded_inside(t.dtype))?;
            let (left, d_both) = (t.activation(NORMAL, [5, 17])?, t.activation(NORMAL, [5, 17 + n])?);
            let both = b.concat_swiglu(&left, &x)?;
            t.record(format!("columns and swiglu, {n}"), &both, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
            for (name, gradient) in ["left", "swiglu"].into_iter().zip(b.concat_swiglu_backward(&d_both, &x)?)
            {
                let tolerance = Tolerance::ELEMENTWISE.conditioned(4.0).rounded(t.dtype);
                t.record(format!("gradient of {name}, {n}"), &gradient, tolerance)?;
            }
            let dropped = b.dropout(&dy, 0.25, 99)?;
            t.record(format!("dropout, {n}"), &dropped, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
            let y = t.activation(NORMAL, [5, n])?;
            let add = t.parameter(NORMAL, [n])?;
            let dots = b.column_dot(&dy, &y, Some(&add))?;
            t.record_as(format!("column dot, {n}"), &dots, DType::F32, Tolerance::sum(8).conditioned(4.0))?;
            let parts = b.split_columns(&x, &[n - 1, n + 1])?;
            for part in &parts {
                t.record(format!("split, {n}"), part, Tolerance::EXACT)?;
            }
            let [loss, dx] = b.squared_error(&dy, &y, 0.01)?;
            t.record_as(format!("loss, {n}"), &loss, DType::F32, Tolerance::sum(5 * n))?;
            t.record(format!("gradient of the loss, {n}"), &dx, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
        }
        let many =
            [t.parameter(NORMAL, [3, 1000])?, t.parameter(NORMAL, [20001])?, t.parameter(NORMAL, [1])?];
        let sum = b.sum_squares(&[&many[0], &many[1], &many[2]])?;
        t.record_as("sum of squares", &sum, DType::F32, Tolerance::sum(2300))
    }
}

struct Attention {
    mask: AttentionMask,
    /// Rows, heads, key heads, head width.
    sizes: Vec<[usize; 4]>,
}

impl Scenario for Attention {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        for &[rows, heads, kv_heads, dim] in &self.sizes {
            let spec = AttentionSpec::new(heads, kv_heads, self.mask.clone());
            let q =
                [t.activation(NORMAL, [41, heads * dim])?, t.activation(NORMAL, [rows - 41, heads * dim])?];
            let (k, v) = (
                t.activation(NORMAL, [rows, kv_heads * dim])?,
                t.activation(NORMAL, [rows, kv_heads * dim])?,
            );
            let dout =
                [t.activation(NORMAL, [50, heads * dim])?, t.activation(NORMAL, [rows - 50, heads * dim])?];
            let q = [&q[0], &q[1]];
            let [out, lse] = b.attention_lse(&q, &[&k], &[&v], &spec)?;
            let tolerance = Tolerance::sum(rows).conditioned(8.0);
            let label = format!("{rows}x{heads}x{dim}");
            t.record(format!("out, {label}"), &out, tolerance.rounded_inside(t.dtype))?;
            t.record_as(format!("lse, {label}"), &lse, DType::F32, tolerance)?;
            let gradients =
                b.attention_backward(&[&dout[0], &dout[1]], &q, &[&k], &[&v], &out, &lse, &spec)?;
            // The rounded output counts in the gradient of every score.
            let tolerance = tolerance.rounded_inside(t.dtype).rounded_inside(t.dtype).conditioned(2.0);
            let [dq, dk, dv] = gradients;
            // Under a causal mask the first query has one key: its gradient is zero but for rounding.
            let dq = b.slice_rows(&dq, 1..rows)?;
            for (name, gradient) in [("dq", dq), ("dk", dk), ("dv", dv)] {
                t.record(format!("{name}, {label}"), &gradient, tolerance)?;
            }
        }
        Ok(())
    }
}

struct Optimizers;

impl Scenario for Optimizers {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let step =
            AdamWStep { lr: 0.05, betas: [0.9, 0.99], eps: 1e-3, decay: 0.1, step: 3, grad_scale: 0.5 };
        let near = Tolerance::ELEMENTWISE.conditioned(8.0);
        for n in [1, 33, BLOCK, 2 * BLOCK + 77, 20003] {
            let (mut param, grad) = (t.parameter(NORMAL, [n])?, t.parameter(NORMAL, [n])?);
            let square = t.draw(NORMAL, [n]).to_f32()?.iter().map(|v| v * v).collect();
            let square = b.upload(&HostTensor::from_f32([n], square)?, DType::F32)?;
            let (mut m, mut v) = (t.parameter(NORMAL, [n])?, square.clone());
            b.adamw(&mut [AdamWTensor { param: &mut param, grad: &grad, m: &mut m, v: &mut v }], &step)?;
            for (name, tensor) in [("param", &param), ("m", &m), ("v", &v)] {
                t.record(format!("adamw, {name}, {n}"), tensor, near)?;
            }
            let scales = t.draw(NORMAL.scaled(0.1).shifted(1.0), [n.div_ceil(BLOCK)]).to_f32()?.into_owned();
            let mut m8 = b.upload_quantized(&Quantized8 { codes: t.bytes(n), scales: scales.clone() })?;
            let mut v8 = b.upload_quantized(&Quantized8 { codes: t.bytes(n), scales })?;
            let tensor = QuantizedAdamWTensor { param: &mut param, grad: &grad, m: &mut m8, v: &mut v8 };
            b.adamw_8bit(&mut [tensor], &step)?;
            t.record(format!("adamw_8bit, param, {n}"), &param, near)?;
            // A value halfway between two codes may get either.
            let coarse = Tolerance { relative: 0.3, slack: 0.05, l2: 0.01 };
            for (name, book, state) in [("m", CodeBook::signed(), &m8), ("v", CodeBook::unsigned(), &v8)] {
                let host = b.download_quantized(state)?;
                let value = |(i, code): (usize, &u8)| book.value(*code) * host.scales[i / BLOCK];
                let values = host.codes.iter().enumerate().map(value).collect();
                let values = b.upload(&HostTensor::from_f32([n], values)?, DType::F32)?;
                t.record(format!("adamw_8bit, {name}, {n}"), &values, coarse)?;
            }
            let (start, mut s) = (t.parameter(NORMAL, [n])?, t.parameter(NORMAL, [n])?);
            let mut v = square;
            let mut tensors = [ProdigyTensor {
                param: &mut param,
                grad: &grad,
                start: &start,
                m: &mut m,
                v: &mut v,
                s: &mut s,
            }];
            let first = ProdigyStep { betas: [0.9, 0.99, 0.995], d: 0.3, s_factor: 0.2, grad_scale: 0.5 };
            let sums = b.prodigy_moments(&mut tensors, &first)?;
            b.prodigy_update(&mut tensors, 0.02, 0.1, 1e-3)?;
            t.record(format!("prodigy, sums, {n}"), &sums, Tolerance::sum(n).conditioned(8.0))?;
            for (name, tensor) in [("param", &param), ("m", &m), ("v", &v), ("s", &s)] {
                t.record(format!("prodigy, {name}, {n}"), tensor, near)?;
            }
        }
        Ok(())
    }
}

/// Gradients whose magnitudes span five decades in a block: no second moment may be lost, and no zero may become a number.
struct SmallMoments;

impl Scenario for SmallMoments {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let n = 2 * BLOCK + 77;
        let mut param = b.upload(&HostTensor::zeros([n]), DType::F32)?;
        let zeros = |book: &CodeBook| b.upload_quantized(&Quantized8::zeros(n, book.code(0.0)));
        let (mut m, mut v) = (zeros(CodeBook::signed())?, zeros(CodeBook::unsigned())?);
        for step in 1..=3 {
            let scale = |i: usize| {
                if i.is_multiple_of(7) { 0.0 } else { 10f32.powf(-((i * 37 % 101) as f32) / 20.0) }
            };
            let draws = t.draw(NORMAL, [n]);
            let grad = draws.to_f32()?.iter().enumerate().map(|(i, v)| scale(i) * (2.0 + v.abs())).collect();
            let grad = b.upload(&HostTensor::from_f32([n], grad)?, DType::F32)?;
            let step =
                AdamWStep { lr: 0.05, betas: [0.9, 0.999], eps: 1e-8, decay: 0.0, step, grad_scale: 1.0 };
            let tensor = QuantizedAdamWTensor { param: &mut param, grad: &grad, m: &mut m, v: &mut v };
            b.adamw_8bit(&mut [tensor], &step)?;
        }
        // A value halfway between two codes may get either.
        t.record("param", &param, Tolerance { relative: 0.3, slack: 0.05, l2: 0.02 })
    }
}

struct Invalid;

impl Scenario for Invalid {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let zeros = |shape: &[usize]| b.upload(&HostTensor::zeros(shape.to_vec()), DType::F32);
        let half = b.upload(&HostTensor::zeros([3, 4]), DType::BF16)?;
        let (x, w, flat) = (zeros(&[3, 4])?, zeros(&[5, 4])?, zeros(&[4])?);
        let weight = load(b, HostLinear::dense(vec![HostTensor::zeros([5, 4])])?)?;
        t.reject("split: other widths", b.split_columns(&x, &[1, 2]));
        t.reject("linear: narrow dys", b.linear_backward(&[&x], &weight, None));
        t.reject("linear: no dys", b.linear_backward(&[], &weight, None));
        let dy = zeros(&[3, 5])?;
        t.reject("linear: another add", b.linear_backward(&[&dy], &weight, Some(&dy)));
        t.reject("nt: another depth", b.matmul_nt(&dy, &w, 1.0, None));
        t.reject("nt: a bf16 weight", b.matmul_nt(&x, &half, 1.0, None));
        t.reject("nt: a bf16 add", b.matmul_nt(&x, &x, 1.0, Some(&half)));
        t.reject("nn: another depth", b.matmul_nn(&x, &w, 1.0, None));
        t.reject("tn: other rows", b.matmul_tn(&w, &x, 1.0, None));
        t.reject("tn: other types", b.matmul_tn(&x, &half, 1.0, None));
        let far = LowRank { first: 3, down: &x, up: &zeros(&[3, 3])?, scale: 1.0, input: None };
        t.reject("norms: rows past the end", b.row_norms(&weight, &[far]));
        t.reject("mix: rows that don't fit", b.mix_rows(&x, &zeros(&[2, 2])?, false));
        t.reject("mix: other blocks", b.mix_rows_gradient(&x, &x, [3, 1], 1.0, None));
        t.reject("column dot: other shapes", b.column_dot(&x, &w, None));
        t.reject("dropout: all of it", b.dropout(&x, 1.0, 0));
        t.reject("dropout: NaN", b.dropout(&x, f32::NAN, 0));
        let groups = RowGroups::single(2);
        t.reject("gate: too few rows", b.gate_rows(&x, &zeros(&[1, 4])?, &groups));
        t.reject(
            "layer norm: too few rows",
            b.ada_layer_norm_backward(&x, &x, &zeros(&[1, 4])?, &groups, 1e-6, None),
        );
        t.reject("swiglu: a wide dy", b.swiglu_backward(&x, &x));
        t.reject("loss: other shapes", b.squared_error(&x, &w, 1.0));
        t.reject("sum of squares: bf16", b.sum_squares(&[&half]));
        let spec = AttentionSpec::new(2, 2, AttentionMask::None);
        let lse = zeros(&[3, 2])?;
        t.reject(
            "attention: a narrow dout",
            b.attention_backward(&[&dy], &[&x], &[&x], &[&x], &x, &lse, &spec),
        );
        t.reject(
            "attention: a short lse",
            b.attention_backward(&[&x], &[&x], &[&x], &[&x], &x, &zeros(&[2, 2])?, &spec),
        );
        let state = Quantized8 { codes: vec![0; BLOCK + 1], scales: vec![0.0] };
        t.reject("state: too few scales", b.upload_quantized(&state));
        let step = AdamWStep { lr: 0.1, betas: [0.9, 0.99], eps: 1e-8, decay: 0.0, step: 1, grad_scale: 1.0 };
        let (mut param, mut m, mut v) = (flat.clone(), flat.clone(), zeros(&[5])?);
        let tensor = AdamWTensor { param: &mut param, grad: &flat, m: &mut m, v: &mut v };
        t.reject("adamw: a long moment", b.adamw(&mut [tensor], &step));
        Ok(())
    }
}
