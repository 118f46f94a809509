//! Weights as they came from the host, and the convolution kernels made of them.

use kiln_ops::{Error, Result, shapes};
use kiln_tensor::packed::Packed;
use kiln_tensor::{DType, Delta, HostTensor, LinearMatrix, LinearParts, bf16, f16};
#[cfg(target_arch = "x86_64")]
use std::{ops::Range, sync::Arc};

use crate::Context;
use crate::element::Source;
#[cfg(target_arch = "x86_64")]
use crate::gemm::Halves;
use crate::gemm::Rows;
#[cfg(target_arch = "x86_64")]
use crate::gemm::Turned;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::simd::{Simd, dispatch};

/// Formats that the kernels widen on the fly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    BF16,
    F16,
    /// Integers, which have kernels of their own.
    I8,
    /// Matrices that are unpacked a piece of a row at a time.
    Packed,
}

/// Matrices of one width, stacked by rows, each where the host has it.
#[derive(Clone)]
pub(crate) struct Stack {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// The row past each slab's last one, and the slab.
    slabs: Vec<(usize, Slab)>,
}

#[derive(Clone)]
enum Slab {
    Dense(HostTensor),
    Packed(Packed),
    /// All rows of a weight of integers.
    #[cfg(target_arch = "x86_64")]
    Turned(Arc<Turned>),
}

impl Stack {
    /// Slabs of one width and dtype.
    fn new(op: &'static str, slabs: Vec<HostTensor>, cols: usize) -> Result<Stack> {
        let mut format = Format::F32;
        let mut rows = 0;
        let mut stacked = Vec::with_capacity(slabs.len());
        for slab in slabs {
            let slab = match slab.dtype() {
                DType::F32 | DType::BF16 | DType::F16 | DType::I8 => slab,
                DType::F64 => slab.to_dtype(DType::F32)?,
                dtype => return Err(Error::DType { op, dtype, backend: "cpu".into() }),
            };
            format = match slab.dtype() {
                DType::BF16 => Format::BF16,
                DType::F16 => Format::F16,
                DType::I8 => Format::I8,
                _ => Format::F32,
            };
            rows += slab.shape().rows();
            stacked.push((rows, Slab::Dense(slab)));
        }
        Ok(Stack { format, rows, cols, slabs: stacked })
    }

    /// Packed matrices of one width.
    fn packed(packed: Vec<Packed>, cols: usize) -> Stack {
        let mut rows = 0;
        let mut stack = |matrix: Packed| {
            rows += matrix.row_count();
            (rows, Slab::Packed(matrix))
        };
        let slabs = packed.into_iter().map(&mut stack).collect();
        Stack { format: Format::Packed, rows, cols, slabs }
    }

    /// The slab that has a row, and the row's number there.
    #[inline(always)]
    fn find(&self, row: usize) -> (&Slab, usize) {
        let slab = self.slabs.partition_point(|&(end, _)| end <= row);
        let first = if slab == 0 { 0 } else { self.slabs[slab - 1].0 };
        (&self.slabs[slab].1, row - first)
    }

    /// The bytes of a row that is not packed, aligned for nothing.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[u8] {
        let bytes = match self.format {
            Format::F32 => 4 * self.cols,
            Format::BF16 | Format::F16 => 2 * self.cols,
            Format::I8 => self.cols,
            Format::Packed => unreachable!("packed rows are unpacked"),
        };
        match self.find(row) {
            (Slab::Dense(slab), row) => &slab.bytes()[row * bytes..][..bytes],
            _ => unreachable!("only dense slabs are read by rows"),
        }
    }

    /// Integers as the machine's tiles want them, where it multiplies them in tiles. The rows are given up for it.
    fn turn(self, cx: &Context) -> Result<Stack> {
        match cx.level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx(amx) if self.format == Format::I8 && amx.has_int8() => {
                let turned = Turned::new(cx, amx, &self)?;
                Ok(Stack { slabs: vec![(self.rows, Slab::Turned(Arc::new(turned)))], ..self })
            }
            _ => Ok(self),
        }
    }

    /// Integers, if they lie as tiles.
    #[cfg(target_arch = "x86_64")]
    pub fn turned(&self) -> Option<&Turned> {
        match self.slabs.first() {
            Some((_, Slab::Turned(turned))) => Some(turned),
            _ => None,
        }
    }

    /// The bytes of some rows that lie one after the other, if they do, and how far they are apart.
    #[cfg(target_arch = "x86_64")]
    pub fn rows_in_place(&self, rows: Range<usize>) -> Option<(&[u8], usize)> {
        let (Slab::Dense(slab), first) = self.find(rows.start) else { return None };
        let bytes = slab.bytes();
        let stride = bytes.len() / slab.shape().rows();
        Some((bytes.get(first * stride..(first + rows.len()) * stride)?, stride))
    }

    /// Values of a packed row from column `from` on. Not inlined into the kernels that ask for it, of which there are many:
    /// the decoders would make each of them several times its size.
    pub fn unpack<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        unpack_on(s.level(), self, row, from, out);
    }

    #[inline(always)]
    fn unpack_here(&self, row: usize, from: usize, out: &mut [f32]) {
        match self.find(row) {
            (Slab::Packed(matrix), row) => matrix.read(row, from, out),
            _ => unreachable!("a stack of this format has packed slabs"),
        }
    }
}

