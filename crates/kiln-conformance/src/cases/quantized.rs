//! Linear layers with quantized operands, in every format: split, gated, fused with norms or SwiGLU.
//!
//! The reference quantizes as a backend must, so a wrong scale shows. What differs by format is how a layer is drawn, and how exact
//! its sums are.

use kiln_ops::{Backend, Result, RowGroups, TrainingBackend};
use kiln_tensor::{DType, HostLinear, HostTensor};

use super::linear::{cut, deltas, swiglu_tolerance};
use super::list::CaseList;
use super::{fp8, int8, nvfp4};
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario, load};
use crate::random::{HEAVY_TAILED, NORMAL};

/// Format of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantization {
    Int8,
    Fp8,
    Nvfp4,
}

impl Quantization {
    fn name(self) -> &'static str {
        match self {
            Quantization::Int8 => "int8",
            Quantization::Fp8 => "fp8",
            Quantization::Nvfp4 => "nvfp4",
        }
    }

    /// Draws a layer of some matrices.
    fn layer<B: Backend>(
        self,
        t: &mut CaseRun<'_, B>,
        [out, cols]: [usize; 2],
        slabs: usize,
    ) -> Result<HostLinear> {
        match self {
            Quantization::Int8 => int8::layer(t, &cut(out, slabs), cols, 127),
            Quantization::Fp8 => fp8::fp8_layer(t, [out, cols], slabs, DType::BF16),
            Quantization::Nvfp4 => nvfp4::layer(t, [out, cols], slabs, nvfp4::COMFYUI),
        }
    }

    /// For sums that are rounded once.
    fn plain_tolerance(self, cols: usize, dtype: DType) -> Tolerance {
        match self {
            Quantization::Int8 => int8::exact_sum(dtype),
            Quantization::Fp8 => fp8::tolerance(cols, dtype),
            Quantization::Nvfp4 => Tolerance::sum(cols).rounded(dtype),
        }
    }

    /// For sums of which an operand, the inner activations of a delta, or the product before its gate may be rounded.
    fn tolerance(self, cols: usize, dtype: DType) -> Tolerance {
        match self {
            Quantization::Fp8 => fp8::tolerance(cols, dtype),
            Quantization::Int8 | Quantization::Nvfp4 => Tolerance::sum(cols).rounded_inside(dtype),
        }
    }
}

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    use Quantization::{Fp8, Int8, Nvfp4};
    for of in [Int8, Fp8, Nvfp4] {
        let name = |op: &str, case: &str| format!("{op}_{}/{case}", of.name());
        // nvfp4 has blocks of 16 columns.
        let [odd_columns, whole] = if of == Nvfp4 { [160, 256] } else { [65, 264] };
        list.add(&name("linear_split", "odd_widths"), Split { of, cols: odd_columns });
        let base = GatedAdd { of, inputs: &[128], groups: &[7], out: 38, bias: true, rank: 3 };
        list.add(&name("linear_gated_add", "one_input"), base);
        list.add(
            &name("linear_gated_add", "no_gate"),
            GatedAdd { inputs: &[48, 15, 1], groups: &[], ..base },
        );
        let two = GatedAdd { inputs: &[64, 192], groups: &[1, 17, 22], ..base };
        list.add(&name("linear_gated_add", "side_by_side"), two);
        list.add(&name("linear_gated_add", "odd_inputs"), GatedAdd { inputs: &[33, 95, 32], ..two });
        // One group without bias and deltas: the gate may be multiplied into the weight's scales.
        let whole_gate = GatedAdd { groups: &[133], out: 136, bias: false, rank: 0, ..two };
        list.add(&name("linear_gated_add", "whole"), whole_gate);
        let split = AdaSplit { of, dim: 64, groups: &[1, 17, 2], widths: [16, 16, 40], bias: false };
        list.add(&name("ada_linear_split", "whole_vectors"), split);
        list.add(&name("ada_linear_split", "tails"), AdaSplit { dim: 112, widths: [5, 1, 17], ..split });
        list.add(&name("ada_linear_split", "no_rows"), AdaSplit { groups: &[0], ..split });
        let swiglu = AdaSwiglu { of, dim: 64, groups: &[1, 17, 2], inner: 20, rank: 0 };
        list.add(&name("ada_linear_swiglu", "tails"), AdaSwiglu { dim: 112, inner: 17, ..swiglu });
        list.add(&name("ada_linear_swiglu", "deltas"), AdaSwiglu { rank: 3, ..swiglu });
        list.add(
            &name("ada_linear_swiglu", "whole"),
            AdaSwiglu { dim: whole, groups: &[300], inner: 200, ..swiglu },
        );
    }
    // Rows that the quantizing kernels don't keep in registers; of a single block of dev, whose row is just as wide as the shared
    // memory that GPUs have by default; and wider.
    let wide = |of, inputs| GatedAdd { of, inputs, groups: &[11], out: 48, bias: false, rank: 0 };
    list.add("linear_gated_add_int8/wider_than_registers", wide(Int8, &[24_832]));
    list.add("linear_gated_add_fp8/wide", wide(Fp8, &[6144, 18_432]));
    list.add("linear_gated_add_fp8/wider_than_shared_memory", wide(Fp8, &[49_160]));
    for of in [Int8, Fp8] {
        let name = |case: &str| format!("ada_linear_split_{}/{case}", of.name());
        let split = AdaSplit { of, dim: 64, groups: &[3], widths: [16, 16, 40], bias: false };
        list.add(&name("unpadded"), AdaSplit { dim: 100, ..split });
        list.add(&name("padded_rows"), AdaSplit { dim: 1032, bias: true, groups: &[1, 17, 2], ..split });
        list.add(&name("groups_of_16"), AdaSplit { dim: 1040, ..split });
        list.add(&name("widest_held"), AdaSplit { dim: 4096, groups: &[5], ..split });
        list.add(&name("wider"), AdaSplit { dim: 4352, ..split });
    }
    let many = AdaSplit { of: Fp8, dim: 264, groups: &[1501], widths: [16, 16, 40], bias: false };
    list.add("ada_linear_split_fp8/many_rows", many);
}

