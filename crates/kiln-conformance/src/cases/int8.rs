//! Linear layers with int8 operands; `quantized` has what all formats share.
//!
//! The reference quantizes the activations exactly as a backend must and sums exactly, so a result may only differ by the
//! last rounding to f32 (and bf16): a scale that is off by a ten-thousandth, or a sum that is off by one, shows.

use kiln_ops::{Backend, Result, TrainingBackend};
use kiln_tensor::{DType, HostLinear, HostTensor, Rotation};

use super::linear::deltas;
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
}

/// Tolerance for one rounding of the sum, three products, and the bias.
pub(super) fn exact_sum(dtype: DType) -> Tolerance {
    Tolerance::ELEMENTWISE.rounded(dtype)
}

/// Draws a layer of int8 matrices with row scales, rotated if the width allows.
pub(super) fn layer<B: Backend>(
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
            let mut layer = self::layer(t, &heights, cols, self.largest)?;
            if self.bias {
                layer = layer.with_bias(t.stored(NORMAL, [out], DType::F32)?)?;
            }
            if self.rank > 0 {
                layer = layer.with_deltas(deltas(t, &[self.rank], DType::BF16, [out, cols])?)?;
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
        let layer = self::layer(t, &[out], cols, 127)?;
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
