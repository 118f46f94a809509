//! Linear layers with nvfp4 operands.
//!
//! The reference quantizes the activations exactly as a backend must; a block's products and their scales are exact in f32, so
//! only the sum is rounded. The scale of another block, or a value of another column, shows.

use kiln_ops::{Backend, Result, RowGroups, TrainingBackend};
use kiln_tensor::packed::{BlockScales, Format, PackedTensor};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta};

use super::fp8::{exact_norm, saturated_gates};
use super::list::CaseList;
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario, load};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let base = Nvfp4 { sizes: vec![], values: NORMAL, order: COMFYUI, slabs: 1, bias: false, rank: 0 };
    let whole = Nvfp4 { sizes: vec![[1, 128, 2], [5, 256, 64], [133, 384, 262]], ..base.clone() };
    list.add("linear_nvfp4/whole_steps", whole.clone());
    list.add("linear_nvfp4/modelopt", Nvfp4 { order: MODELOPT, ..whole });
    let tails = Nvfp4 { sizes: vec![[1, 16, 3], [3, 48, 5], [17, 144, 63], [66, 240, 130]], ..base.clone() };
    list.add("linear_nvfp4/tails", tails.clone());
    list.add("linear_nvfp4/slabs_and_bias", Nvfp4 { slabs: 3, bias: true, ..tails.clone() });
    list.add("linear_nvfp4/deltas", Nvfp4 { slabs: 2, bias: true, rank: 5, ..tails.clone() });
    // Blocks of one row that are thousands of times larger than others: their scales are subnormal, or zero.
    list.add("linear_nvfp4/heavy_tailed", Nvfp4 { values: HEAVY_TAILED, ..tails.clone() });
    list.add("linear_nvfp4/tiny", Nvfp4 { values: NORMAL.scaled(1e-18), ..tails.clone() });
    list.add("linear_nvfp4/huge", Nvfp4 { values: NORMAL.scaled(1e12), ..tails });
    list.add("linear_nvfp4/no_rows", Nvfp4 { sizes: vec![[0, 64, 16]], ..base.clone() });
    list.add("linear_nvfp4/wider_than_registers", Nvfp4 { sizes: vec![[3, 25_088, 9]], ..base.clone() });
    list.add("linear_nvfp4/full_size", Nvfp4 { sizes: vec![[70, 3072, 528]], ..base });
    list.add("linear_nvfp4/rows_of_zeros", RowsOfZeros);
    list.add("linear_split_nvfp4/odd_widths", Split);
    list.add("linear_gated_add_nvfp4/one_input", GatedAdd { inputs: &[128], groups: &[7] });
    list.add("linear_gated_add_nvfp4/side_by_side", GatedAdd { inputs: &[40, 216], groups: &[1, 17, 22] });
    list.add("linear_gated_add_nvfp4/no_gate", GatedAdd { inputs: &[48, 15, 1], groups: &[] });
    for (name, beside, inner) in [("alone", 0, 256), ("beside", 64, 192), ("odd", 33, 95)] {
        list.add(&format!("swiglu_gated_add_nvfp4/{name}"), SwigluGatedAdd { beside, inner });
    }
    list.add("ada_linear_split_nvfp4/groups", AdaSplit { dim: 256, groups: &[1, 17, 2] });
    list.add("ada_linear_split_nvfp4/tails", AdaSplit { dim: 112, groups: &[5] });
}

/// Whether block scales are in tiles, and the first of two values in the high half of their byte.
pub(super) type Order = [bool; 2];
pub(super) const COMFYUI: Order = [true, true];
const MODELOPT: Order = [false, false];

/// Draws a matrix of arbitrary bits with scales of 2⁻⁵ to 2.
fn matrix<B: Backend>(
    t: &mut CaseRun<'_, B>,
    [rows, cols]: [usize; 2],
    [swizzled, high_first]: Order,
) -> Result<PackedTensor> {
    let values = PackedTensor::new(Format::NvFp4, [rows, cols], t.bytes(rows * cols / 2).into())?;
    let global = t.draw(NORMAL.scaled(0.002).shifted(0.02), [1]).to_f32()?[0];
    let mut scales = BlockScales { scales: Default::default(), swizzled, high_first, global };
    let count = scales.expected_len([rows, cols]).unwrap_or(0);
    scales.scales = t.bytes(count).iter().map(|b| 0x10 + b % 48).collect::<Vec<_>>().into();
    Ok(values.with_block_scales(scales)?)
}

/// A layer of matrices of about equal heights.
pub(super) fn layer<B: Backend>(
    t: &mut CaseRun<'_, B>,
    [out, cols]: [usize; 2],
    slabs: usize,
    order: Order,
) -> Result<HostLinear> {
    let heights = (0..slabs).map(|i| (i + 1) * out / slabs - i * out / slabs);
    let slabs = heights.map(|rows| matrix(t, [rows, cols], order)).collect::<Result<_>>()?;
    Ok(HostLinear::packed(slabs)?.with_nvfp4_matmul()?)
}

