//! Linear layers with fp8 operands; `quantized` has what all formats share.
//!
//! The reference quantizes weights and activations exactly as a backend must, so a wrong row scale shows. Accumulation may be
//! far less precise than f32: Hopper's tensor cores keep about 14 bits, which costs up to 0.3 % of a row at 96 inputs, 0.4 % at
//! 512 and 1.5 % at 3072 (measured on an H200). Quantization to fp8 costs more than that: about 4 %.

use kiln_ops::{Backend, Result, TrainingBackend};
use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostLinear};

use super::linear::cut;
use super::list::CaseList;
use super::packed::matrix;
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario, load};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let base = Fp8 { sizes: vec![], values: NORMAL, stored: DType::BF16, slabs: 1, bias: false };
    let aligned = vec![[5, 64, 48], [130, 96, 64], [17, 512, 128]];
    list.add("linear_fp8/whole_vectors", Fp8 { sizes: aligned.clone(), ..base.clone() });
    list.add(
        "linear_fp8/slabs_and_bias",
        Fp8 { sizes: aligned.clone(), slabs: 3, bias: true, ..base.clone() },
    );
    let awkward = vec![[1, 7, 3], [3, 17, 5], [33, 129, 65]];
    list.add("linear_fp8/tails", Fp8 { sizes: awkward.clone(), ..base.clone() });
    list.add("linear_fp8/stored_in_f32", Fp8 { sizes: awkward, stored: DType::F32, ..base.clone() });
    list.add("linear_fp8/heavy_tailed", Fp8 { sizes: aligned.clone(), values: HEAVY_TAILED, ..base.clone() });
    list.add("linear_fp8/tiny", Fp8 { sizes: aligned, values: NORMAL.scaled(1e-18), ..base.clone() });
    list.add("linear_fp8/full_size", Fp8 { sizes: vec![[70, 3072, 528]], ..base });
    list.add("linear_fp8/in_the_file", StoredPacked);
}

pub(super) fn tolerance(cols: usize, dtype: DType) -> Tolerance {
    let sum = Tolerance::sum(cols);
    // Of longer rows, errors of both signs cancel.
    let accumulation = 5e-3 + 7e-6 * cols.min(4608) as f64;
    Tolerance { slack: sum.slack + accumulation, l2: sum.l2 + accumulation / 4.0, ..sum }
        .rounded_inside(dtype)
}

/// Draws a stack of matrices that are quantized to fp8 when loaded.
pub(super) fn fp8_layer<B: Backend>(
    t: &mut CaseRun<'_, B>,
    [out, cols]: [usize; 2],
    slabs: usize,
    stored: DType,
) -> Result<HostLinear> {
    let slabs = cut(out, slabs).into_iter().map(|rows| t.stored(NORMAL.scaled(0.1), [rows, cols], stored));
    Ok(HostLinear::dense(slabs.collect::<Result<_>>()?)?.with_fp8_matmul()?)
}

#[derive(Clone)]
struct Fp8 {
    /// `[rows, in, out]` each.
    sizes: Vec<[usize; 3]>,
    values: Distribution,
    stored: DType,
    slabs: usize,
    bias: bool,
}

impl Scenario for Fp8 {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &[rows, cols, out] in &self.sizes {
            let x = t.activation(self.values, [rows, cols])?;
            let layer = fp8_layer(t, [out, cols], self.slabs.min(out), self.stored)?;
            let w = load(t.b, layer.with_bias(self.bias.then(|| t.draw(NORMAL, [out])))?)?;
            let y = t.b.linear(&x, &w)?;
            t.record(format!("{rows}x{cols} to {out}"), &y, tolerance(cols, t.dtype))?;
        }
        Ok(())
    }
}

/// Weights that are stored as fp8, and in other formats.
struct StoredPacked;

impl Scenario for StoredPacked {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (rows, cols) = (19, 256);
        for formats in [vec![Format::F8E4M3; 3], vec![Format::F8E4M3, Format::Q8_0], vec![Format::F8E5M2]] {
            let x = t.activation(NORMAL, [rows, cols])?;
            let packed =
                formats.iter().map(|&format| matrix(t, format, [16, cols])).collect::<Result<_>>()?;
            let y = t.b.linear(&x, &load(t.b, HostLinear::packed(packed)?.with_fp8_matmul()?)?)?;
            t.record(format!("{formats:?}"), &y, tolerance(cols, t.dtype))?;
        }
        Ok(())
    }
}
