//! Linear layers with dense weights and LoRA deltas: plain, split, gated, fused with norms or SwiGLU.

use kiln_ops::{Backend, Result, RowGroups, TrainingBackend};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta};

use super::list::{CaseList, ODD};
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario, load};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let base = Linear::default();
    list.add(
        "linear/matrix_vector",
        Linear { sizes: vec![[1, 129, 65], [1, 64, 16], [1, 1, 1]], ..base.clone() },
    );
    let row_edges = (1..=17).chain([23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65]);
    list.add("linear/row_edges", Linear { sizes: row_edges.map(|n| [n, 65, 33]).collect(), ..base.clone() });
    list.add("linear/input_tails", Linear { sizes: ODD.map(|n| [5, n, 18]).into(), ..base.clone() });
    list.add("linear/output_tails", Linear { sizes: ODD.map(|n| [5, 34, n]).into(), ..base.clone() });
    list.add("linear/long_sums", Linear { sizes: vec![[3, 4099, 17]], ..base.clone() });
    list.add("linear/no_rows", Linear { sizes: vec![[0, 8, 16]], ..base.clone() });
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let stored = Linear { stored: dtype, sizes: awkward(), ..base.clone() };
        list.add(&format!("linear/weight_{dtype}"), stored.clone());
        list.add(&format!("linear/bias_{dtype}"), Linear { bias: true, ..stored.clone() });
        list.add(&format!("linear/slabs_{dtype}"), Linear { slabs: 3, bias: true, ..stored.clone() });
        list.add(
            &format!("linear/deltas_{dtype}"),
            Linear { slabs: 2, ranks: &[1, 4, 17], bias: true, ..stored },
        );
        list.add(&format!("linear/other_deltas_{dtype}"), ReplacedDeltas(dtype));
        list.add(&format!("linear/unaligned_{dtype}"), Unaligned(dtype));
    }
    list.add("linear/heavy_tailed", Linear { values: HEAVY_TAILED, sizes: awkward(), ..base.clone() });
    list.add("linear/tiny", Linear { values: NORMAL.scaled(1e-18), sizes: awkward(), ..base.clone() });
    list.add("linear/huge", Linear { values: NORMAL.scaled(1e12), sizes: awkward(), ..base.clone() });
    list.add("linear/full_size", Linear { sizes: vec![[49, 3072, 3072]], ..base });
    list.add("linear_split/odd_widths", Split);
    for stored in [DType::F32, DType::BF16, DType::F16] {
        list.add(&format!("ada_linear_split/odd_{stored}"), AdaSplit { stored, dim: 65, ranks: &[] });
        list.add(&format!("ada_linear_split/whole_{stored}"), AdaSplit { stored, dim: 128, ranks: &[] });
        list.add(&format!("ada_linear_split/deltas_{stored}"), AdaSplit { stored, dim: 64, ranks: &[1, 4] });
    }
    let base =
        GatedAdd { stored: DType::BF16, inputs: &[65], groups: &[7], out: 37, bias: true, ranks: &[3] };
    for stored in [DType::F32, DType::BF16, DType::F16] {
        list.add(&format!("linear_gated_add/one_input_{stored}"), GatedAdd { stored, ..base });
        let two = GatedAdd { stored, inputs: &[33, 96], groups: &[1, 17, 2], ..base };
        list.add(&format!("linear_gated_add/side_by_side_{stored}"), two);
        // Whole vectors and one group without deltas: a product may do all of it.
        let whole = GatedAdd { stored, inputs: &[72], groups: &[133], out: 136, ranks: &[], ..base };
        list.add(&format!("linear_gated_add/whole_{stored}"), whole);
        let two = GatedAdd { inputs: &[128, 72], bias: false, ..whole };
        list.add(&format!("linear_gated_add/whole_side_by_side_{stored}"), two);
    }
    list.add("linear_gated_add/three_inputs", GatedAdd { inputs: &[1, 64, 31], groups: &[16], ..base });
    list.add("linear_gated_add/no_gate", GatedAdd { inputs: &[48, 17], groups: &[], ..base });
    let whole = GatedAdd { inputs: &[64, 64], groups: &[], out: 40, bias: false, ranks: &[], ..base };
    list.add("linear_gated_add/whole_no_gate", whole);
    list.add("linear_gated_add/whole_odd_left", GatedAdd { inputs: &[72, 64], groups: &[70], ..whole });
    list.add("linear_gated_add/no_rows", GatedAdd { groups: &[0], ..whole });
    let full = GatedAdd { inputs: &[512, 1536], groups: &[64, 32], out: 512, ..base };
    list.add("linear_gated_add/full_size", full);
    let base = Swiglu { stored: DType::BF16, sizes: &[[19, 64, 64]], bias: false, ranks: &[] };
    list.add("linear_swiglu/with_bias", Swiglu { bias: true, ..base });
    list.add("linear_swiglu/with_deltas", Swiglu { ranks: &[1, 3], ..base });
    for stored in [DType::F32, DType::BF16, DType::F16] {
        let odd = Swiglu { stored, sizes: &[[1, 64, 48], [3, 17, 5], [7, 33, 95]], ..base };
        list.add(&format!("linear_swiglu/odd_{stored}"), odd);
        list.add(
            &format!("linear_swiglu/whole_{stored}"),
            Swiglu { sizes: &[[5, 64, 8], [300, 160, 264]], ..odd },
        );
        list.add(&format!("ada_linear_swiglu/odd_{stored}"), AdaSwiglu { stored, dim: 65, ranks: &[] });
        list.add(&format!("ada_linear_swiglu/whole_{stored}"), AdaSwiglu { stored, dim: 128, ranks: &[] });
        list.add(
            &format!("ada_linear_swiglu/deltas_{stored}"),
            AdaSwiglu { stored, dim: 64, ranks: &[1, 4] },
        );
    }
    list.add("linear_swiglu/no_rows", Swiglu { sizes: &[[0, 64, 64]], ..base });
    list.add("linear_swiglu/full_size", Swiglu { sizes: &[[96, 512, 1536]], ..base });
    list.add_once("invalid_arguments/linear", Invalid);
}

