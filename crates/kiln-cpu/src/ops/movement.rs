//! Operations that move or convert elements.

use std::ops::Range;

use kiln_ops::{Result, Tensor, shapes};
use kiln_tensor::{DType, HostTensor, Shape, bf16};

use crate::Context;
use crate::element::{Element, Scalar, convert};
use crate::simd::dispatch;
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// Elements of a task.
const ELEMENTS_PER_TASK: usize = 1 << 15;

pub(crate) fn upload(cx: &Context, host: &HostTensor, dtype: DType) -> Result<CpuTensor> {
    shapes::upload(host, dtype)?;
    fn copy<T: TensorElement>(cx: &Context, values: &[T], shape: &Shape) -> Result<CpuTensor> {
        let mut buffer = cx.buffer(values.len())?;
        buffer.copy_from_slice(values);
        Ok(T::into_tensor(buffer, shape.clone()))
    }
    match dtype {
        DType::BF16 => copy(cx, &host.to_bf16()?, host.shape()),
        _ => copy(cx, &host.to_f32()?, host.shape()),
    }
}

pub(crate) fn download(_: &Context, x: &CpuTensor) -> Result<HostTensor> {
    let bytes: Vec<u8> = by_dtype!(x, T => bytemuck::cast_slice(T::elements(x)).to_vec());
    Ok(HostTensor::new(x.dtype(), x.shape(), bytes.into())?)
}

pub(crate) fn reshape(_: &Context, x: &CpuTensor, shape: Shape) -> Result<CpuTensor> {
    Ok(x.view(0, shapes::reshape(x, &shape)?))
}

pub(crate) fn slice_rows(_: &Context, x: &CpuTensor, range: Range<usize>) -> Result<CpuTensor> {
    let shape = shapes::slice_rows(x, &range)?;
    let stride: usize = x.shape().dims()[1..].iter().product();
    Ok(x.view(range.start * stride, shape))
}

dispatch! {
    fn convert_slice<T: Scalar, U: Element>(from: &[T], to: &mut [U]) => convert;
}

pub(crate) fn cast(cx: &Context, x: &CpuTensor, dtype: DType) -> Result<CpuTensor> {
    let shape = shapes::cast(x, dtype)?;
    fn run<T: TensorElement, U: TensorElement>(cx: &Context, x: &[T], shape: Shape) -> Result<CpuTensor> {
        let mut out = cx.buffer::<U>(x.len())?;
        cx.pool.for_each_chunk(&mut out, ELEMENTS_PER_TASK, |i, out| {
            convert_slice(cx.level, &x[i * ELEMENTS_PER_TASK..][..out.len()], out);
        });
        Ok(U::into_tensor(out, shape))
    }
    match (x.dtype(), dtype) {
        (DType::F32, DType::BF16) => run::<f32, bf16>(cx, f32::elements(x), shape),
        (DType::BF16, DType::F32) => run::<bf16, f32>(cx, bf16::elements(x), shape),
        _ => Ok(x.clone()),
    }
}

pub(crate) fn download_bytes(cx: &Context, x: &CpuTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
    // Adding 2²³ rounds to an integer, ties to even, in the low byte: `round_ties_even` is a function call in a build for
    // any x86-64.
    const MAGIC: f32 = 8_388_608.0;
    let to_byte = |v: f32| ((v * scale + shift).clamp(0.0, 1.0) * 255.0 + MAGIC).to_bits() as u8;
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = vec![0; x.len()];
        cx.pool.for_each_chunk(&mut out, ELEMENTS_PER_TASK, |i, out: &mut [u8]| {
            out.iter_mut().zip(&x[i * ELEMENTS_PER_TASK..]).for_each(|(out, v)| *out = to_byte(v.widen()));
        });
        Ok(out)
    })
}

pub(crate) fn concat_rows(cx: &Context, parts: &[&CpuTensor]) -> Result<CpuTensor> {
    let shape = shapes::concat_rows(parts)?;
    by_dtype!(parts[0], T => {
        let mut out = cx.buffer::<T>(shape.numel())?;
        let mut rest = &mut out[..];
        for part in parts {
            let part = T::elements(part);
            let (here, below) = rest.split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = below;
        }
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn write_rows(cx: &Context, x: &mut CpuTensor, first: usize, rows: &CpuTensor) -> Result<()> {
    shapes::write_rows(x, first, rows)?;
    let start = first * x.shape().last();
    by_dtype!(rows, T => {
        if T::elements_mut(x).is_none() {
            *x = concat_rows(cx, &[x])?;
        }
        if let Some(elements) = T::elements_mut(x) {
            let rows = T::elements(rows);
            elements[start..start + rows.len()].copy_from_slice(rows);
        }
    });
    Ok(())
}

pub(crate) fn concat_columns(cx: &Context, parts: &[&CpuTensor]) -> Result<CpuTensor> {
    let shape = shapes::concat_columns(parts)?;
    let width = shape.last();
    by_dtype!(parts[0], T => {
        let parts: Vec<_> = parts.iter().map(|x| (x.shape().last(), T::elements(x))).collect();
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row(&mut out, width, |row, out| {
            let mut rest = out;
            for &(width, x) in &parts {
                let (here, right) = rest.split_at_mut(width);
                here.copy_from_slice(&x[row * width..][..width]);
                rest = right;
            }
        });
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn space_to_depth(cx: &Context, x: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::space_to_depth(x)?;
    let [_, width, channels] = image_dims(x);
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row(&mut out, width / 2 * 4 * channels, |row, out| {
            for (column, out) in out.chunks_exact_mut(4 * channels).enumerate() {
                for (i, [dy, dx]) in PATCH_PIXELS.into_iter().enumerate() {
                    let pixel = (2 * row + dy) * width + 2 * column + dx;
                    let x = &x[pixel * channels..][..channels];
                    out[i..].iter_mut().step_by(4).zip(x).for_each(|(out, x)| *out = *x);
                }
            }
        });
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn depth_to_space(cx: &Context, x: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::depth_to_space(x)?;
    let [_, width, depth] = image_dims(x);
    let channels = depth / 4;
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row(&mut out, 2 * width * channels, |row, out| {
            for (column, out) in out.chunks_exact_mut(channels.max(1)).enumerate() {
                let x = &x[(row / 2 * width + column / 2) * depth..][..depth];
                let i = row % 2 * 2 + column % 2;
                out.iter_mut().zip(x[i..].iter().step_by(4)).for_each(|(out, x)| *out = *x);
            }
        });
        Ok(T::into_tensor(out, shape))
    })
}

/// The row and column of the four pixels of a patch, in the order of their channels.
const PATCH_PIXELS: [[usize; 2]; 4] = [[0, 0], [0, 1], [1, 0], [1, 1]];

/// Height, width and channels of an image, which the caller has checked to have three dimensions.
pub(crate) fn image_dims(x: &CpuTensor) -> [usize; 3] {
    let dims = x.shape().dims();
    [dims[0], dims[1], dims[2]]
}
