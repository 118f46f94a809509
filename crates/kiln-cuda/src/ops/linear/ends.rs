//! How a layer's products end: with SwiGLU, or gated and added to the residual, in the product's own kernel where that is
//! faster.

use std::ops::Range;

use kiln_ops::{Error, Result, RowGroups, Tensor as _};
use kiln_tensor::DType;

use super::call::{Destination, LinearCall, Quantized};
use crate::context::Context;
use crate::error;
use crate::gemm::{Gemm, GemmShape, Operands};
use crate::ops::elementwise::swiglu_into;
use crate::ops::epilogue::{Epilogue, gate_scales};
use crate::tensor::CudaTensor;
use crate::weight::WeightMatrix;

impl LinearCall<'_> {
    /// The same with SwiGLU of the last.
    pub(super) fn split_swiglu<const N: usize>(&self, widths: [usize; N]) -> Result<[CudaTensor; N]> {
        let (mut outputs, mut first_row) = (Vec::with_capacity(N), 0);
        let (last, others) = widths.split_last().map_or((0, &[][..]), |(last, others)| (*last, others));
        for run in others.chunk_by(|a, b| a == b) {
            outputs.extend(self.equal_outputs(first_row, run[0], run.len())?);
            first_row += run[0] * run.len();
        }
        outputs.push(self.swiglu_outputs(first_row..first_row + last)?);
        outputs.try_into().map_err(|_| Error::Arguments { op: "ada_linear_swiglu", what: "no widths".into() })
    }

    /// Computes SwiGLU of some of the outputs, of which the first half gates.
    pub(super) fn swiglu_outputs(&self, rows: Range<usize>) -> Result<CudaTensor> {
        let out = CudaTensor::new(self.cx, [self.rows, rows.len() / 2], self.dtype)?;
        let unfused = || swiglu_into(self.cx, &self.outputs(rows.clone())?, &out);
        run_fastest(self.cx, self.swiglu_product(&rows, &out)?, unfused)?;
        Ok(out)
    }

    /// The product that ends with SwiGLU; `None` if a single one does not do.
    fn swiglu_product(&self, rows: &Range<usize>, out: &CudaTensor) -> Result<Option<(GemmShape, Operands)>> {
        let (cx, to) = (self.cx, out.ptr(self.cx));
        if self.dtype != DType::BF16 || self.w.bias.is_some() || self.has_deltas(rows) {
            return Ok(None);
        }
        Ok(match (&*self.matrix, &self.quantized) {
            (WeightMatrix::Int8(weight), Some(Quantized::Int8(int8))) => {
                Some(int8.swiglu_product(cx, weight, rows, to))
            }
            (WeightMatrix::Fp8(weight), Some(Quantized::Fp8(fp8))) => {
                Some(fp8.swiglu_product(cx, weight, rows, to))
            }
            (WeightMatrix::Dense(matrix), _) if self.xs.len() == 1 => {
                let gates = rows.start..rows.start + rows.len() / 2;
                let gemm = Gemm { swiglu: true, ..self.gemm(matrix, 0, gates, to, self.dtype) };
                gemm.fused(cx)?
            }
            _ => None,
        })
    }

    /// Computes all outputs, gated and added to the residual.
    pub(super) fn gated_add(
        &self,
        out_width: usize,
        gate: Option<(&CudaTensor, &RowGroups)>,
        residual: &CudaTensor,
    ) -> Result<CudaTensor> {
        let out = CudaTensor::new(self.cx, [self.rows, out_width], self.dtype)?;
        let product = self.gated_product(gate, residual, &out)?;
        run_fastest(self.cx, product, || self.gated_add_into(gate, residual, &out))?;
        Ok(out)
    }

    /// The product of up to two inputs with a dense weight that gates and adds itself; `None` if a single one does not do, or
    /// has no gate and needs no special kernel.
    fn gated_product(
        &self,
        gate: Option<(&CudaTensor, &RowGroups)>,
        residual: &CudaTensor,
        out: &CudaTensor,
    ) -> Result<Option<(GemmShape, Operands)>> {
        let (cx, n) = (self.cx, out.shape().last());
        let WeightMatrix::Dense(matrix) = &*self.matrix else { return Ok(None) };
        let single = gate.is_none_or(|(_, groups)| groups.count() == 1);
        let special = gate.is_some() || self.xs.len() == 2;
        if !single || !special || self.xs.len() > 2 || self.has_deltas(&(0..n)) {
            return Ok(None);
        }
        let right = self.xs.get(1).map(|x| (x.ptr(cx), x.shape().last()));
        let left = self.gemm(matrix, 0, 0..n, out.ptr(cx), self.dtype);
        let gemm = Gemm {
            k: left.k + right.map_or(0, |(_, width)| width),
            bias: self.bias(0),
            add: Some((residual.ptr(cx), n)),
            gate: gate.map(|(gate, _)| gate.ptr(cx)),
            right,
            ..left
        };
        gemm.fused(cx)
    }

    /// Computes all outputs, gated and added to the residual, without a kernel of its own for that.
    fn gated_add_into(
        &self,
        gate: Option<(&CudaTensor, &RowGroups)>,
        residual: &CudaTensor,
        out: &CudaTensor,
    ) -> Result<()> {
        let out_width = out.shape().last();
        let all = 0..out_width;
        let no_deltas = !self.has_deltas(&all);
        let bias = self.bias(0);
        // A product adds the residual itself where there is no gate, or scales of rows to multiply with it.
        let gated;
        let matrix = match gate {
            None if no_deltas => Some(&*self.matrix),
            Some((gate, groups)) if no_deltas && bias.is_none() && groups.count() == 1 => {
                gated = self.gated_matrix(gate)?;
                gated.as_ref()
            }
            _ => None,
        };
        let onto =
            Destination { bias, add: Some(residual.ptr(self.cx)), out: out.ptr(self.cx), dtype: self.dtype };
        if let Some(launched) = matrix.and_then(|matrix| self.launch_with(matrix, &all, onto)) {
            return launched;
        }
        // A single product rounds to the activations' dtype, as the model does; several are accumulated in f32.
        let (sums, sums_dtype) = if no_deltas && (self.quantized.is_some() || self.xs.len() == 1) {
            let buffer = self.cx.allocate(self.rows * out_width * self.dtype.size())?;
            let to = Destination { bias: None, add: None, out: buffer.ptr(self.cx), dtype: self.dtype };
            self.launch_single(&all, to).unwrap_or(Ok(()))?;
            (buffer, self.dtype)
        } else {
            (self.sums_with_deltas(all)?, DType::F32)
        };
        let single = RowGroups::single(self.rows);
        let (gate, groups) = gate.map_or((None, &single), |(gate, groups)| (Some(gate), groups));
        for (group, rows) in groups.ranges().enumerate() {
            let epilogue = Epilogue {
                sums: sums.ptr(self.cx) + (rows.start * out_width * sums_dtype.size()) as u64,
                sums_dtype,
                bias,
                gate: gate.map(|gate| gate.row_ptr(self.cx, group)),
                residual: Some(residual.row_ptr(self.cx, rows.start)),
                out: out.row_ptr(self.cx, rows.start),
            };
            epilogue.run(self.cx, self.dtype, rows.len(), out_width)?;
        }
        Ok(())
    }

    /// The layer's quantized matrix with the scales of its rows times the gate; `None` for a dense one.
    fn gated_matrix(&self, gate: &CudaTensor) -> Result<Option<WeightMatrix>> {
        let cx = self.cx;
        let gated = |scales, rows| gate_scales(cx, scales, gate.ptr(cx), rows);
        Ok(match &*self.matrix {
            WeightMatrix::Dense(_) => None,
            WeightMatrix::Int8(w) => Some(WeightMatrix::Int8(w.with_scales(gated(w.ptr(cx, 0)[1], w.rows)?))),
            WeightMatrix::Fp8(w) => Some(WeightMatrix::Fp8(w.with_scales(gated(w.ptr(cx, 0)[1], w.rows)?))),
            WeightMatrix::Nvfp4(w) => {
                Some(WeightMatrix::Nvfp4(w.with_scales(gated(w.ptr(cx, 0)[2], w.rows)?)))
            }
        })
    }
}

/// Runs a fused product, if there is a kernel for it, or `unfused`, which computes the same: whichever takes less time.
fn run_fastest(
    cx: &Context,
    fused: Option<(GemmShape, Operands)>,
    unfused: impl Fn() -> Result<()>,
) -> Result<()> {
    let gemm = &cx.shared().gemm;
    let Some((shape, operands)) =
        fused.filter(|(shape, operands)| shape.rows > 0 && shape.n > 0 && gemm.fuses(cx, shape, operands))
    else {
        return unfused();
    };
    let timed = || unfused().map_err(|e| error::Error::Call { call: "linear", what: e.to_string() });
    if cx.check(gemm.prefers_fused(cx, &shape, &operands, timed))? {
        cx.check(gemm.run_fused(cx, &shape, &operands))
    } else {
        unfused()
    }
}