/// `[rows, in, out]`.
fn awkward() -> Vec<[usize; 3]> {
    vec![[1, 7, 3], [3, 15, 5], [2, 33, 17], [17, 31, 63], [33, 129, 65], [16, 64, 48], [7, 100, 129]]
}

/// Operands are exact in bf16 only if the weight is stored as bf16 and there is no `intermediate`.
fn tolerance(dtype: DType, stored: DType, terms: usize, intermediate: bool) -> Tolerance {
    match stored {
        DType::BF16 if !intermediate => Tolerance::sum(terms).rounded(dtype),
        _ => Tolerance::sum(terms).rounded_inside(dtype),
    }
}

#[derive(Clone)]
struct Linear {
    /// `[rows, in, out]` each.
    sizes: Vec<[usize; 3]>,
    values: Distribution,
    stored: DType,
    slabs: usize,
    bias: bool,
    /// Ranks of the LoRA deltas, which change different, overlapping rows.
    ranks: &'static [usize],
}

impl Default for Linear {
    fn default() -> Self {
        Linear { sizes: vec![], values: NORMAL, stored: DType::BF16, slabs: 1, bias: false, ranks: &[] }
    }
}

impl Scenario for Linear {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &[rows, cols, out] in &self.sizes {
            let x = t.activation(self.values, [rows, cols])?;
            let mut layer = HostLinear::dense(slabs(t, self.stored, cut(out, self.slabs), cols)?)?;
            if self.bias {
                layer = layer.with_bias(t.stored(NORMAL, [out], self.stored)?)?;
            }
            let layer = layer.with_deltas(deltas(t, self.ranks, self.stored, [out, cols])?)?;
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            let tolerance = tolerance(t.dtype, self.stored, cols, !self.ranks.is_empty());
            t.record(format!("{rows}x{cols} to {out}"), &y, tolerance)?;
        }
        Ok(())
    }
}

/// `out` rows in up to `count` uneven slabs.
pub(super) fn cut(out: usize, count: usize) -> Vec<usize> {
    let mut heights = Vec::new();
    let mut left = out;
    for slab in 1..count {
        let height = (left / 2).saturating_sub(slab).min(left);
        if height > 0 {
            heights.push(height);
            left -= height;
        }
    }
    heights.push(left);
    heights
}

fn slabs<B: Backend>(
    t: &mut CaseRun<'_, B>,
    stored: DType,
    heights: Vec<usize>,
    cols: usize,
) -> Result<Vec<HostTensor>> {
    let values = NORMAL.scaled(1.0 / (cols as f32).sqrt());
    heights.into_iter().map(|height| t.stored(values, [height, cols], stored)).collect()
}

