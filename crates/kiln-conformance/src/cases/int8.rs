//! Linear layers with int8 operands.
//!
//! The reference quantizes the activations exactly as a backend must and sums exactly, so a result may only differ by the
//! last rounding to f32 (and bf16): a scale that is off by a ten-thousandth, or a sum that is off by one, shows.

use kiln_ops::{Backend, Result, RowGroups, TrainingBackend};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Rotation};

use super::fp8::{exact_norm, saturated_gates};
use super::list::{CaseList, ODD};
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario, load};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let base = Int8 { sizes: vec![], values: NORMAL, slabs: &[1.0], bias: false, rank: 0, largest: 127 };
    let row_edges = (1..=17).chain([31, 32, 33, 47, 48, 49, 63, 64, 65]);
    list.add(
        "linear_int8/row_edges",
        Int8 { sizes: row_edges.map(|n| [n, 65, 33]).collect(), ..base.clone() },
    );
    list.add("linear_int8/input_tails", Int8 { sizes: ODD.map(|n| [6, n, 18]).into(), ..base.clone() });
    list.add("linear_int8/output_tails", Int8 { sizes: ODD.map(|n| [6, 34, n]).into(), ..base.clone() });
    list.add("linear_int8/long_sums", Int8 { sizes: vec![[7, 4099, 17]], ..base.clone() });
    list.add("linear_int8/no_rows", Int8 { sizes: vec![[0, 8, 16]], ..base.clone() });
    let awkward = vec![[1, 7, 3], [3, 15, 5], [17, 31, 63], [33, 129, 65], [40, 100, 129]];
    let awkward = Int8 { sizes: awkward, ..base.clone() };
    list.add("linear_int8/slabs_and_bias", Int8 { slabs: &[0.3, 0.5, 0.2], bias: true, ..awkward.clone() });
    list.add("linear_int8/deltas", Int8 { slabs: &[0.6, 0.4], bias: true, rank: 5, ..awkward.clone() });
    list.add("linear_int8/heavy_tailed", Int8 { values: HEAVY_TAILED, ..awkward.clone() });
    list.add("linear_int8/tiny", Int8 { values: NORMAL.scaled(1e-18), ..awkward.clone() });
    list.add("linear_int8/huge", Int8 { values: NORMAL.scaled(1e12), ..awkward.clone() });
    // Every byte that a file may hold, including -128, and the largest sums.
    list.add("linear_int8/all_bytes", Int8 { largest: 128, ..awkward });
    list.add_once("linear_int8/largest_sums", LargestSums);
    list.add("linear_int8/rows_of_zeros", RowsOfZeros);
    list.add("linear_int8/unaligned", Unaligned);
    list.add("linear_int8/full_size", Int8 { sizes: vec![[70, 3072, 520]], ..base.clone() });
    let widths = [16, 48, 64, 192, 256, 768, 2304];
    list.add("linear_int8/rotated", Int8 { sizes: widths.map(|n| [6, n, 18]).into(), ..base.clone() });
    let rotated = Int8 { sizes: vec![[3, 80, 5], [17, 320, 63], [33, 512, 65]], ..base };
    list.add("linear_int8/rotated_heavy_tailed", Int8 { values: HEAVY_TAILED, ..rotated.clone() });
    list.add("linear_int8/rotated_deltas", Int8 { slabs: &[0.6, 0.4], bias: true, rank: 5, ..rotated });
    list.add("linear_split_int8/odd_widths", Split);
    list.add("linear_gated_add_int8/one_input", GatedAdd { inputs: &[65], groups: &[7] });
    list.add("linear_gated_add_int8/side_by_side", GatedAdd { inputs: &[33, 96], groups: &[1, 17, 22] });
    list.add("linear_gated_add_int8/rotated", GatedAdd { inputs: &[64, 192], groups: &[1, 17, 22] });
    for (name, beside, inner) in
        [("alone", 0, 256), ("beside", 64, 192), ("odd", 33, 101), ("wider_than_registers", 0, 24_832)]
    {
        list.add(&format!("swiglu_gated_add_int8/{name}"), SwigluGatedAdd { beside, inner });
    }
    let split = AdaSplit { dim: 64, groups: &[1, 17, 2], bias: false };
    list.add("ada_linear_split_int8/groups_of_64", split);
    list.add("ada_linear_split_int8/tails", AdaSplit { dim: 100, ..split });
    list.add("ada_linear_split_int8/padded_rows", AdaSplit { dim: 1032, bias: true, ..split });
    list.add("ada_linear_split_int8/groups_of_16", AdaSplit { dim: 1040, groups: &[3], ..split });
    list.add("ada_linear_split_int8/widest_held", AdaSplit { dim: 4096, groups: &[5], ..split });
    list.add("ada_linear_split_int8/wider", AdaSplit { dim: 4352, groups: &[3], ..split });
    list.add("ada_linear_split_int8/no_rows", AdaSplit { groups: &[0], ..split });
    list.add("linear_gated_add_int8/no_gate", GatedAdd { inputs: &[48, 17, 1], groups: &[] });
}