#[inline(always)]
fn unpack_kernel<S: Simd>(_: S, stack: &Stack, row: usize, from: usize, out: &mut [f32]) {
    stack.unpack_here(row, from, out);
}

dispatch! {
    fn unpack_on(stack: &Stack, row: usize, from: usize, out: &mut [f32]) => unpack_kernel;
}

/// Other formats are rounded to bf16.
#[cfg(target_arch = "x86_64")]
impl Halves for Stack {
    fn copy(&self, row: usize, from: usize, out: &mut [bf16]) {
        fn each<T: Source>(bytes: &[u8], from: usize, out: &mut [bf16]) {
            let values = bytes[from * size_of::<T>()..].chunks_exact(size_of::<T>());
            for (out, value) in out.iter_mut().zip(values) {
                *out = bf16::from_f32(bytemuck::pod_read_unaligned::<T>(value).widen());
            }
        }
        if out.is_empty() {
            return;
        }
        match self.format {
            Format::BF16 => {
                let count = size_of_val(out);
                bytemuck::cast_slice_mut(out).copy_from_slice(&self.row(row)[2 * from..][..count]);
            }
            Format::F32 => each::<f32>(self.row(row), from, out),
            Format::F16 => each::<f16>(self.row(row), from, out),
            Format::I8 | Format::Packed => unreachable!("kernels of convolutions are dense floats"),
        }
    }
}

/// A stack whose first row stands at row `at`; zeros above and below.
pub(crate) struct Placed<'a> {
    pub stack: &'a Stack,
    pub at: usize,
}

impl Rows for Placed<'_> {
    #[inline(always)]
    fn fill<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        if row < self.at || row >= self.at + self.stack.rows {
            return out.fill(0.0);
        }
        let (stack, row) = (self.stack, row - self.at);
        match stack.format {
            Format::F32 => widen::<S, f32>(s, stack.row(row), from, out),
            Format::BF16 => widen::<S, bf16>(s, stack.row(row), from, out),
            Format::F16 => widen::<S, f16>(s, stack.row(row), from, out),
            Format::Packed => stack.unpack(s, row, from, out),
            Format::I8 => unreachable!("bytes have kernels of their own"),
        }
    }
}

/// Converts elements from number `from` on; the bytes need no alignment.
#[inline(always)]
fn widen<S: Simd, T: Source>(s: S, bytes: &[u8], from: usize, out: &mut [f32]) {
    let bytes = &bytes[from * size_of::<T>()..][..size_of_val(out) / 4 * size_of::<T>()];
    let x = bytes.as_ptr().cast::<T>();
    let whole = out.len() / S::LANES * S::LANES;
    let mut i = 0;
    while i < whole {
        // SAFETY: i + LANES <= out.len(), and as many elements are in `bytes`.
        unsafe { s.store(out.as_mut_ptr().add(i), T::load(s, x.add(i))) };
        i += S::LANES;
    }
    for (i, out) in out.iter_mut().enumerate().skip(whole) {
        // SAFETY: i < out.len().
        *out = unsafe { x.add(i).read_unaligned() }.widen();
    }
}

/// A linear layer: the weight out of the host's (perhaps mapped) bytes, its bias and its low-rank updates.
pub struct CpuWeight {
    pub(crate) stack: Stack,
    /// For a weight of integers the scale of every row; else empty.
    pub(crate) scales: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) deltas: Vec<LowRank>,
}

