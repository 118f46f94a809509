use std::ops::Range;

use kiln_ops::{Later, Result, Tensor as _, shapes};
use kiln_tensor::{DType, Shape};

use super::elementwise::cast_block;
use super::{THREADS, by_dtype, flat};
use crate::context::{Context, int};
use crate::kernels::{
    COPY_COLUMNS_2, COPY_COLUMNS_4, COPY_COLUMNS_16, CopyColumns, SPACE_TO_DEPTH_2, SPACE_TO_DEPTH_4,
    SpaceToDepth, TO_BYTES_BF16, TO_BYTES_F32, ToBytes, UPSAMPLE, Upsample,
};
use crate::queue::Block;
use crate::tensor::CudaTensor;

pub(crate) fn reshape(x: &CudaTensor, shape: &Shape) -> Result<CudaTensor> {
    Ok(x.view(0, shapes::reshape(x, shape)?))
}

pub(crate) fn cast(cx: &Context, x: &CudaTensor, dtype: DType) -> Result<CudaTensor> {
    shapes::cast(x, dtype)?;
    if dtype == x.dtype() {
        return Ok(x.clone());
    }
    let out = CudaTensor::new(cx, x.shape(), dtype)?;
    cast_block(cx, x.dtype(), x.at(cx), dtype, out.at(cx), x.shape().numel())?;
    Ok(out)
}

/// A picture's bytes on the device, and how many: a quarter of what its floats would be to copy.
fn to_bytes(cx: &Context, x: &CudaTensor, scale: f32, shift: f32) -> Result<(Block, usize)> {
    let n = x.shape().numel();
    let block = cx.block(n.next_multiple_of(8))?;
    let kernel = by_dtype(x.dtype(), TO_BYTES_F32, TO_BYTES_BF16);
    let parameters = ToBytes { x: x.at(cx), out: block.at(cx), n: n as i64, scale, shift };
    cx.launch(kernel, flat(n), THREADS, 0, &parameters)?;
    Ok((block, n))
}

pub(crate) fn bytes(cx: &Context, x: &CudaTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
    let (block, n) = to_bytes(cx, x, scale, shift)?;
    let mut bytes = vec![0; n];
    cx.done(cx.download(block.at(cx), &mut bytes))?;
    Ok(bytes)
}

pub(crate) fn bytes_later(cx: &Context, x: &CudaTensor, scale: f32, shift: f32) -> Result<Later<Vec<u8>>> {
    let (block, n) = to_bytes(cx, x, scale, shift)?;
    let arrival = cx.done(cx.download_later(block.at(cx), n))?;
    let cx = cx.clone();
    Ok(Box::new(move || cx.done(arrival.wait())))
}

pub(crate) fn slice_rows(x: &CudaTensor, range: Range<usize>) -> Result<CudaTensor> {
    let shape = shapes::slice_rows(x, &range)?;
    let row = x.shape().numel() / x.shape().dims()[0].max(1);
    Ok(x.view(range.start * row, shape))
}

pub(crate) fn concat_rows(cx: &Context, parts: &[&CudaTensor]) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::concat_rows(parts)?, parts[0].dtype())?;
    let mut to = out.at(cx);
    for part in parts {
        let bytes = part.shape().numel() * part.dtype().size();
        cx.done(cx.copy(part.at(cx), to, bytes))?;
        to += bytes as u64;
    }
    Ok(out)
}

pub(crate) fn concat_columns(cx: &Context, parts: &[&CudaTensor]) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::concat_columns(parts)?, parts[0].dtype())?;
    let (rows, width, size) = (out.shape().rows(), out.shape().last(), out.dtype().size());
    let mut column = 0;
    for part in parts {
        let cols = part.shape().last();
        let unit = unit(size, [cols, column, width], part.at(cx));
        let kernel = match unit {
            2 => COPY_COLUMNS_2,
            4 => COPY_COLUMNS_4,
            _ => COPY_COLUMNS_16,
        };
        let units = |elements: usize| int("concat_columns", elements * size / unit);
        let grid = [(rows * (cols * size / unit)).div_ceil(THREADS), 1];
        let parameters = CopyColumns {
            x: part.at(cx),
            out: out.at(cx),
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

/// The largest unit, in bytes, that counts of elements and an address allow.
fn unit(size: usize, counts: [usize; 3], at: u64) -> usize {
    let fits = |unit: usize| {
        counts.iter().all(|n| (n * size).is_multiple_of(unit)) && at.is_multiple_of(unit as u64)
    };
    if fits(16) { 16 } else { size }
}

pub(crate) fn space_to_depth(cx: &Context, x: &CudaTensor) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::space_to_depth(x)?, x.dtype())?;
    let fine = image(x.shape());
    rearrange(cx, x, out, fine, 0)
}

pub(crate) fn depth_to_space(cx: &Context, x: &CudaTensor) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::depth_to_space(x)?, x.dtype())?;
    let fine = image(out.shape());
    rearrange(cx, x, out, fine, 1)
}

fn rearrange(
    cx: &Context,
    x: &CudaTensor,
    out: CudaTensor,
    fine: [usize; 3],
    back: i32,
) -> Result<CudaTensor> {
    let kernel = by_dtype(x.dtype(), SPACE_TO_DEPTH_4, SPACE_TO_DEPTH_2);
    let [h, w, c] = fine;
    let size = |n: usize| int("space_to_depth", n);
    let grid = [(h * w * c).div_ceil(THREADS), 1];
    let parameters =
        SpaceToDepth { x: x.at(cx), out: out.at(cx), h: size(h)?, w: size(w)?, c: size(c)?, back };
    cx.launch(kernel, grid, THREADS, 0, &parameters)?;
    Ok(out)
}

/// Every pixel four times; the channels are whole vectors.
pub(crate) fn upsample(cx: &Context, x: &CudaTensor) -> Result<CudaTensor> {
    let [h, w, c] = image(x.shape());
    let out = CudaTensor::new(cx, [2 * h, 2 * w, c], x.dtype())?;
    let units = c * x.dtype().size() / 16;
    let size = |n: usize| int("conv2d", n);
    let grid = [(h * w * units).div_ceil(THREADS), 1];
    let parameters = Upsample { x: x.at(cx), out: out.at(cx), h: size(h)?, w: size(w)?, c: size(units)? };
    cx.launch(UPSAMPLE, grid, THREADS, 0, &parameters)?;
    Ok(out)
}

/// Height, width and channels of a checked picture.
pub(crate) fn image(shape: &Shape) -> [usize; 3] {
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