fn delta<B: Backend>(t: &mut CaseRun<'_, B>, rank: usize, [out, cols]: [usize; 2]) -> Result<LoraDelta> {
    let row = out / 3;
    let down = t.stored(NORMAL.scaled(1.0 / (cols as f32).sqrt()), [rank, cols], DType::BF16)?;
    let up = t.stored(NORMAL, [out - row, rank], DType::BF16)?;
    Ok(LoraDelta { row, down, up, scale: 0.75 })
}

#[derive(Clone)]
struct Nvfp4 {
    /// `[rows, in, out]` each.
    sizes: Vec<[usize; 3]>,
    values: Distribution,
    order: Order,
    slabs: usize,
    bias: bool,
    rank: usize,
}

impl Scenario for Nvfp4 {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &[rows, cols, out] in &self.sizes {
            let x = t.activation(self.values, [rows, cols])?;
            let mut layer = layer(t, [out, cols], self.slabs, self.order)?;
            if self.bias {
                layer = layer.with_bias(t.stored(NORMAL, [out], DType::F32)?)?;
            }
            if self.rank > 0 {
                layer = layer.with_deltas(vec![delta(t, self.rank, [out, cols])?])?;
            }
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            let sum = Tolerance::sum(cols);
            let tolerance = if self.rank > 0 { sum.rounded_inside(t.dtype) } else { sum.rounded(t.dtype) };
            t.record(format!("{rows}x{cols} to {out}"), &y, tolerance)?;
        }
        Ok(())
    }
}

/// Rows of zeros between others, rows of negligible values, and blocks of zeros.
struct RowsOfZeros;

impl Scenario for RowsOfZeros {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (rows, cols, out) = (9, 48, 20);
        let mut x = t.draw(NORMAL, [rows, cols]).to_f32()?.into_owned();
        x[cols..2 * cols].fill(0.0);
        x[4 * cols..5 * cols].fill(1e-32);
        x[6 * cols + 16..6 * cols + 32].fill(0.0);
        let x = t.upload_activation(&HostTensor::from_f32([rows, cols], x)?)?;
        let layer = layer(t, [out, cols], 1, COMFYUI)?;
        let y = t.b.linear(&x, &load(t.b, layer)?)?;
        t.record("rows 1, 4 and 6", &y, Tolerance::sum(cols).rounded(t.dtype))
    }
}

struct Split;

impl Scenario for Split {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for rows in [1, 5, 18] {
            let x = t.activation(NORMAL, [rows, 160])?;
            let layer = layer(t, [91, 160], 3, COMFYUI)?;
            let w = load(t.b, layer)?;
            for (i, part) in t.b.linear_split(&x, &w, [17, 1, 33, 40])?.iter().enumerate() {
                let tolerance = Tolerance::sum(160).rounded(t.dtype);
                t.record(format!("{rows} rows, part {i} of 4"), part, tolerance)?;
            }
        }
        Ok(())
    }
}

struct GatedAdd {
    /// Width of each input; blocks and a row's scale cover all of them.
    inputs: &'static [usize],
    /// Length of each group; empty for no gate.
    groups: &'static [usize],
}

impl Scenario for GatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (cols, out) = (self.inputs.iter().sum(), 38);
        let rows = if self.groups.is_empty() { 19 } else { self.groups.iter().sum() };
        // Inputs of different magnitude: the largest element of all decides the scale.
        let scaled = self.inputs.iter().enumerate().map(|(i, &width)| (NORMAL.scaled((i + 1) as f32), width));
        let xs =
            scaled.map(|(values, width)| t.activation(values, [rows, width])).collect::<Result<Vec<_>>>()?;
        let layer = layer(t, [out, cols], 2, COMFYUI)?.with_bias(t.stored(NORMAL, [out], DType::F32)?)?;
        let w = load(t.b, layer)?;
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
        let w = load(t.b, layer(t, [out, cols], 1, COMFYUI)?)?;
        let residual = t.activation(NORMAL, [rows, out])?;
        let gate = t.parameter(NORMAL, [1, out])?;
        let groups = RowGroups::single(rows);
        let beside = (self.beside > 0).then_some(&left);
        let y = t.b.swiglu_gated_add(beside, &gate_up, &w, Some((&gate, &groups)), &residual)?;
        let tolerance = Tolerance::sum(cols).rounded_inside(t.dtype);
        t.record(format!("{} beside {}", self.beside, self.inner), &y, tolerance)
    }
}

struct AdaSplit {
    dim: usize,
    groups: &'static [usize],
}

impl Scenario for AdaSplit {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (groups, dim, widths) = (RowGroups::from_lengths(self.groups), self.dim, [16, 16, 40]);
        let (rows, out) = (groups.rows(), widths.iter().sum());
        let w = load(t.b, layer(t, [out, dim], 1, COMFYUI)?)?;
        let (x, [scale, shift]) = exact_norm(t, &groups, dim)?;
        let ys = t.b.ada_linear_split(&x, [&scale, &shift], &groups, 1e-6, &w, widths)?;
        for (i, y) in ys.iter().enumerate() {
            let tolerance = Tolerance::sum(dim).rounded_inside(t.dtype);
            t.record(format!("part {i} of {rows}x{dim} to {out}"), y, tolerance)?;
        }
        Ok(())
    }
}