/// Tolerance for one rounding of the sum, three products, and the bias.
fn exact_sum(dtype: DType) -> Tolerance {
    Tolerance::ELEMENTWISE.rounded(dtype)
}

/// Draws a layer of int8 matrices with row scales, rotated if the width allows.
fn int8_layer<B: Backend>(
    t: &mut CaseRun<'_, B>,
    heights: &[usize],
    cols: usize,
    largest: i32,
) -> Result<HostLinear> {
    let slabs = heights.iter().map(|&rows| slab(t, rows, cols, largest)).collect::<Result<Vec<_>>>()?;
    let (rows, scales) = slabs.into_iter().unzip();
    Ok(HostLinear::int8(rows, scales, Rotation::for_width(cols))?)
}

/// Draws a matrix of integers and its row scales.
fn slab<B: Backend>(
    t: &mut CaseRun<'_, B>,
    rows: usize,
    cols: usize,
    largest: i32,
) -> Result<(HostTensor, HostTensor)> {
    let drawn = t.draw(NORMAL.scaled(50.0), [rows, cols]);
    let bytes = drawn.to_f32()?.iter().map(|&v| (v as i32).clamp(-largest, 127) as u8).collect::<Vec<_>>();
    let scales = t.draw(NORMAL.scaled(0.002).shifted(0.01), [rows]);
    Ok((HostTensor::new(DType::I8, [rows, cols], bytes.into())?, scales))
}

fn delta<B: Backend>(t: &mut CaseRun<'_, B>, rank: usize, [out, cols]: [usize; 2]) -> Result<LoraDelta> {
    let row = out / 3;
    let down = t.stored(NORMAL.scaled(1.0 / (cols as f32).sqrt()), [rank, cols], DType::BF16)?;
    let up = t.stored(NORMAL, [out - row, rank], DType::BF16)?;
    Ok(LoraDelta { row, down, up, scale: 0.75 })
}

#[derive(Clone)]
struct Int8 {
    /// `[rows, in, out]` each.
    sizes: Vec<[usize; 3]>,
    values: Distribution,
    /// Share of the output rows of each slab.
    slabs: &'static [f64],
    bias: bool,
    rank: usize,
    /// Magnitude of the most negative integer.
    largest: i32,
}

