use std::ops::Range;

use kiln_ops::{Result, Tensor, shapes};
use kiln_tensor::{DType, Shape, bf16};

use crate::Context;
use crate::element::{Element, Source, convert};
use crate::simd::dispatch;
use crate::tensor::{CpuTensor, Stored, by_dtype};

/// Elements a thread moves at a time.
const PIECE: usize = 1 << 15;

pub(crate) fn reshape(x: &CpuTensor, shape: &Shape) -> Result<CpuTensor> {
    Ok(x.view(0, shapes::reshape(x, shape)?))
}

pub(crate) fn slice_rows(x: &CpuTensor, range: Range<usize>) -> Result<CpuTensor> {
    let shape = shapes::slice_rows(x, &range)?;
    let stride: usize = x.shape().dims()[1..].iter().product();
    Ok(x.view(range.start * stride, shape))
}

dispatch! {
    fn convert_on<T: Source, U: Element>(from: &[T], to: &mut [U]) => convert;
}

pub(crate) fn cast(cx: &Context, x: &CpuTensor, dtype: DType) -> Result<CpuTensor> {
    let shape = shapes::cast(x, dtype)?;
    fn run<T: Stored, U: Stored>(cx: &Context, x: &[T], shape: Shape) -> Result<CpuTensor> {
        let mut out = cx.buffer::<U>(x.len())?;
        cx.pool.pieces(&mut out, PIECE, |i, out| {
            convert_on(cx.level, &x[i * PIECE..][..out.len()], out);
        });
        Ok(U::wrap(out, shape))
    }
    match (x.dtype(), dtype) {
        (DType::F32, DType::BF16) => run::<f32, bf16>(cx, f32::of(x), shape),
        (DType::BF16, DType::F32) => run::<bf16, f32>(cx, bf16::of(x), shape),
        _ => Ok(x.clone()),
    }
}

pub(crate) fn bytes(cx: &Context, x: &CpuTensor, scale: f32, shift: f32) -> Vec<u8> {
    // Adding 2²³ drops the fraction, ties to even, and leaves the integer in the low byte: rounding is a call of a function
    // where the build is for any x86-64.
    const MAGIC: f32 = 8_388_608.0;
    let byte = |v: f32| ((v * scale + shift).clamp(0.0, 1.0) * 255.0 + MAGIC).to_bits() as u8;
    by_dtype!(x, T => {
        let x = T::of(x);
        let mut out = vec![0; x.len()];
        cx.pool.pieces(&mut out, PIECE, |i, out: &mut [u8]| {
            out.iter_mut().zip(&x[i * PIECE..]).for_each(|(out, v)| *out = byte(v.widen()));
        });
        out
    })
}

pub(crate) fn concat_rows(cx: &Context, parts: &[&CpuTensor]) -> Result<CpuTensor> {
    let shape = shapes::concat_rows(parts)?;
    by_dtype!(parts[0], T => {
        let mut out = cx.buffer::<T>(shape.numel())?;
        let mut rest = &mut out[..];
        for part in parts {
            let part = T::of(part);
            let (here, below) = rest.split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = below;
        }
        Ok(T::wrap(out, shape))
    })
}

pub(crate) fn concat_columns(cx: &Context, parts: &[&CpuTensor]) -> Result<CpuTensor> {
    let shape = shapes::concat_columns(parts)?;
    let width = shape.last();
    by_dtype!(parts[0], T => {
        let parts: Vec<_> = parts.iter().map(|x| (x.shape().last(), T::of(x))).collect();
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.rows(&mut out, width, |row, out| {
            let mut rest = out;
            for &(width, x) in &parts {
                let (here, right) = rest.split_at_mut(width);
                here.copy_from_slice(&x[row * width..][..width]);
                rest = right;
            }
        });
        Ok(T::wrap(out, shape))
    })
}

pub(crate) fn space_to_depth(cx: &Context, x: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::space_to_depth(x)?;
    let [_, width, channels] = image(x);
    by_dtype!(x, T => {
        let x = T::of(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.rows(&mut out, width / 2 * 4 * channels, |row, out| {
            for (column, out) in out.chunks_exact_mut(4 * channels).enumerate() {
                for (place, at) in PATCH.iter().enumerate() {
                    let pixel = (2 * row + at[0]) * width + 2 * column + at[1];
                    let x = &x[pixel * channels..][..channels];
                    out[place..].iter_mut().step_by(4).zip(x).for_each(|(out, x)| *out = *x);
                }
            }
        });
        Ok(T::wrap(out, shape))
    })
}

pub(crate) fn depth_to_space(cx: &Context, x: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::depth_to_space(x)?;
    let [_, width, depth] = image(x);
    let channels = depth / 4;
    by_dtype!(x, T => {
        let x = T::of(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.rows(&mut out, 2 * width * channels, |row, out| {
            for (column, out) in out.chunks_exact_mut(channels.max(1)).enumerate() {
                let x = &x[(row / 2 * width + column / 2) * depth..][..depth];
                let place = row % 2 * 2 + column % 2;
                out.iter_mut().zip(x[place..].iter().step_by(4)).for_each(|(out, x)| *out = *x);
            }
        });
        Ok(T::wrap(out, shape))
    })
}

/// Row and column of a patch's four pixels, in the order of their channels.
const PATCH: [[usize; 2]; 4] = [[0, 0], [0, 1], [1, 0], [1, 1]];

/// The dimensions of a picture, checked by the caller to be three.
pub(crate) fn image(x: &CpuTensor) -> [usize; 3] {
    let dims = x.shape().dims();
    [dims[0], dims[1], dims[2]]
}
