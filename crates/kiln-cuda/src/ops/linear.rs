use std::ops::Range;

use kiln_ops::{Error, Groups, Result, Tensor as _, shapes};
use kiln_tensor::DType;

use super::elementwise::swiglu_beside;
use super::fp8::Short;
use super::int8::Rounded;
use super::movement::concat_columns;
use super::norm::{ada_layer_norm, held};
use super::{THREADS, by_rows};
use crate::context::{Context, int};
use crate::gemm::Product;
use crate::kernels::{FINISH_BF16_BF16, FINISH_F32_BF16, FINISH_F32_F32, Finish};
use crate::queue::Block;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::{Base, CudaWeight, Matrix, Present};

pub(crate) fn linear(cx: &Context, x: &CudaTensor, w: &CudaWeight) -> Result<CudaTensor> {
    let shape = shapes::linear(x, w.size())?;
    let xs = [x];
    Layer::new(cx, &xs, w)?.part(0..shape.last())
}

pub(crate) fn linear_split<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    shapes::linear_split(x, w.size(), &widths)?;
    let xs = [x];
    Layer::new(cx, &xs, w)?.split(widths)
}

pub(crate) fn ada_linear_split<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    modulation: [&CudaTensor; 2],
    groups: &Groups,
    eps: f32,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    let [rows, _] = shapes::ada_linear_split(x, modulation, groups, w.size(), &widths)?;
    let dtype = x.dtype();
    let base = w.present(cx, dtype)?;
    // Updates take their inputs as they are.
    if let Base::Fp8(weight) = &*base
        && w.deltas.is_empty()
        && held(weight.cols, &[x, modulation[0], modulation[1]])
    {
        let short = Some(Short::of_ada_layer_norm(cx, x, modulation, groups, eps, weight)?);
        let layer = Layer { cx, xs: &[], w, base, rows, dtype, inner: Vec::new(), rounded: None, short };
        return layer.split(widths);
    }
    let normed = ada_layer_norm(cx, x, modulation, groups, eps)?;
    let xs = [&normed];
    Layer::of(cx, &xs, w, base)?.split(widths)
}

pub(crate) fn linear_gated_add(
    cx: &Context,
    xs: &[&CudaTensor],
    w: &CudaWeight,
    gate: Option<(&CudaTensor, &Groups)>,
    residual: &CudaTensor,
) -> Result<CudaTensor> {
    let shape = shapes::linear_gated_add(xs, w.size(), gate, residual)?;
    Layer::new(cx, xs, w)?.gated(shape.last(), gate, residual)
}

pub(crate) fn swiglu_gated_add(
    cx: &Context,
    beside: Option<&CudaTensor>,
    gate_up: &CudaTensor,
    w: &CudaWeight,
    gate: Option<(&CudaTensor, &Groups)>,
    residual: &CudaTensor,
) -> Result<CudaTensor> {
    let [rows, out] = shapes::swiglu_gated_add(beside, gate_up, w.size(), gate, residual)?;
    let dtype = gate_up.dtype();
    let base = w.present(cx, dtype)?;
    // Updates take their inputs as they are.
    if let Base::Fp8(weight) = &*base
        && w.deltas.is_empty()
        && Short::takes_swiglu(weight, dtype)
    {
        let short = Some(Short::of_swiglu(cx, beside, gate_up, weight)?);
        let layer = Layer { cx, xs: &[], w, base, rows, dtype, inner: Vec::new(), rounded: None, short };
        return layer.gated(out, gate, residual);
    }
    // One product of all columns, not two whose sums meet in f32.
    let joined = swiglu_beside(cx, beside, gate_up)?;
    let xs = [&joined];
    Layer::of(cx, &xs, w, base)?.gated(out, gate, residual)
}

/// A layer that meets its input.
struct Layer<'a> {
    cx: &'a Context,
    xs: &'a [&'a CudaTensor],
    w: &'a CudaWeight,
    base: Present<'a>,
    rows: usize,
    dtype: DType,
    /// The inputs times `down` of every delta, `[rows, rank]`.
    inner: Vec<CudaTensor>,
    /// The inputs in integers, where the weight is in integers.
    rounded: Option<Rounded>,
    /// The inputs in 8-bit floats, where the weight is.
    short: Option<Short>,
}

