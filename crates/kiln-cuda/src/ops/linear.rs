//! Linear layers: products with dense, int8, fp8 and nvfp4 weights, LoRA updates, and what follows them: the fused epilogue
//! (`epilogue.cu`) and SwiGLU, where they are not part of the product.

use std::ops::Range;

use kiln_ops::{Error, Result, RowGroups, Tensor as _, shapes};
use kiln_tensor::DType;

use super::elementwise::swiglu_into;
use super::fp8::Fp8Operand;
use super::grid::{THREADS, row_grid};
use super::int8::Int8Operand;
use super::norm::{ada_layer_norm, fits_registers};
use super::nvfp4::Nvfp4Operand;
use crate::context::{Context, int};
use crate::error;
use crate::gemm::{Gemm, GemmShape, Operands};
use crate::kernels::kernels;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::{CudaWeight, LoadedWeight, Matrix, WeightMatrix};

kernels! {
    "epilogue" {
        EpilogueParams(sums: DevicePtr, bias: DevicePtr, gate: DevicePtr, residual: DevicePtr,
            out: DevicePtr, rows: i64, cols: i32):
            EPILOGUE_F32_F32 = "epilogue_f32_f32", EPILOGUE_F32_BF16 = "epilogue_f32_bf16",
            EPILOGUE_BF16_BF16 = "epilogue_bf16_bf16";
        GateScales(scales: DevicePtr, gate: DevicePtr, out: DevicePtr, rows: i32):
            GATE_SCALES = "gate_scales";
    }
}

pub(crate) fn linear(cx: &Context, x: &CudaTensor, w: &CudaWeight) -> Result<CudaTensor> {
    let shape = shapes::linear(x, w.size())?;
    let xs = [x];
    LinearCall::new(cx, &xs, w)?.outputs(0..shape.last())
}

pub(crate) fn linear_split<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    shapes::linear_split(x, w.size(), &widths)?;
    let xs = [x];
    LinearCall::new(cx, &xs, w)?.split(widths)
}

pub(crate) fn ada_linear_split<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    modulation: [&CudaTensor; 2],
    groups: &RowGroups,
    eps: f32,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    shapes::ada_linear_split(x, modulation, groups, w.size(), &widths)?;
    with_ada_layer_norm(cx, x, modulation, groups, eps, w, |call| call.split(widths))
}

pub(crate) fn ada_linear_swiglu<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    modulation: [&CudaTensor; 2],
    groups: &RowGroups,
    eps: f32,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    shapes::ada_linear_swiglu(x, modulation, groups, w.size(), &widths)?;
    with_ada_layer_norm(cx, x, modulation, groups, eps, w, |call| call.split_swiglu(widths))
}

/// Calls a layer on the modulated norm of its input, which the norm's kernel quantizes where it can.
fn with_ada_layer_norm<R>(
    cx: &Context,
    x: &CudaTensor,
    modulation: [&CudaTensor; 2],
    groups: &RowGroups,
    eps: f32,
    w: &CudaWeight,
    run: impl FnOnce(LinearCall<'_>) -> Result<R>,
) -> Result<R> {
    let (rows, dtype) = (x.shape().rows(), x.dtype());
    let matrix = w.load(cx, dtype)?;
    // LoRA updates need the unquantized input.
    if w.deltas.is_empty() && fits_registers(w.size()[1], &[x, modulation[0], modulation[1]]) {
        let quantized = match &*matrix {
            // The norm's kernel does not round to nvfp4.
            WeightMatrix::Dense(_) | WeightMatrix::Nvfp4(_) => None,
            WeightMatrix::Int8(weight) => Some(Quantized::Int8(Int8Operand::from_ada_layer_norm(
                cx, x, modulation, groups, eps, weight,
            )?)),
            WeightMatrix::Fp8(weight) => {
                Some(Quantized::Fp8(Fp8Operand::from_ada_layer_norm(cx, x, modulation, groups, eps, weight)?))
            }
        };
        if quantized.is_some() {
            return run(LinearCall { cx, xs: &[], w, matrix, rows, dtype, inner: Vec::new(), quantized });
        }
    }
    let normed = ada_layer_norm(cx, x, modulation[0], modulation[1], groups, eps)?;
    let xs = [&normed];
    run(LinearCall::with_matrix(cx, &xs, w, matrix)?)
}

pub(crate) fn linear_swiglu(cx: &Context, x: &CudaTensor, w: &CudaWeight) -> Result<CudaTensor> {
    shapes::linear_swiglu(x, w.size())?;
    let xs = [x];
    LinearCall::new(cx, &xs, w)?.swiglu_outputs(0..w.size()[0])
}

pub(crate) fn linear_gated_add(
    cx: &Context,
    xs: &[&CudaTensor],
    w: &CudaWeight,
    gate: Option<(&CudaTensor, &RowGroups)>,
    residual: &CudaTensor,
) -> Result<CudaTensor> {
    let shape = shapes::linear_gated_add(xs, w.size(), gate, residual)?;
    LinearCall::new(cx, xs, w)?.gated_add(shape.last(), gate, residual)
}

/// The outputs of a layer, split into these widths, each added to its tensor of `onto`, whose memory it takes.
pub(crate) fn linear_onto(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaWeight,
    widths: &[usize],
    onto: Vec<Option<CudaTensor>>,
) -> Result<Vec<CudaTensor>> {
    let xs = [x];
    let call = LinearCall::new(cx, &xs, w)?;
    let (mut first_row, mut outputs) = (0, Vec::with_capacity(widths.len()));
    let mut onto = onto.into_iter();
    for run in widths.chunk_by(|a, b| a == b) {
        let (width, onto): (usize, Vec<_>) = (run[0], onto.by_ref().take(run.len()).collect());
        if onto.iter().all(Option::is_none) {
            outputs.extend(call.equal_outputs(first_row, width, run.len())?);
        } else {
            for (i, onto) in onto.into_iter().enumerate() {
                let rows = first_row + i * width..first_row + (i + 1) * width;
                outputs.push(match onto {
                    Some(onto) => call.output_onto(rows, onto)?,
                    None => call.outputs(rows)?,
                });
            }
        }
        first_row += width * run.len();
    }
    Ok(outputs)
}

/// A linear layer applied to its inputs, which are concatenated by columns.
struct LinearCall<'a> {
    cx: &'a Context,
    xs: &'a [&'a CudaTensor],
    w: &'a CudaWeight,
    matrix: LoadedWeight<'a>,
    rows: usize,
    dtype: DType,
    /// The inputs times `down` of every update, `[rows, rank]`.
    inner: Vec<CudaTensor>,
    /// The inputs of an int8, fp8 or nvfp4 weight.
    quantized: Option<Quantized>,
}

