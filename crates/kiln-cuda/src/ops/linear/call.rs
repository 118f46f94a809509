//! A linear layer applied to its inputs: its products and LoRA updates.

use std::ops::Range;

use kiln_ops::{Error, Result, Tensor as _};
use kiln_tensor::DType;

use crate::context::Context;
use crate::gemm::Gemm;
use crate::ops::epilogue::Epilogue;
use crate::ops::fp8::Fp8Operand;
use crate::ops::int8::Int8Operand;
use crate::ops::nvfp4::Nvfp4Operand;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::{CudaWeight, LoadedWeight, Matrix, WeightMatrix};

/// A linear layer applied to its inputs, which are concatenated by columns.
pub(super) struct LinearCall<'a> {
    pub(super) cx: &'a Context,
    pub(super) xs: &'a [&'a CudaTensor],
    pub(super) w: &'a CudaWeight,
    pub(super) matrix: LoadedWeight<'a>,
    pub(super) rows: usize,
    pub(super) dtype: DType,
    /// The inputs times `down` of every update, `[rows, rank]`.
    pub(super) inner: Vec<CudaTensor>,
    /// The inputs of an int8, fp8 or nvfp4 weight.
    pub(super) quantized: Option<Quantized>,
}

/// Inputs quantized as the weight is.
pub(super) enum Quantized {
    Int8(Int8Operand),
    Fp8(Fp8Operand),
    Nvfp4(Nvfp4Operand),
}

/// What is added to a product, and where it is stored.
#[derive(Clone, Copy)]
pub(super) struct Destination {
    pub(super) bias: Option<DevicePtr>,
    /// In the result's dtype and width.
    pub(super) add: Option<DevicePtr>,
    pub(super) out: DevicePtr,
    pub(super) dtype: DType,
}

impl<'a> LinearCall<'a> {
    pub(super) fn new(cx: &'a Context, xs: &'a [&'a CudaTensor], w: &'a CudaWeight) -> Result<Self> {
        LinearCall::with_matrix(cx, xs, w, w.load(cx, xs[0].dtype())?)
    }

    pub(super) fn with_matrix(
        cx: &'a Context,
        xs: &'a [&'a CudaTensor],
        w: &'a CudaWeight,
        matrix: LoadedWeight<'a>,
    ) -> Result<Self> {
        let (rows, dtype) = (xs[0].shape().rows(), xs[0].dtype());
        let quantized = match &*matrix {
            WeightMatrix::Dense(_) => None,
            // One scale per row of all inputs.
            WeightMatrix::Int8(weight) => Some(Quantized::Int8(Int8Operand::new(cx, xs, weight)?)),
            WeightMatrix::Fp8(weight) => Some(Quantized::Fp8(Fp8Operand::new(cx, xs, weight)?)),
            WeightMatrix::Nvfp4(weight) => Some(Quantized::Nvfp4(Nvfp4Operand::new(cx, xs, weight)?)),
        };
        let mut call = LinearCall { cx, xs, w, matrix, rows, dtype, inner: Vec::new(), quantized };
        call.inner = w.deltas.iter().map(|delta| call.multiply_full(&delta.down)).collect::<Result<_>>()?;
        Ok(call)
    }