impl Scenario for Int8 {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &[rows, cols, out] in &self.sizes {
            let x = t.activation(self.values, [rows, cols])?;
            let mut heights: Vec<usize> =
                self.slabs.iter().map(|share| (share * out as f64) as usize).collect();
            heights[0] += out - heights.iter().sum::<usize>();
            let mut layer = int8_layer(t, &heights, cols, self.largest)?;
            if self.bias {
                layer = layer.with_bias(t.stored(NORMAL, [out], DType::F32)?)?;
            }
            if self.rank > 0 {
                layer = layer.with_deltas(vec![delta(t, self.rank, [out, cols])?])?;
            }
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            let tolerance = match self.rank {
                0 => exact_sum(t.dtype),
                _ => Tolerance::sum(cols).rounded_inside(t.dtype),
            };
            t.record(format!("{rows}x{cols} to {out}"), &y, tolerance)?;
        }
        Ok(())
    }
}

/// Rows and weights of one value each: nothing cancels, and a saturating intermediate shows.
struct LargestSums;

impl Scenario for LargestSums {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for (cols, value) in [(64, -128i8), (65, 127), (4099, -128), (1 << 17, -128), (1 << 17, 127)] {
            let x: Vec<f32> = (0..3 * cols).map(|i| [1.0, -1.0, 1.0][i / cols]).collect();
            let x = t.upload_activation(&HostTensor::from_f32([3, cols], x)?)?;
            let slab = HostTensor::new(DType::I8, [2, cols], vec![value as u8; 2 * cols].into())?;
            let scale = HostTensor::from_f32([2], vec![1.0, 0.5])?;
            let layer = HostLinear::int8(vec![slab], vec![scale], Rotation::None)?;
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            t.record(format!("{cols} of {value}"), &y, exact_sum(t.dtype))?;
        }
        Ok(())
    }
}

/// Rows of zeros between others, and rows of negligible values.
struct RowsOfZeros;

impl Scenario for RowsOfZeros {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (rows, cols, out) = (9, 50, 20);
        let mut x = t.draw(NORMAL, [rows, cols]).to_f32()?.into_owned();
        x[cols..2 * cols].fill(0.0);
        x[4 * cols..5 * cols].fill(1e-32);
        let x = t.upload_activation(&HostTensor::from_f32([rows, cols], x)?)?;
        let layer = int8_layer(t, &[out], cols, 127)?;
        let y = t.b.linear(&x, &load(t.b, layer)?)?;
        t.record("rows 1 and 4", &y, exact_sum(t.dtype))
    }
}

/// Scales of other float types, and unaligned bytes, as in a mapped file.
struct Unaligned;

impl Scenario for Unaligned {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (cols, out) = (70, 18);
        let x = t.activation(NORMAL, [6, cols])?;
        let (aligned, scales) = slab(t, out, cols, 127)?;
        for (lead, dtype) in [(1, DType::BF16), (2, DType::F32), (3, DType::F32)] {
            let mut bytes = vec![0xff; lead];
            bytes.extend_from_slice(aligned.bytes());
            let moved = HostTensor::new(DType::I8, [out, cols], bytes::Bytes::from(bytes).slice(lead..))?;
            let layer = HostLinear::int8(vec![moved], vec![scales.to_dtype(dtype)?], Rotation::None)?;
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            t.record(format!("{lead} bytes in"), &y, exact_sum(t.dtype))?;
        }
        Ok(())
    }
}

struct Split;

impl Scenario for Split {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for rows in [0, 1, 5, 18] {
            let x = t.activation(NORMAL, [rows, 65])?;
            let layer = int8_layer(t, &[16, 70, 5], 65, 127)?;
            let w = load(t.b, layer)?;
            for (i, part) in t.b.linear_split(&x, &w, [17, 1, 33, 40])?.iter().enumerate() {
                t.record(format!("{rows} rows, part {i} of 4"), part, exact_sum(t.dtype))?;
            }
        }
        Ok(())
    }
}

struct GatedAdd {
    /// Width of each input; a row's scale covers all of them.
    inputs: &'static [usize],
    /// Length of each group; empty for no gate.
    groups: &'static [usize],
}