/// What is done to a product on its way out, and where it goes.
#[derive(Clone, Copy)]
struct Destination {
    bias: Option<DevicePtr>,
    /// Of the result's type and width.
    add: Option<DevicePtr>,
    out: DevicePtr,
    dtype: DType,
}

impl<'a> Layer<'a> {
    fn new(cx: &'a Context, xs: &'a [&'a CudaTensor], w: &'a CudaWeight) -> Result<Self> {
        Layer::of(cx, xs, w, w.present(cx, xs[0].dtype())?)
    }

    fn of(cx: &'a Context, xs: &'a [&'a CudaTensor], w: &'a CudaWeight, base: Present<'a>) -> Result<Self> {
        let (rows, dtype) = (xs[0].shape().rows(), xs[0].dtype());
        let mut layer = Layer { cx, xs, w, base, rows, dtype, inner: Vec::new(), rounded: None, short: None };
        if let Base::Int8(integers) = &*layer.base {
            // One scale for a row of all inputs.
            let rounded = match xs {
                [x] => Rounded::new(cx, x, integers),
                _ => Rounded::new(cx, &concat_columns(cx, xs)?, integers),
            };
            layer.rounded = Some(rounded?);
        }
        if let Base::Fp8(weight) = &*layer.base {
            layer.short = Some(Short::new(cx, xs, weight)?);
        }
        layer.inner = w.deltas.iter().map(|delta| layer.whole(&delta.down)).collect::<Result<_>>()?;
        Ok(layer)
    }

    /// The product with input `i`, whose columns are `column..` of the weight.
    fn product<'m>(
        &self,
        m: &'m Matrix,
        i: usize,
        rows: Range<usize>,
        out: DevicePtr,
        kind: DType,
    ) -> Product<'m> {
        let column = self.xs[..i].iter().map(|x| x.shape().last()).sum();
        let k = self.xs[i].shape().last();
        Product {
            x: self.xs[i].at(self.cx),
            dtype: self.dtype,
            rows: self.rows,
            ldx: k,
            w: m,
            first: rows.start,
            n: rows.len(),
            column,
            k,
            alpha: 1.0,
            bias: None,
            add: None,
            out,
            ldo: rows.len(),
            out_dtype: kind,
            batch: 1,
        }
    }

    /// All inputs times a whole matrix, in the activations' type.
    fn whole(&self, m: &Matrix) -> Result<CudaTensor> {
        let out = CudaTensor::new(self.cx, [self.rows, m.rows], self.dtype)?;
        if self.xs.len() == 1 {
            self.product(m, 0, 0..m.rows, out.at(self.cx), self.dtype).run(self.cx)?;
            return Ok(out);
        }
        let sums = self.sums(m, 0..m.rows)?;
        self.finish(&sums, DType::F32, None, &out)?;
        Ok(out)
    }

    /// All inputs times some rows of a matrix, added up in f32.
    fn sums(&self, m: &Matrix, rows: Range<usize>) -> Result<Block> {
        let sums = self.cx.block(self.rows * rows.len() * 4)?;
        for i in 0..self.xs.len() {
            let mut product = self.product(m, i, rows.clone(), sums.at(self.cx), DType::F32);
            product.add = (i > 0).then_some((sums.at(self.cx), rows.len()));
            product.run(self.cx)?;
        }
        Ok(sums)
    }

    /// Some of the layer's outputs, but for its deltas, in one launch; `None` when it takes more than one.
    fn at_once(&self, rows: &Range<usize>, to: Destination) -> Option<Result<()>> {
        match (&*self.base, &self.rounded) {
            (Base::Int8(integers), Some(rounded)) => {
                let Destination { bias, add, out, dtype } = to;
                Some(rounded.product(self.cx, integers, rows, [bias, add, Some(out)], dtype))
            }
            (Base::Fp8(weight), _) if to.bias.is_none() && to.add.is_none() => {
                self.short.as_ref().map(|short| short.product(self.cx, weight, rows, to.out, to.dtype))
            }
            (Base::Dense(matrix), _) if self.xs.len() == 1 => {
                let mut product = self.product(matrix, 0, rows.clone(), to.out, to.dtype);
                product.bias = to.bias;
                product.add = to.add.map(|add| (add, rows.len()));
                let whole = to.bias.is_none() || product.adds_bias(self.cx);
                whole.then(|| product.run(self.cx))
            }
            _ => None,
        }
    }

