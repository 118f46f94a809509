//! Data movement: between host and device, casts, copies, rearrangements, upsampling and downloads as bytes.

use std::ops::Range;

use kiln_ops::{Pending, Result, Tensor as _, shapes};
use kiln_tensor::{DType, HostTensor, Shape};

use super::elementwise::cast_buffer;
use super::grid::{THREADS, elementwise_grid};
use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "movement" {
        Upsample(x: DevicePtr, out: DevicePtr, h: i32, w: i32, c: i32):
            UPSAMPLE = "upsample";
        ToBytes(x: DevicePtr, out: DevicePtr, n: i64, scale: f32, shift: f32):
            TO_BYTES = "to_bytes" by dtype;
        CopyColumns(x: DevicePtr, out: DevicePtr, rows: i64, width: i32, column: i32, out_width: i32):
            COPY_COLUMNS_2 = "copy_columns_2", COPY_COLUMNS_4 = "copy_columns_4",
            COPY_COLUMNS_16 = "copy_columns_16";
        SpaceToDepth(x: DevicePtr, out: DevicePtr, h: i32, w: i32, c: i32, inverse: i32):
            SPACE_TO_DEPTH_2 = "space_to_depth_2", SPACE_TO_DEPTH_4 = "space_to_depth_4";
    }
}

pub(crate) fn upload(cx: &Context, host: &HostTensor, dtype: DType) -> Result<CudaTensor> {
    let tensor = CudaTensor::new(cx, shapes::upload(host, dtype)?, dtype)?;
    let host = host.to_dtype(dtype)?;
    cx.check(cx.upload(host.bytes(), tensor.ptr(cx)))?;
    Ok(tensor)
}

pub(crate) fn download(cx: &Context, x: &CudaTensor) -> Result<HostTensor> {
    let mut bytes = vec![0u8; x.shape().numel() * x.dtype().size()];
    cx.check(cx.download(x.ptr(cx), &mut bytes))?;
    Ok(HostTensor::new(x.dtype(), x.shape(), bytes.into())?)
}

pub(crate) fn download_async(cx: &Context, x: &CudaTensor) -> Result<Pending<HostTensor>> {
    let copy = cx.check(cx.download_async(x.ptr(cx), x.shape().numel() * x.dtype().size()))?;
    let (cx, dtype, shape) = (cx.clone(), x.dtype(), x.shape().clone());
    Ok(Box::new(move || Ok(HostTensor::new(dtype, &shape, cx.check(copy.wait())?.into())?)))
}

pub(crate) fn synchronize(cx: &Context) -> Result<()> {
    cx.check(cx.wait())
}

pub(crate) fn fence(cx: &Context) -> Result<Pending<()>> {
    let (cx, mark) = (cx.clone(), cx.check(cx.mark())?);
    Ok(Box::new(move || cx.check(mark.wait().map(drop))))
}

pub(crate) fn reshape(_: &Context, x: &CudaTensor, shape: Shape) -> Result<CudaTensor> {
    Ok(x.view(0, shapes::reshape(x, &shape)?))
}

pub(crate) fn cast(cx: &Context, x: &CudaTensor, dtype: DType) -> Result<CudaTensor> {
    shapes::cast(x, dtype)?;
    if dtype == x.dtype() {
        return Ok(x.clone());
    }
    let out = CudaTensor::new(cx, x.shape(), dtype)?;
    cast_buffer(cx, x.dtype(), x.ptr(cx), dtype, out.ptr(cx), x.shape().numel())?;
    Ok(out)
}

/// Converts an image to bytes on the device, a quarter of the f32 download. Returns the buffer and its length.
fn to_bytes(cx: &Context, x: &CudaTensor, scale: f32, shift: f32) -> Result<(DeviceBuffer, usize)> {
    let n = x.shape().numel();
    let buffer = cx.allocate(n.next_multiple_of(8))?;
    let kernel = TO_BYTES.of(x.dtype());
    let parameters = ToBytes { x: x.ptr(cx), out: buffer.ptr(cx), n: n as i64, scale, shift };
    cx.launch(kernel, elementwise_grid(n), THREADS, 0, &parameters)?;
    Ok((buffer, n))
}

pub(crate) fn download_bytes(cx: &Context, x: &CudaTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
    let (buffer, n) = to_bytes(cx, x, scale, shift)?;
    let mut bytes = vec![0; n];
    cx.check(cx.download(buffer.ptr(cx), &mut bytes))?;
    Ok(bytes)
}

pub(crate) fn download_bytes_async(
    cx: &Context,
    x: &CudaTensor,
    scale: f32,
    shift: f32,
) -> Result<Pending<Vec<u8>>> {
    let (buffer, n) = to_bytes(cx, x, scale, shift)?;
    let copy = cx.check(cx.download_async(buffer.ptr(cx), n))?;
    let cx = cx.clone();
    Ok(Box::new(move || cx.check(copy.wait())))
}

pub(crate) fn slice_rows(_: &Context, x: &CudaTensor, range: Range<usize>) -> Result<CudaTensor> {
    let shape = shapes::slice_rows(x, &range)?;
    let row = x.shape().numel() / x.shape().dims()[0].max(1);
    Ok(x.view(range.start * row, shape))
}

pub(crate) fn concat_rows(cx: &Context, parts: &[&CudaTensor]) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::concat_rows(parts)?, parts[0].dtype())?;
    let mut to = out.ptr(cx);
    for part in parts {
        let bytes = part.shape().numel() * part.dtype().size();
        cx.check(cx.copy(part.ptr(cx), to, bytes))?;
        to += bytes as u64;
    }
    Ok(out)
}