pub(super) fn deltas<B: Backend>(
    t: &mut CaseRun<'_, B>,
    ranks: &[usize],
    stored: DType,
    [out, cols]: [usize; 2],
) -> Result<Vec<LoraDelta>> {
    let delta = |(i, &rank): (usize, &usize)| {
        let row = (i * out / 4).min(out - 1);
        let height = (out - row).div_ceil(2);
        let down = t.stored(NORMAL.scaled(1.0 / (cols as f32).sqrt()), [rank, cols], stored)?;
        let up = t.stored(NORMAL.scaled(1.0 / (rank as f32).sqrt()), [height, rank], stored)?;
        Ok(LoraDelta { row, down, up, scale: 0.75 - 0.5 * i as f32 })
    };
    ranks.iter().enumerate().map(delta).collect()
}

/// A layer whose LoRA deltas are replaced, and removed.
struct ReplacedDeltas(DType);

impl Scenario for ReplacedDeltas {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (cols, out) = (65, 33);
        let x = t.activation(NORMAL, [5, cols])?;
        let bias = t.stored(NORMAL, [out], self.0)?;
        let layer = HostLinear::dense(slabs(t, self.0, cut(out, 2), cols)?)?.with_bias(bias)?;
        let first = load(t.b, layer.with_deltas(deltas(t, &[3], self.0, [out, cols])?)?)?;
        let second = deltas(t, &[4, 17], self.0, [out, cols])?;
        let second = t.b.with_deltas(&first, second)?;
        let none = t.b.with_deltas(&second, Vec::new())?;
        // The original layers are unchanged.
        for (what, w) in [("other", &second), ("none", &none), ("first", &first)] {
            let y = t.b.linear(&x, w)?;
            t.record(what, &y, tolerance(t.dtype, self.0, cols, what != "none"))?;
        }
        Ok(())
    }
}

/// An unaligned weight, as in a mapped file.
struct Unaligned(DType);

impl Scenario for Unaligned {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (cols, out) = (33, 18);
        let x = t.activation(NORMAL, [6, cols])?;
        let aligned = t.stored(NORMAL.scaled(0.2), [out, cols], self.0)?;
        for lead in 1..4 {
            let mut bytes = vec![0xff; lead];
            bytes.extend_from_slice(aligned.bytes());
            let slab = HostTensor::new(self.0, [out, cols], bytes::Bytes::from(bytes).slice(lead..))?;
            let layer = HostLinear::dense(vec![slab])?;
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            t.record(format!("{lead} bytes in"), &y, tolerance(t.dtype, self.0, cols, false))?;
        }
        Ok(())
    }
}

struct Split;