struct Split {
    of: Quantization,
    cols: usize,
}

impl Scenario for Split {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for rows in [0, 1, 5, 18] {
            let x = t.activation(NORMAL, [rows, self.cols])?;
            let layer = self.of.layer(t, [91, self.cols], 3)?;
            let w = load(t.b, layer)?;
            for (i, part) in t.b.linear_split(&x, &w, [17, 1, 33, 40])?.iter().enumerate() {
                let tolerance = self.of.plain_tolerance(self.cols, t.dtype);
                t.record(format!("{rows} rows, part {i} of 4"), part, tolerance)?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct GatedAdd {
    of: Quantization,
    /// Width of each input; a row's scale covers all of them.
    inputs: &'static [usize],
    /// Length of each group; empty for no gate.
    groups: &'static [usize],
    out: usize,
    bias: bool,
    rank: usize,
}

impl Scenario for GatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (cols, out) = (self.inputs.iter().sum(), self.out);
        let rows = if self.groups.is_empty() { 19 } else { self.groups.iter().sum() };
        // Inputs of different magnitude: the largest element of all decides the scale.
        let scaled = self.inputs.iter().enumerate().map(|(i, &width)| (NORMAL.scaled((i + 1) as f32), width));
        let xs =
            scaled.map(|(values, width)| t.activation(values, [rows, width])).collect::<Result<Vec<_>>>()?;
        let mut layer = self.of.layer(t, [out, cols], 2)?;
        layer = layer.with_bias(self.bias.then(|| t.draw(NORMAL, [out])))?;
        if self.rank > 0 {
            layer = layer.with_deltas(deltas(t, &[self.rank], DType::BF16, [out, cols])?)?;
        }
        let w = load(t.b, layer)?;
        let gates = t.parameter(NORMAL, [self.groups.len(), out])?;
        let groups = RowGroups::from_lengths(self.groups);
        let gate = (!self.groups.is_empty()).then_some((&gates, &groups));
        let residual = t.activation(NORMAL, [rows, out])?;
        let y = t.b.linear_gated_add(&xs.iter().collect::<Vec<_>>(), &w, gate, &residual)?;
        t.record(format!("{rows}x{cols} to {out}"), &y, self.of.tolerance(cols, t.dtype))
    }
}

/// The input, scale and shift of a norm. The input has pairs of a number and its negative, all the same power of two: the
/// norm's results and their modulation have few bits, so all backends quantize them alike.
fn exact_norm<B: Backend>(
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

#[derive(Clone, Copy)]
struct AdaSplit {
    of: Quantization,
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
        let layer = self.of.layer(t, [out, dim], 1)?;
        let w = load(t.b, layer.with_bias(self.bias.then(|| t.draw(NORMAL, [out])))?)?;
        let ys = t.b.ada_linear_split(&x, [&scale, &shift], &groups, 1e-6, &w, self.widths)?;
        for (i, y) in ys.iter().enumerate() {
            t.record(format!("part {i} of {rows}x{dim} to {out}"), y, self.of.tolerance(dim, t.dtype))?;
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

#[derive(Clone, Copy)]
struct AdaSwiglu {
    of: Quantization,
    /// Must be even.
    dim: usize,
    groups: &'static [usize],
    /// Columns of the SwiGLU's result.
    inner: usize,
    rank: usize,
}

impl Scenario for AdaSwiglu {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (groups, dim, widths) = (RowGroups::from_lengths(self.groups), self.dim, [24, 2 * self.inner]);
        let out = widths.iter().sum();
        let (x, [scale, shift]) = exact_norm(t, &groups, dim)?;
        let mut layer = self.of.layer(t, [out, dim], 2)?;
        if self.rank > 0 {
            layer = layer.with_deltas(deltas(t, &[self.rank], DType::BF16, [out, dim])?)?;
        }
        let w = load(t.b, layer)?;
        let ys = t.b.ada_linear_swiglu(&x, [&scale, &shift], &groups, 1e-6, &w, widths)?;
        let sums = self.of.tolerance(dim, t.dtype);
        for (i, (y, tolerance)) in ys.iter().zip([sums, swiglu_tolerance(sums)]).enumerate() {
            t.record(format!("part {i} of {}x{dim} to {out}", groups.rows()), y, tolerance)?;
        }
        Ok(())
    }
}