/// `y[.., row..] += scale * (x · downᵀ) · upᵀ`.
pub(crate) struct LowRank {
    pub row: usize,
    pub down: Stack,
    pub up: Stack,
    pub scale: f32,
}

impl LowRank {
    /// Updates of a layer with this many columns.
    fn all(deltas: &[Delta], cols: usize) -> Result<Vec<LowRank>> {
        let low_rank = |delta: &Delta| {
            let rank = delta.rank();
            Ok(LowRank {
                row: delta.row,
                down: Stack::new("weight", vec![delta.down.clone()], cols)?,
                up: Stack::new("weight", vec![delta.up.clone()], rank)?,
                scale: delta.scale,
            })
        };
        deltas.iter().filter(|d| d.rank() > 0).map(low_rank).collect()
    }
}

impl CpuWeight {
    pub(crate) fn new(cx: &Context, parts: LinearParts) -> Result<CpuWeight> {
        let cols = parts.cols();
        if parts.fp8() {
            return Err(Error::DType { op: "weight", dtype: DType::F8E4M3, backend: "cpu".into() });
        }
        let deltas = LowRank::all(parts.deltas(), cols)?;
        let bias = parts.bias().map(|b| floats("weight", b)).transpose()?;
        let (stack, scales) = match parts.matrix() {
            LinearMatrix::Dense(slabs) => (Stack::new("weight", slabs.clone(), cols)?, Vec::new()),
            LinearMatrix::Packed(packed) => (Stack::packed(packed.clone(), cols), Vec::new()),
            LinearMatrix::Int8 { rows, scales } => {
                let scales = scales.iter().map(|s| floats("weight", s)).collect::<Result<Vec<_>>>()?;
                (Stack::new("weight", rows.clone(), cols)?.turn(cx)?, scales.concat())
            }
        };
        Ok(CpuWeight { stack, scales, bias, deltas })
    }

    /// The same layer with other updates.
    pub(crate) fn with_deltas(&self, deltas: &[Delta]) -> Result<CpuWeight> {
        shapes::with_deltas(deltas, self.size())?;
        let deltas = LowRank::all(deltas, self.stack.cols)?;
        let (stack, scales, bias) = (self.stack.clone(), self.scales.clone(), self.bias.clone());
        Ok(CpuWeight { stack, scales, bias, deltas })
    }

    /// Whether the machine multiplies it in tiles.
    pub(crate) fn in_tiles(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.stack.turned().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// `[out, in]`.
    pub(crate) fn size(&self) -> [usize; 2] {
        [self.stack.rows, self.stack.cols]
    }
}

/// A convolution: its kernel as `[out, height · width · in]`, in which a patch of a channels-last picture is one row.
pub struct CpuConv {
    /// `[out, in, height, width]`.
    pub(crate) size: [usize; 4],
    pub(crate) kernel: Stack,
    pub(crate) bias: Option<Vec<f32>>,
}

impl CpuConv {
    pub(crate) fn new(kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<CpuConv> {
        let size = shapes::conv(kernel, bias)?;
        let [out, channels, height, width] = size;
        let taps = height * width;
        let shape = [out, taps * channels];
        // bf16 stays bf16, so that a kernel takes no more memory than in its file.
        let kernel = match kernel.dtype() {
            DType::BF16 => HostTensor::from_bf16(shape, channels_last(&kernel.to_bf16()?, channels, taps))?,
            DType::F32 | DType::F16 | DType::F64 => {
                HostTensor::from_f32(shape, channels_last(&kernel.to_f32()?, channels, taps))?
            }
            dtype => return Err(Error::DType { op: "conv", dtype, backend: "cpu".into() }),
        };
        let bias = bias.map(|b| floats("conv", b)).transpose()?;
        Ok(CpuConv { size, kernel: Stack::new("conv", vec![kernel], taps * channels)?, bias })
    }
}

/// `[out, channels, taps]` to `[out, taps, channels]`.
fn channels_last<T: Copy>(x: &[T], channels: usize, taps: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(x.len());
    for x in x.chunks(channels * taps) {
        for tap in 0..taps {
            out.extend((0..channels).map(|channel| x[channel * taps + tap]));
        }
    }
    out
}

fn floats(op: &'static str, x: &HostTensor) -> Result<Vec<f32>> {
    match x.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(x.to_f32()?.into_owned()),
        dtype => Err(Error::DType { op, dtype, backend: "cpu".into() }),
    }
}