/// Inputs quantized as the weight is.
enum Quantized {
    Int8(Int8Operand),
    Fp8(Fp8Operand),
    Nvfp4(Nvfp4Operand),
}

/// What is added to a product, and where it is stored.
#[derive(Clone, Copy)]
struct Destination {
    bias: Option<DevicePtr>,
    /// In the result's dtype and width.
    add: Option<DevicePtr>,
    out: DevicePtr,
    dtype: DType,
}

impl<'a> LinearCall<'a> {
    fn new(cx: &'a Context, xs: &'a [&'a CudaTensor], w: &'a CudaWeight) -> Result<Self> {
        LinearCall::with_matrix(cx, xs, w, w.load(cx, xs[0].dtype())?)
    }

    fn with_matrix(
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
    fn gemm<'m>(
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
    fn launch_single(&self, rows: &Range<usize>, to: Destination) -> Option<Result<()>> {
        self.launch_with(&self.matrix, rows, to)
    }

    /// The same with a matrix like the layer's.
    fn launch_with(&self, matrix: &WeightMatrix, rows: &Range<usize>, to: Destination) -> Option<Result<()>> {
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

    /// The layer's quantized matrix with the scales of its rows times the gate; `None` for a dense one.
    fn gated_matrix(&self, gate: &CudaTensor) -> Result<Option<WeightMatrix>> {
        let cx = self.cx;
        let gated = |scales: DevicePtr, rows: usize| -> Result<DeviceBuffer> {
            let out = cx.allocate(4 * rows)?;
            let parameters =
                GateScales { scales, gate: gate.ptr(cx), out: out.ptr(cx), rows: int("linear", rows)? };
            cx.launch(GATE_SCALES, [rows.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
            Ok(out)
        };
        Ok(match &*self.matrix {
            WeightMatrix::Dense(_) => None,
            WeightMatrix::Int8(w) => Some(WeightMatrix::Int8(w.with_scales(gated(w.ptr(cx, 0)[1], w.rows)?))),
            WeightMatrix::Fp8(w) => Some(WeightMatrix::Fp8(w.with_scales(gated(w.ptr(cx, 0)[1], w.rows)?))),
            WeightMatrix::Nvfp4(w) => {
                Some(WeightMatrix::Nvfp4(w.with_scales(gated(w.ptr(cx, 0)[2], w.rows)?)))
            }
        })
    }

    /// Computes some outputs with LoRA updates, in f32.
    fn sums_with_deltas(&self, rows: Range<usize>) -> Result<DeviceBuffer> {
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

    fn has_deltas(&self, rows: &Range<usize>) -> bool {
        self.w.deltas.iter().any(|d| overlap(d.row..d.row + d.up.rows, rows).is_some())
    }

    fn bias(&self, first_row: usize) -> Option<DevicePtr> {
        self.w.bias.as_ref().map(|bias| bias.ptr(self.cx) + 4 * first_row as u64)
    }

    /// Computes some of the outputs.
    fn outputs(&self, rows: Range<usize>) -> Result<CudaTensor> {
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
    fn output_onto(&self, rows: Range<usize>, onto: CudaTensor) -> Result<CudaTensor> {
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
    fn equal_outputs(&self, first_row: usize, width: usize, count: usize) -> Result<Vec<CudaTensor>> {
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
    fn split<const N: usize>(&self, widths: [usize; N]) -> Result<[CudaTensor; N]> {
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

    /// The same with SwiGLU of the last.
    fn split_swiglu<const N: usize>(&self, widths: [usize; N]) -> Result<[CudaTensor; N]> {
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
    fn swiglu_outputs(&self, rows: Range<usize>) -> Result<CudaTensor> {
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
    fn gated_add(
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

/// Operands of `epilogue.cu`.
pub(crate) struct Epilogue {
    pub sums: DevicePtr,
    pub sums_dtype: DType,
    pub bias: Option<DevicePtr>,
    pub gate: Option<DevicePtr>,
    pub residual: Option<DevicePtr>,
    pub out: DevicePtr,
}

impl Epilogue {
    pub fn run(&self, cx: &Context, out: DType, rows: usize, cols: usize) -> Result<()> {
        let kernel = match (self.sums_dtype, out) {
            (DType::BF16, _) => EPILOGUE_BF16_BF16,
            (_, DType::BF16) => EPILOGUE_F32_BF16,
            _ => EPILOGUE_F32_F32,
        };
        let parameters = EpilogueParams {
            sums: self.sums,
            bias: self.bias.unwrap_or(0),
            gate: self.gate.unwrap_or(0),
            residual: self.residual.unwrap_or(0),
            out: self.out,
            rows: rows as i64,
            cols: int("linear", cols)?,
        };
        cx.launch(kernel, row_grid(rows, cols), THREADS, 0, &parameters)
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