    /// [`Layer::sums`] of some of the layer's outputs, with its deltas.
    fn all_sums(&self, rows: Range<usize>) -> Result<Block> {
        let sums = match &*self.base {
            Base::Dense(matrix) => self.sums(matrix, rows.clone())?,
            Base::Int8(_) | Base::Fp8(_) => {
                let sums = self.cx.block(self.rows * rows.len() * 4)?;
                let to = Destination { bias: None, add: None, out: sums.at(self.cx), dtype: DType::F32 };
                self.at_once(&rows, to).unwrap_or(Ok(()))?;
                sums
            }
        };
        for (delta, inner) in self.w.deltas.iter().zip(&self.inner) {
            let Some((from, to)) = overlap(delta.row..delta.row + delta.up.rows, &rows) else { continue };
            let at = sums.at(self.cx) + 4 * to.start as u64;
            Product {
                x: inner.at(self.cx),
                dtype: self.dtype,
                rows: self.rows,
                ldx: delta.up.cols,
                w: &delta.up,
                first: from.start,
                n: from.len(),
                column: 0,
                k: delta.up.cols,
                alpha: delta.scale,
                bias: None,
                add: Some((at, rows.len())),
                out: at,
                ldo: rows.len(),
                out_dtype: DType::F32,
                batch: 1,
            }
            .run(self.cx)?;
        }
        Ok(sums)
    }

    fn has_deltas(&self, rows: &Range<usize>) -> bool {
        self.w.deltas.iter().any(|d| overlap(d.row..d.row + d.up.rows, rows).is_some())
    }

    fn bias(&self, first: usize) -> Option<DevicePtr> {
        self.w.bias.as_ref().map(|bias| bias.at(self.cx) + 4 * first as u64)
    }

    /// Some of the outputs.
    fn part(&self, rows: Range<usize>) -> Result<CudaTensor> {
        let out = CudaTensor::new(self.cx, [self.rows, rows.len()], self.dtype)?;
        let bias = self.bias(rows.start);
        let to = Destination { bias, add: None, out: out.at(self.cx), dtype: self.dtype };
        let done = if self.has_deltas(&rows) { None } else { self.at_once(&rows, to) };
        match done {
            Some(done) => done?,
            None => {
                let sums = self.all_sums(rows)?;
                self.finish(&sums, DType::F32, bias, &out)?;
            }
        }
        Ok(out)
    }

    /// `count` parts of one width that follow each other, at once where that is possible: the queries, keys and values
    /// of one input fill the GPU better than each alone.
    fn equal_parts(&self, first: usize, width: usize, count: usize) -> Result<Vec<CudaTensor>> {
        let rows = first..first + width * count;
        let at = |i: usize| first + i * width..first + (i + 1) * width;
        if let Base::Dense(matrix) = &*self.base
            && count > 1
            && width > 0
            && self.rows > 0
            && self.w.bias.is_none()
            && !self.has_deltas(&rows)
        {
            let out = CudaTensor::new(self.cx, [count, self.rows, width], self.dtype)?;
            let mut product = self.product(matrix, 0, at(0), out.at(self.cx), self.dtype);
            product.batch = count;
            if product.batches(self.cx) && product.run(self.cx).is_ok() {
                let part = |i| out.view(i * self.rows * width, [self.rows, width].into());
                return Ok((0..count).map(part).collect());
            }
        }
        (0..count).map(|i| self.part(at(i))).collect()
    }

    /// All outputs, cut into parts.
    fn split<const N: usize>(&self, widths: [usize; N]) -> Result<[CudaTensor; N]> {
        let mut parts = Vec::with_capacity(N);
        let mut first = 0;
        for run in widths.chunk_by(|a, b| a == b) {
            parts.extend(self.equal_parts(first, run[0], run.len())?);
            first += run[0] * run.len();
        }
        parts.try_into().map_err(|_| Error::Arguments { op: "linear_split", what: "too few widths".into() })
    }