    /// The product of input `i` with some rows of a matrix.
    pub(super) fn gemm<'m>(
        &self,
        m: &'m Matrix,
        i: usize,
        rows: Range<usize>,
        out: DevicePtr,
        sums_dtype: DType,
    ) -> Gemm<'m> {
        let column = self.xs[..i].iter().map(|x| x.shape().last()).sum();
        let k = self.xs[i].shape().last();
        Gemm {
            x: self.xs[i].ptr(self.cx),
            dtype: self.dtype,
            rows: self.rows,
            ldx: k,
            w: m,
            first_row: rows.start,
            n: rows.len(),
            first_column: column,
            k,
            alpha: 1.0,
            bias: None,
            add: None,
            out,
            ldo: rows.len(),
            out_dtype: sums_dtype,
            batch: 1,
            gate: None,
            right: None,
            swiglu: false,
        }
    }

    /// Multiplies all inputs with a whole matrix, in the activations' dtype.
    fn multiply_full(&self, m: &Matrix) -> Result<CudaTensor> {
        let out = CudaTensor::new(self.cx, [self.rows, m.rows], self.dtype)?;
        if self.xs.len() == 1 {
            self.gemm(m, 0, 0..m.rows, out.ptr(self.cx), self.dtype).run(self.cx)?;
            return Ok(out);
        }
        let sums = self.sums(m, 0..m.rows)?;
        self.run_epilogue(&sums, DType::F32, None, &out)?;
        Ok(out)
    }

    /// Multiplies all inputs with some rows of a matrix, accumulated in f32.
    fn sums(&self, m: &Matrix, rows: Range<usize>) -> Result<DeviceBuffer> {
        let sums = self.cx.allocate(self.rows * rows.len() * 4)?;
        for i in 0..self.xs.len() {
            let mut gemm = self.gemm(m, i, rows.clone(), sums.ptr(self.cx), DType::F32);
            gemm.add = (i > 0).then_some((sums.ptr(self.cx), rows.len()));
            gemm.run(self.cx)?;
        }
        Ok(sums)
    }

    /// Computes some outputs, without LoRA updates, in a single launch; `None` if that is not possible.
    pub(super) fn launch_single(&self, rows: &Range<usize>, to: Destination) -> Option<Result<()>> {
        self.launch_with(&self.matrix, rows, to)
    }

    /// The same with a matrix like the layer's.
    pub(super) fn launch_with(
        &self,
        matrix: &WeightMatrix,
        rows: &Range<usize>,
        to: Destination,
    ) -> Option<Result<()>> {
        match (matrix, &self.quantized) {
            (WeightMatrix::Int8(weight), Some(Quantized::Int8(int8))) => {
                let Destination { bias, add, out, dtype } = to;
                Some(int8.gemm(self.cx, weight, rows, [bias, add, Some(out)], dtype))
            }
            (WeightMatrix::Nvfp4(weight), Some(Quantized::Nvfp4(nvfp4))) => {
                let Destination { bias, add, out, dtype } = to;
                Some(nvfp4.gemm(self.cx, weight, rows, [bias, add, Some(out)], dtype))
            }
            (WeightMatrix::Fp8(weight), Some(Quantized::Fp8(fp8))) if to.bias.is_none() => match to.add {
                None => Some(fp8.gemm(self.cx, weight, rows, to.out, to.dtype)),
                Some(add) => fp8.gemm_onto(self.cx, weight, rows, [add, to.out], to.dtype),
            },
            (WeightMatrix::Dense(matrix), _) if self.xs.len() == 1 => {
                let mut gemm = self.gemm(matrix, 0, rows.clone(), to.out, to.dtype);
                gemm.bias = to.bias;
                gemm.add = to.add.map(|add| (add, rows.len()));
                let complete = to.bias.is_none() || gemm.fuses_bias(self.cx);
                complete.then(|| gemm.run(self.cx))
            }
            _ => None,
        }
    }

    /// Computes some outputs with LoRA updates, in f32.
    pub(super) fn sums_with_deltas(&self, rows: Range<usize>) -> Result<DeviceBuffer> {
        let sums = match &*self.matrix {
            WeightMatrix::Dense(matrix) => self.sums(matrix, rows.clone())?,
            WeightMatrix::Int8(_) | WeightMatrix::Fp8(_) | WeightMatrix::Nvfp4(_) => {
                let sums = self.cx.allocate(self.rows * rows.len() * 4)?;
                let to = Destination { bias: None, add: None, out: sums.ptr(self.cx), dtype: DType::F32 };
                self.launch_single(&rows, to).unwrap_or(Ok(()))?;
                sums
            }
        };
        for (delta, inner) in self.w.deltas.iter().zip(&self.inner) {
            let Some((from, to)) = overlap(delta.row..delta.row + delta.up.rows, &rows) else { continue };
            let at = sums.ptr(self.cx) + 4 * to.start as u64;
            Gemm {
                x: inner.ptr(self.cx),
                dtype: self.dtype,
                rows: self.rows,
                ldx: delta.up.cols,
                w: &delta.up,
                first_row: from.start,
                n: from.len(),
                first_column: 0,
                k: delta.up.cols,
                alpha: delta.scale,
                bias: None,
                add: Some((at, rows.len())),
                out: at,
                ldo: rows.len(),
                out_dtype: DType::F32,
                batch: 1,
                gate: None,
                right: None,
                swiglu: false,
            }
            .run(self.cx)?;
        }
        Ok(sums)
    }

    pub(super) fn has_deltas(&self, rows: &Range<usize>) -> bool {
        self.w.deltas.iter().any(|d| overlap(d.row..d.row + d.up.rows, rows).is_some())
    }

    pub(super) fn bias(&self, first_row: usize) -> Option<DevicePtr> {
        self.w.bias.as_ref().map(|bias| bias.ptr(self.cx) + 4 * first_row as u64)
    }

    /// Computes some of the outputs.
    pub(super) fn outputs(&self, rows: Range<usize>) -> Result<CudaTensor> {
        let out = CudaTensor::new(self.cx, [self.rows, rows.len()], self.dtype)?;
        let bias = self.bias(rows.start);
        let to = Destination { bias, add: None, out: out.ptr(self.cx), dtype: self.dtype };
        let launched = if self.has_deltas(&rows) { None } else { self.launch_single(&rows, to) };
        match launched {
            Some(launched) => launched?,
            None => {
                let sums = self.sums_with_deltas(rows)?;
                self.run_epilogue(&sums, DType::F32, bias, &out)?;
            }
        }
        Ok(out)
    }

    /// Adds some of the outputs to a tensor that nothing else refers to.
    pub(super) fn output_onto(&self, rows: Range<usize>, onto: CudaTensor) -> Result<CudaTensor> {
        let (bias, at) = (self.bias(rows.start), onto.ptr(self.cx));
        if !self.has_deltas(&rows) {
            let to = Destination { bias, add: Some(at), out: at, dtype: self.dtype };
            if let Some(launched) = self.launch_single(&rows, to) {
                return launched.map(|()| onto);
            }
        }
        let sums = self.sums_with_deltas(rows)?;
        let epilogue = Epilogue {
            sums: sums.ptr(self.cx),
            sums_dtype: DType::F32,
            bias,
            gate: None,
            residual: Some(at),
            out: at,
        };
        epilogue.run(self.cx, self.dtype, self.rows, onto.shape().last())?;
        Ok(onto)
    }

    /// Computes `count` consecutive outputs of equal width, batched if possible: queries, keys and values of one input
    /// fill the GPU better together.
    pub(super) fn equal_outputs(
        &self,
        first_row: usize,
        width: usize,
        count: usize,
    ) -> Result<Vec<CudaTensor>> {
        let rows = first_row..first_row + width * count;
        let output_rows = |i: usize| first_row + i * width..first_row + (i + 1) * width;
        if let WeightMatrix::Dense(matrix) = &*self.matrix
            && count > 1
            && width > 0
            && self.rows > 0
            && self.w.bias.is_none()
            && !self.has_deltas(&rows)
        {
            let out = CudaTensor::new(self.cx, [count, self.rows, width], self.dtype)?;
            let mut gemm = self.gemm(matrix, 0, output_rows(0), out.ptr(self.cx), self.dtype);
            gemm.batch = count;
            if gemm.supports_batch(self.cx) && gemm.run(self.cx).is_ok() {
                let output = |i| out.view(i * self.rows * width, [self.rows, width].into());
                return Ok((0..count).map(output).collect());
            }
        }
        (0..count).map(|i| self.outputs(output_rows(i))).collect()
    }

    /// Computes all outputs, split by widths.
    pub(super) fn split<const N: usize>(&self, widths: [usize; N]) -> Result<[CudaTensor; N]> {
        let mut outputs = Vec::with_capacity(N);
        let mut first_row = 0;
        // One row's outputs lie one after the other: a single product reads the weight faster than several small ones.
        if self.rows == 1 {
            let all = self.outputs(0..widths.iter().sum())?;
            let view = |width: usize| {
                first_row += width;
                all.view(first_row - width, [1, width].into())
            };
            return Ok(widths.map(view));
        }
        for run in widths.chunk_by(|a, b| a == b) {
            outputs.extend(self.equal_outputs(first_row, run[0], run.len())?);
            first_row += run[0] * run.len();
        }
        outputs.try_into().map_err(|_| Error::Arguments { op: "linear_split", what: "too few widths".into() })
    }

    fn run_epilogue(
        &self,
        sums: &DeviceBuffer,
        sums_dtype: DType,
        bias: Option<DevicePtr>,
        out: &CudaTensor,
    ) -> Result<()> {
        let epilogue = Epilogue {
            sums: sums.ptr(self.cx),
            sums_dtype,
            bias,
            gate: None,
            residual: None,
            out: out.ptr(self.cx),
        };
        epilogue.run(self.cx, self.dtype, self.rows, out.shape().last())
    }
}

/// Intersection of two ranges, relative to the start of each.
fn overlap(a: Range<usize>, b: &Range<usize>) -> Option<(Range<usize>, Range<usize>)> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    (start < end).then(|| (start - a.start..end - a.start, start - b.start..end - b.start))
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn overlap_is_relative_to_both_ranges() {
        assert_eq!(overlap(10..20, &(0..15)), Some((0..5, 10..15)));
        assert_eq!(overlap(10..20, &(15..40)), Some((5..10, 0..5)));
        assert_eq!(overlap(10..20, &(12..14)), Some((2..4, 0..2)));
        assert_eq!(overlap(10..20, &(20..30)), None);
        assert_eq!(overlap(10..20, &(15..15)), None);
    }
}
