//! Linear layers with fp8 operands.
//!
//! The reference quantizes weights and activations exactly as a backend must, so a wrong row scale shows. Accumulation may be
//! far less precise than f32: Hopper's tensor cores keep about 14 bits, which costs up to 0.3 % of a row at 96 inputs, 0.4 % at
//! 512 and 1.5 % at 3072 (measured on an H200). Quantization to fp8 costs more than that: about 4 %.

use kiln_ops::{Backend, Result, RowGroups, TrainingBackend};
use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostLinear, HostTensor};

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
    list.add("linear_gated_add_fp8/side_by_side", GatedAdd { inputs: &[64, 192], groups: &[1, 17, 22] });
    for (name, beside, inner) in [
        ("alone", 0, 256),
        ("beside", 64, 192),
        ("odd", 33, 101),
        // A single block of dev: its row is just as wide as the shared memory that GPUs have by default.
        ("wide", 6144, 18_432),
        ("wider_than_shared_memory", 0, 49_160),
    ] {
        list.add(&format!("swiglu_gated_add_fp8/{name}"), SwigluGatedAdd { beside, inner });
    }
    let split = AdaSplit { dim: 64, groups: &[1, 17, 2], widths: [16, 16, 40], bias: false };
    list.add("ada_linear_split_fp8/whole_vectors", split);
    list.add("ada_linear_split_fp8/tails", AdaSplit { dim: 100, widths: [5, 1, 17], ..split });
    list.add("ada_linear_split_fp8/padded_rows", AdaSplit { dim: 1032, bias: true, ..split });
    list.add("ada_linear_split_fp8/widest_held", AdaSplit { dim: 4096, groups: &[5], ..split });
    list.add("ada_linear_split_fp8/wider", AdaSplit { dim: 4104, groups: &[3], ..split });
    list.add("ada_linear_split_fp8/many_rows", AdaSplit { dim: 264, groups: &[1501], ..split });
    list.add("ada_linear_split_fp8/no_rows", AdaSplit { groups: &[0], ..split });
    list.add("linear_gated_add_fp8/odd_inputs", GatedAdd { inputs: &[33, 96, 5], groups: &[7] });
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
    let rows = |i| (i + 1) * out / slabs - i * out / slabs;
    let slabs = (0..slabs).map(|i| t.stored(NORMAL.scaled(0.1), [rows(i), cols], stored));
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

struct GatedAdd {
    inputs: &'static [usize],
    groups: &'static [usize],
}

impl Scenario for GatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (out, cols) = (48, self.inputs.iter().sum());
        let groups = RowGroups::from_lengths(self.groups);
        let rows = self.groups.iter().sum();
        let xs = self
            .inputs
            .iter()
            .map(|&width| t.activation(NORMAL, [rows, width]))
            .collect::<Result<Vec<_>>>()?;
        let w = load(t.b, fp8_layer(t, [out, cols], 1, DType::BF16)?)?;
        let residual = t.activation(NORMAL, [rows, out])?;
        let gate = t.parameter(NORMAL, [self.groups.len(), out])?;
        let xs: Vec<&B::Tensor> = xs.iter().collect();
        let y = t.b.linear_gated_add(&xs, &w, Some((&gate, &groups)), &residual)?;
        t.record(format!("inputs {:?}, groups {:?}", self.inputs, self.groups), &y, tolerance(cols, t.dtype))
    }
}

/// The input of a SwiGLU with its gates replaced by some where SiLU saturates: its values are exact, so all backends quantize
/// them to the same integers or fp8.
pub(super) fn saturated_gates(gate_up: &HostTensor) -> Result<HostTensor> {
    let (mut elements, width) = (gate_up.to_f32()?.into_owned(), gate_up.shape().last());
    for row in elements.chunks_exact_mut(width) {
        row[..width / 2].iter_mut().for_each(|x| *x = if *x > 0.0 { 64.0 } else { -1024.0 });
    }
    Ok(HostTensor::from_f32(gate_up.shape().clone(), elements)?)
}