    /// All outputs, gated and added to the residual.
    fn gated(
        &self,
        out_width: usize,
        gate: Option<(&CudaTensor, &Groups)>,
        residual: &CudaTensor,
    ) -> Result<CudaTensor> {
        let out = CudaTensor::new(self.cx, [self.rows, out_width], self.dtype)?;
        let all = 0..out_width;
        let plain = !self.has_deltas(&all);
        let bias = self.bias(0);
        if plain && gate.is_none() {
            let to = Destination {
                bias,
                add: Some(residual.at(self.cx)),
                out: out.at(self.cx),
                dtype: self.dtype,
            };
            if let Some(done) = self.at_once(&all, to) {
                return done.map(|()| out);
            }
        }
        // A single product rounds as the activations do, as in the model's own definition; several are added up in f32.
        let (sums, kind) = if plain && (self.short.is_some() || self.xs.len() == 1 && self.rounded.is_none())
        {
            let block = self.cx.block(self.rows * out_width * self.dtype.size())?;
            let to = Destination { bias: None, add: None, out: block.at(self.cx), dtype: self.dtype };
            self.at_once(&all, to).unwrap_or(Ok(()))?;
            (block, self.dtype)
        } else {
            (self.all_sums(all)?, DType::F32)
        };
        let whole = Groups::one(self.rows);
        let (gate, groups) = gate.map_or((None, &whole), |(gate, groups)| (Some(gate), groups));
        for (group, rows) in groups.ranges().enumerate() {
            let finish = Epilogue {
                sums: sums.at(self.cx) + (rows.start * out_width * kind.size()) as u64,
                kind,
                bias,
                gate: gate.map(|gate| gate.row_at(self.cx, group)),
                residual: Some(residual.row_at(self.cx, rows.start)),
                out: out.row_at(self.cx, rows.start),
            };
            finish.run(self.cx, self.dtype, rows.len(), out_width)?;
        }
        Ok(out)
    }

    fn finish(&self, sums: &Block, kind: DType, bias: Option<DevicePtr>, out: &CudaTensor) -> Result<()> {
        let finish =
            Epilogue { sums: sums.at(self.cx), kind, bias, gate: None, residual: None, out: out.at(self.cx) };
        finish.run(self.cx, self.dtype, self.rows, out.shape().last())
    }
}

/// What is done to sums, by address.
struct Epilogue {
    sums: DevicePtr,
    kind: DType,
    bias: Option<DevicePtr>,
    gate: Option<DevicePtr>,
    residual: Option<DevicePtr>,
    out: DevicePtr,
}

impl Epilogue {
    fn run(&self, cx: &Context, out: DType, rows: usize, cols: usize) -> Result<()> {
        let kernel = match (self.kind, out) {
            (DType::BF16, _) => FINISH_BF16_BF16,
            (_, DType::BF16) => FINISH_F32_BF16,
            _ => FINISH_F32_F32,
        };
        let parameters = Finish {
            sums: self.sums,
            bias: self.bias.unwrap_or(0),
            gate: self.gate.unwrap_or(0),
            residual: self.residual.unwrap_or(0),
            out: self.out,
            rows: rows as i64,
            cols: int("linear", cols)?,
        };
        cx.launch(kernel, by_rows(rows, cols), THREADS, 0, &parameters)
    }
}

/// What two ranges share, counted from the beginning of each.
fn overlap(a: Range<usize>, b: &Range<usize>) -> Option<(Range<usize>, Range<usize>)> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    (start < end).then(|| (start - a.start..end - a.start, start - b.start..end - b.start))
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn a_delta_meets_only_the_parts_it_changes() {
        assert_eq!(overlap(10..20, &(0..15)), Some((0..5, 10..15)));
        assert_eq!(overlap(10..20, &(15..40)), Some((5..10, 0..5)));
        assert_eq!(overlap(10..20, &(12..14)), Some((2..4, 0..2)));
        assert_eq!(overlap(10..20, &(20..30)), None);
        assert_eq!(overlap(10..20, &(15..15)), None);
    }
}