impl Scenario for Split {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for rows in [0, 1, 5, 18] {
            let cols = 65;
            let x = t.activation(NORMAL, [rows, cols])?;
            // The widths match neither the slabs nor the vector widths.
            let slabs = slabs(t, DType::BF16, vec![16, 70, 5], cols)?;
            let bias = t.stored(NORMAL, [91], DType::F32)?;
            let w = load(t.b, HostLinear::dense(slabs)?.with_bias(bias)?)?;
            let tolerance = tolerance(t.dtype, DType::BF16, cols, false);
            for (i, part) in t.b.linear_split(&x, &w, [17, 1, 33, 40])?.iter().enumerate() {
                t.record(format!("{rows} rows, part {i} of 4"), part, tolerance)?;
            }
            for (i, part) in t.b.linear_split(&x, &w, [0, 91])?.iter().enumerate() {
                t.record(format!("{rows} rows, part {i} beside an empty one"), part, tolerance)?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct GatedAdd {
    stored: DType,
    /// Width of each input.
    inputs: &'static [usize],
    /// Length of each group; empty for no gate.
    groups: &'static [usize],
    out: usize,
    bias: bool,
    ranks: &'static [usize],
}

impl Scenario for GatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (cols, out) = (self.inputs.iter().sum(), self.out);
        let rows = if self.groups.is_empty() { 19 } else { self.groups.iter().sum() };
        let xs = self.inputs.iter().map(|&width| t.activation(NORMAL, [rows, width]));
        let xs = xs.collect::<Result<Vec<_>>>()?;
        let layer = HostLinear::dense(slabs(t, self.stored, cut(out, 2), cols)?)?;
        let layer = layer.with_bias(self.bias.then(|| t.draw(NORMAL, [out])))?;
        let w = load(t.b, layer.with_deltas(deltas(t, self.ranks, self.stored, [out, cols])?)?)?;
        let gates = t.parameter(NORMAL, [self.groups.len(), out])?;
        let groups = RowGroups::from_lengths(self.groups);
        let gate = (!self.groups.is_empty()).then_some((&gates, &groups));
        let residual = t.activation(NORMAL, [rows, out])?;
        let y = t.b.linear_gated_add(&xs.iter().collect::<Vec<_>>(), &w, gate, &residual)?;
        t.record(format!("{rows}x{cols} to {out}"), &y, tolerance(t.dtype, self.stored, cols, true))
    }
}

struct AdaSplit {
    stored: DType,
    dim: usize,
    ranks: &'static [usize],
}

impl Scenario for AdaSplit {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (groups, widths, dim) = (RowGroups::from_lengths(&[1, 17, 2]), [16, 16, 5], self.dim);
        let out = widths.iter().sum();
        let x = t.activation(NORMAL, [groups.rows(), dim])?;
        let scale = t.parameter(NORMAL, [groups.count(), dim])?;
        let shift = t.parameter(NORMAL, [groups.count(), dim])?;
        let layer = HostLinear::dense(slabs(t, self.stored, cut(out, 2), dim)?)?;
        let w = load(t.b, layer.with_deltas(deltas(t, self.ranks, self.stored, [out, dim])?)?)?;
        let ys = t.b.ada_linear_split(&x, [&scale, &shift], &groups, 1e-6, &w, widths)?;
        let normed = t.b.ada_layer_norm(&x, &scale, &shift, &groups, 1e-6)?;
        for (i, y) in t.b.linear_split(&normed, &w, widths)?.iter().enumerate() {
            t.record_identical(format!("part {i} after its norm"), y, &ys[i])?;
            t.record(format!("part {i}"), &ys[i], tolerance(t.dtype, self.stored, dim, true))?;
        }
        Ok(())
    }
}

/// Errors of both factors of SwiGLU, which are sums, add up.
pub(super) fn swiglu_tolerance(of_sums: Tolerance) -> Tolerance {
    of_sums.conditioned(2.0)
}

#[derive(Clone, Copy)]
struct Swiglu {
    stored: DType,
    /// `[rows, in, columns of the result]` each.
    sizes: &'static [[usize; 3]],
    bias: bool,
    ranks: &'static [usize],
}

impl Scenario for Swiglu {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &[rows, cols, inner] in self.sizes {
            let out = 2 * inner;
            let x = t.activation(NORMAL, [rows, cols])?;
            let layer = HostLinear::dense(slabs(t, self.stored, cut(out, 2), cols)?)?;
            let layer = layer.with_bias(self.bias.then(|| t.draw(NORMAL, [out])))?;
            let w = load(t.b, layer.with_deltas(deltas(t, self.ranks, self.stored, [out, cols])?)?)?;
            let y = t.b.linear_swiglu(&x, &w)?;
            let tolerance = swiglu_tolerance(tolerance(t.dtype, self.stored, cols, true));
            t.record(format!("{rows}x{cols} to {inner}"), &y, tolerance)?;
        }
        Ok(())
    }
}

struct AdaSwiglu {
    stored: DType,
    dim: usize,
    ranks: &'static [usize],
}

impl Scenario for AdaSwiglu {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (groups, widths, dim) = (RowGroups::from_lengths(&[1, 17, 2]), [16, 16, 80], self.dim);
        let out = widths.iter().sum();
        let x = t.activation(NORMAL, [groups.rows(), dim])?;
        let scale = t.parameter(NORMAL, [groups.count(), dim])?;
        let shift = t.parameter(NORMAL, [groups.count(), dim])?;
        let layer = HostLinear::dense(slabs(t, self.stored, cut(out, 2), dim)?)?;
        let w = load(t.b, layer.with_deltas(deltas(t, self.ranks, self.stored, [out, dim])?)?)?;
        let ys = t.b.ada_linear_swiglu(&x, [&scale, &shift], &groups, 1e-6, &w, widths)?;
        for (i, y) in ys.iter().enumerate() {
            let sums = tolerance(t.dtype, self.stored, dim, true);
            t.record(format!("part {i}"), y, if i == 2 { swiglu_tolerance(sums) } else { sums })?;
        }
        Ok(())
    }
}