pub(crate) fn write_rows(cx: &Context, x: &mut CudaTensor, first: usize, rows: &CudaTensor) -> Result<()> {
    shapes::write_rows(x, first, rows)?;
    if !x.is_unique() {
        *x = concat_rows(cx, &[x])?;
    }
    let bytes = rows.shape().numel() * rows.dtype().size();
    cx.check(cx.copy(rows.ptr(cx), x.row_ptr(cx, first), bytes))
}

pub(crate) fn concat_columns(cx: &Context, parts: &[&CudaTensor]) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::concat_columns(parts)?, parts[0].dtype())?;
    let (rows, width, size) = (out.shape().rows(), out.shape().last(), out.dtype().size());
    let mut column = 0;
    for part in parts {
        let cols = part.shape().last();
        let unit = unit(size, [cols, column, width], part.ptr(cx));
        let kernel = match unit {
            2 => COPY_COLUMNS_2,
            4 => COPY_COLUMNS_4,
            _ => COPY_COLUMNS_16,
        };
        let units = |elements: usize| int("concat_columns", elements * size / unit);
        let grid = [(rows * (cols * size / unit)).div_ceil(THREADS), 1];
        let parameters = CopyColumns {
            x: part.ptr(cx),
            out: out.ptr(cx),
            rows: rows as i64,
            width: units(cols)?,
            column: units(column)?,
            out_width: units(width)?,
        };
        cx.launch(kernel, grid, THREADS, 0, &parameters)?;
        column += cols;
    }
    Ok(out)
}

/// Matrices of the same rows, concatenated by columns: the first two where they are, more as a copy.
pub(crate) struct Concatenated {
    pub rows: usize,
    pub dtype: DType,
    /// Addresses and widths of both; the second may have no columns.
    pub ptrs: [DevicePtr; 2],
    pub widths: [usize; 2],
    _copy: Option<CudaTensor>,
}

impl Concatenated {
    pub fn new(cx: &Context, xs: &[&CudaTensor]) -> Result<Concatenated> {
        let copy = if xs.len() > 2 { Some(concat_columns(cx, xs)?) } else { None };
        let first = copy.as_ref().unwrap_or(xs[0]);
        let second = xs.get(1).filter(|_| copy.is_none());
        Ok(Concatenated {
            rows: first.shape().rows(),
            dtype: first.dtype(),
            ptrs: [first.ptr(cx), second.map_or(first.ptr(cx), |x| x.ptr(cx))],
            widths: [first.shape().last(), second.map_or(0, |x| x.shape().last())],
            _copy: copy,
        })
    }
}

/// The largest copy unit, in bytes, that element counts and an address allow.
pub(crate) fn unit(size: usize, counts: [usize; 3], at: u64) -> usize {
    let fits = |unit: usize| {
        counts.iter().all(|n| (n * size).is_multiple_of(unit)) && at.is_multiple_of(unit as u64)
    };
    if fits(16) { 16 } else { size }
}

pub(crate) fn space_to_depth(cx: &Context, x: &CudaTensor) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::space_to_depth(x)?, x.dtype())?;
    let fine = image_dims(x.shape());
    rearrange(cx, x, out, fine, 0)
}

pub(crate) fn depth_to_space(cx: &Context, x: &CudaTensor) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::depth_to_space(x)?, x.dtype())?;
    let fine = image_dims(out.shape());
    rearrange(cx, x, out, fine, 1)
}

fn rearrange(
    cx: &Context,
    x: &CudaTensor,
    out: CudaTensor,
    fine: [usize; 3],
    inverse: i32,
) -> Result<CudaTensor> {
    let kernel = if x.dtype().size() == 2 { SPACE_TO_DEPTH_2 } else { SPACE_TO_DEPTH_4 };
    let [h, w, c] = fine;
    let size = |n: usize| int("space_to_depth", n);
    let grid = [(h * w * c).div_ceil(THREADS), 1];
    let parameters =
        SpaceToDepth { x: x.ptr(cx), out: out.ptr(cx), h: size(h)?, w: size(w)?, c: size(c)?, inverse };
    cx.launch(kernel, grid, THREADS, 0, &parameters)?;
    Ok(out)
}

/// Nearest-neighbour 2x upsampling; the channels are whole vectors.
pub(crate) fn upsample(cx: &Context, x: &CudaTensor) -> Result<CudaTensor> {
    let [h, w, c] = image_dims(x.shape());
    let out = CudaTensor::new(cx, [2 * h, 2 * w, c], x.dtype())?;
    let units = c * x.dtype().size() / 16;
    let size = |n: usize| int("conv2d", n);
    let grid = [(h * w * units).div_ceil(THREADS), 1];
    let parameters = Upsample { x: x.ptr(cx), out: out.ptr(cx), h: size(h)?, w: size(w)?, c: size(units)? };
    cx.launch(UPSAMPLE, grid, THREADS, 0, &parameters)?;
    Ok(out)
}

/// Height, width and channels of an image's shape, which has been checked.
pub(crate) fn image_dims(shape: &Shape) -> [usize; 3] {
    match *shape.dims() {
        [h, w, c] => [h, w, c],
        _ => [0; 3],
    }
}

#[cfg(test)]
mod tests {
    use super::unit;

    #[test]
    fn columns_are_copied_in_the_largest_unit_that_fits() {
        assert_eq!(unit(2, [8, 16, 24], 512), 16);
        assert_eq!(unit(2, [8, 16, 24], 514), 2);
        assert_eq!(unit(2, [8, 4, 24], 512), 2);
        assert_eq!(unit(4, [4, 0, 4], 512), 16);
        assert_eq!(unit(4, [3, 0, 3], 512), 4);
    }
}