/// The input, scale and shift of a norm. The input has pairs of a number and its negative, all the same power of two: the
/// norm's results and their modulation have few bits, so all backends quantize them to the same integers or fp8.
pub(super) fn exact_norm<B: Backend>(
    t: &mut CaseRun<'_, B>,
    groups: &RowGroups,
    dim: usize,
) -> Result<(B::Tensor, [B::Tensor; 2])> {
    let drawn = t.draw(NORMAL, [groups.rows(), dim]).to_f32()?.into_owned();
    let even = drawn.chunks_exact(2).flat_map(|pair| {
        let x = if pair[0] > 0.0 { 64.0 } else { -64.0 };
        [x, -x]
    });
    let x = t.upload_activation(&HostTensor::from_f32([groups.rows(), dim], even.collect())?)?;
    let mut sixteenths = || -> Result<B::Tensor> {
        let drawn = t.draw(NORMAL, [groups.count(), dim]);
        let rounded = drawn.to_f32()?.iter().map(|x| (x * 16.0).round() / 16.0).collect();
        t.b.upload(&HostTensor::from_f32(drawn.shape().clone(), rounded)?, DType::F32)
    };
    let modulation = [sixteenths()?, sixteenths()?];
    Ok((x, modulation))
}

struct SwigluGatedAdd {
    /// Columns of the input beside the SwiGLU; 0 for none.
    beside: usize,
    inner: usize,
}

impl Scenario for SwigluGatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (rows, out, cols) = (11, 48, self.beside + self.inner);
        let left = t.activation(NORMAL, [rows, self.beside])?;
        let gate_up = saturated_gates(&t.draw(NORMAL, [rows, 2 * self.inner]))?;
        let gate_up = t.upload_activation(&gate_up)?;
        let w = load(t.b, fp8_layer(t, [out, cols], 1, DType::BF16)?)?;
        let residual = t.activation(NORMAL, [rows, out])?;
        let gate = t.parameter(NORMAL, [1, out])?;
        let groups = RowGroups::single(rows);
        let beside = (self.beside > 0).then_some(&left);
        let y = t.b.swiglu_gated_add(beside, &gate_up, &w, Some((&gate, &groups)), &residual)?;
        t.record(format!("{} beside {}", self.beside, self.inner), &y, tolerance(cols, t.dtype))
    }
}

#[derive(Clone, Copy)]
struct AdaSplit {
    /// Must be even.
    dim: usize,
    groups: &'static [usize],
    widths: [usize; 3],
    bias: bool,
}

impl Scenario for AdaSplit {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (groups, out) = (RowGroups::from_lengths(self.groups), self.widths.iter().sum());
        let (rows, dim) = (groups.rows(), self.dim);
        let (x, [scale, shift]) = exact_norm(t, &groups, dim)?;
        let layer = fp8_layer(t, [out, dim], 1, DType::BF16)?;
        let w = load(t.b, layer.with_bias(self.bias.then(|| t.draw(NORMAL, [out])))?)?;
        let ys = t.b.ada_linear_split(&x, [&scale, &shift], &groups, 1e-6, &w, self.widths)?;
        for (i, y) in ys.iter().enumerate() {
            t.record(format!("part {i} of {rows}x{dim} to {out}"), y, tolerance(dim, t.dtype))?;
        }
        let x = t.activation(HEAVY_TAILED, [rows, dim])?;
        let ys = t.b.ada_linear_split(&x, [&scale, &shift], &groups, 1e-6, &w, self.widths)?;
        let normed = t.b.ada_layer_norm(&x, &scale, &shift, &groups, 1e-6)?;
        for (i, y) in t.b.linear_split(&normed, &w, self.widths)?.iter().enumerate() {
            t.record_identical(format!("part {i} after its norm"), y, &ys[i])?;
        }
        Ok(())
    }
}