/// Calls that every backend must reject with the same message.
struct Invalid;

impl Scenario for Invalid {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let w = load(b, HostLinear::dense(vec![HostTensor::zeros([6, 4])])?)?;
        for (label, row, down, up) in [
            ("a narrow delta", 0, &[2, 3][..], [6, 2]),
            ("a delta of two ranks", 0, &[2, 4], [6, 3]),
            ("a delta past the end", 1, &[2, 4], [6, 2]),
            ("a delta past every end", usize::MAX, &[2, 4], [6, 2]),
            ("a delta that is no matrix", 0, &[4], [6, 2]),
        ] {
            let delta =
                LoraDelta { row, down: HostTensor::zeros(down), up: HostTensor::zeros(up), scale: 1.0 };
            t.reject(label, b.with_deltas(&w, vec![delta]));
        }

        let w = load(b, HostLinear::dense(vec![HostTensor::zeros([6, 4]), HostTensor::zeros([2, 4])])?)?;
        let (x, narrow, flat) =
            (t.zeros([3, 4], DType::F32)?, t.zeros([3, 3], DType::F32)?, t.zeros([4], DType::F32)?);
        t.reject("a narrow x", b.linear(&narrow, &w));
        t.reject("a narrow x for SwiGLU", b.linear_swiglu(&narrow, &w));
        let odd = load(b, HostLinear::dense(vec![HostTensor::zeros([5, 4])])?)?;
        t.reject("an odd width for SwiGLU", b.linear_swiglu(&x, &odd));
        t.reject("a vector", b.linear(&flat, &w));
        t.reject("a narrow x to split", b.linear_split(&narrow, &w, [6, 2]));
        t.reject("widths too small", b.linear_split(&x, &w, [5, 2]));
        t.reject("widths too large", b.linear_split(&x, &w, [8, 1]));
        t.reject("widths that overflow", b.linear_split(&x, &w, [usize::MAX, 9]));
        t.reject("no widths", b.linear_split(&x, &w, []).map(|_: [B::Tensor; 0]| ()));

        let (left, right, short) =
            (t.zeros([3, 3], DType::F32)?, t.zeros([3, 1], DType::F32)?, t.zeros([2, 1], DType::F32)?);
        let (residual, gate) = (t.zeros([3, 8], DType::F32)?, t.zeros([2, 8], DType::F32)?);
        let groups = RowGroups::from_lengths(&[1, 2]);
        let gated = Some((&gate, &groups));
        t.reject("no inputs", b.linear_gated_add(&[], &w, gated, &residual));
        t.reject("too few columns", b.linear_gated_add(&[&left], &w, gated, &residual));
        t.reject("too many columns", b.linear_gated_add(&[&left, &left], &w, gated, &residual));
        t.reject("inputs of two heights", b.linear_gated_add(&[&left, &short], &w, gated, &residual));
        let halves = t.zeros([3, 1], DType::BF16)?;
        t.reject("inputs of two types", b.linear_gated_add(&[&left, &halves], &w, gated, &residual));
        let wide = t.zeros([3, 9], DType::F32)?;
        t.reject("a wide residual", b.linear_gated_add(&[&left, &right], &w, None, &wide));
        let half = t.zeros([3, 8], DType::BF16)?;
        t.reject("a bf16 residual", b.linear_gated_add(&[&left, &right], &w, None, &half));
        for (label, gate, groups) in [
            ("groups of too few rows", t.zeros([2, 8], DType::F32)?, RowGroups::from_lengths(&[1, 1])),
            ("groups of too many rows", t.zeros([2, 8], DType::F32)?, RowGroups::from_lengths(&[2, 2])),
            ("a gate short of a group", t.zeros([1, 8], DType::F32)?, RowGroups::from_lengths(&[1, 2])),
            ("a narrow gate", t.zeros([2, 7], DType::F32)?, RowGroups::from_lengths(&[1, 2])),
            ("a bf16 gate", t.zeros([2, 8], DType::BF16)?, RowGroups::from_lengths(&[1, 2])),
        ] {
            t.reject(label, b.linear_gated_add(&[&left, &right], &w, Some((&gate, &groups)), &residual));
        }
        Ok(())
    }
}