impl Scenario for GatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (cols, out) = (self.inputs.iter().sum(), 37);
        let rows = if self.groups.is_empty() { 19 } else { self.groups.iter().sum() };
        // Inputs of different magnitude: the largest element of all decides the scale.
        let scaled = self.inputs.iter().enumerate().map(|(i, &width)| (NORMAL.scaled((i + 1) as f32), width));
        let xs =
            scaled.map(|(values, width)| t.activation(values, [rows, width])).collect::<Result<Vec<_>>>()?;
        let layer = int8_layer(t, &[20, 17], cols, 127)?;
        let layer = layer.with_bias(t.stored(NORMAL, [out], DType::F32)?)?;
        let w = load(t.b, layer.with_deltas(vec![delta(t, 3, [out, cols])?])?)?;
        let gates = t.parameter(NORMAL, [self.groups.len(), out])?;
        let groups = RowGroups::from_lengths(self.groups);
        let gate = (!self.groups.is_empty()).then_some((&gates, &groups));
        let residual = t.activation(NORMAL, [rows, out])?;
        let y = t.b.linear_gated_add(&xs.iter().collect::<Vec<_>>(), &w, gate, &residual)?;
        t.record(format!("{rows}x{cols} to {out}"), &y, Tolerance::sum(cols).rounded_inside(t.dtype))
    }
}

struct SwigluGatedAdd {
    /// Columns of the input beside the SwiGLU; 0 for none.
    beside: usize,
    inner: usize,
}

impl Scenario for SwigluGatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (rows, out, cols) = (5, 48, self.beside + self.inner);
        let left = t.activation(NORMAL, [rows, self.beside])?;
        let gate_up = saturated_gates(&t.draw(NORMAL, [rows, 2 * self.inner]))?;
        let gate_up = t.upload_activation(&gate_up)?;
        let layer = int8_layer(t, &[out], cols, 127)?;
        let w = load(t.b, layer)?;
        let residual = t.activation(NORMAL, [rows, out])?;
        let gate = t.parameter(NORMAL, [1, out])?;
        let groups = RowGroups::single(rows);
        let beside = (self.beside > 0).then_some(&left);
        let y = t.b.swiglu_gated_add(beside, &gate_up, &w, Some((&gate, &groups)), &residual)?;
        let tolerance = Tolerance::sum(cols).rounded_inside(t.dtype);
        t.record(format!("{} beside {}", self.beside, self.inner), &y, tolerance)
    }
}

#[derive(Clone, Copy)]
struct AdaSplit {
    /// Must be even.
    dim: usize,
    groups: &'static [usize],
    bias: bool,
}

impl Scenario for AdaSplit {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (groups, dim, widths) = (RowGroups::from_lengths(self.groups), self.dim, [16, 16, 40]);
        let (rows, out) = (groups.rows(), widths.iter().sum());
        let layer = int8_layer(t, &[out], dim, 127)?;
        let bias = self.bias.then(|| t.draw(NORMAL, [out]));
        let w = load(t.b, layer.with_bias(bias)?)?;
        let (x, [scale, shift]) = exact_norm(t, &groups, dim)?;
        let ys = t.b.ada_linear_split(&x, [&scale, &shift], &groups, 1e-6, &w, widths)?;
        for (i, y) in ys.iter().enumerate() {
            let tolerance = Tolerance::sum(dim).rounded_inside(t.dtype);
            t.record(format!("part {i} of {rows}x{dim} to {out}"), y, tolerance)?;
        }
        let x = t.activation(HEAVY_TAILED, [rows, dim])?;
        let ys = t.b.ada_linear_split(&x, [&scale, &shift], &groups, 1e-6, &w, widths)?;
        let normed = t.b.ada_layer_norm(&x, &scale, &shift, &groups, 1e-6)?;
        for (i, y) in t.b.linear_split(&normed, &w, widths)?.iter().enumerate() {
            t.record_identical(format!("part {i} after its norm"), y, &ys[i])?;
        }
        Ok(())
    }
}
