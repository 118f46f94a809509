//! Linear layers with nvfp4 operands; `quantized` has what all formats share.
//!
//! The reference quantizes the activations exactly as a backend must; a block's products and their scales are exact in f32, so
//! only the sum is rounded. The scale of another block, or a value of another column, shows.

use kiln_ops::{Backend, Result, TrainingBackend};
use kiln_tensor::packed::{BlockScales, Format, PackedTensor};
use kiln_tensor::{DType, HostLinear, HostTensor};

use super::linear::{cut, deltas};
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

/// A layer of some matrices.
pub(super) fn layer<B: Backend>(
    t: &mut CaseRun<'_, B>,
    [out, cols]: [usize; 2],
    slabs: usize,
    order: Order,
) -> Result<HostLinear> {
    let heights = cut(out, slabs).into_iter();
    let slabs = heights.map(|rows| matrix(t, [rows, cols], order)).collect::<Result<_>>()?;
    Ok(HostLinear::packed(slabs)?.with_nvfp4_matmul()?)
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
                layer = layer.with_deltas(deltas(t, &[self.rank], DType::BF16, [out, cols])?)?;
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
