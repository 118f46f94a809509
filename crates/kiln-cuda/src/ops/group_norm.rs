//! Group norm in three launches: partial moments, their merge, and the result. A convolution's result brings its moments.

use kiln_ops::{Activation, Result, Tensor as _, shapes};

use super::elementwise::activation_code;
use super::grid::{THREADS, row_grid};
use super::movement::image_dims;
use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::sys::driver::DevicePtr;
use crate::tensor::{CudaTensor, Moments};

kernels! {
    "group_norm" {
        GroupNormMerge(partials: DevicePtr, stats: DevicePtr, count: i32, groups: i32, parts: i32, eps: f32):
            GROUP_NORM_MERGE = "group_norm_merge";
        GroupNormPartial(x: DevicePtr, partials: DevicePtr, pixels: i64, channels: i32, groups: i32,
            pixels_per_block: i32):
            GROUP_NORM_PARTIAL = "group_norm_partial" by dtype;
        GroupNormApply(x: DevicePtr, stats: DevicePtr, weight: DevicePtr, bias: DevicePtr,
            out: DevicePtr, pixels: i64, channels: i32, width: i32, f: i32):
            GROUP_NORM_APPLY = "group_norm_apply" by dtype;
        GroupNormPartialVector(x: DevicePtr, partials: DevicePtr, pixels: i64, chunks: i32,
            channels: i32, groups: i32):
            GROUP_NORM_PARTIAL_VECTOR = "group_norm_partial_vector" by dtype;
        GroupNormApplyVector(x: DevicePtr, stats: DevicePtr, weight: DevicePtr, bias: DevicePtr,
            out: DevicePtr, pixels: i64, chunks: i32, channels: i32, width: i32, backward: i32, f: i32):
            GROUP_NORM_APPLY_VECTOR = "group_norm_apply_vector" by dtype;
    }
}

/// Elements per block of the scalar kernels.
const ELEMENTS_PER_BLOCK: usize = 1 << 15;

/// Pixels a thread holds in registers in the vector kernels, as in `group_norm.cu`.
const PIXELS_PER_THREAD: usize = 4;
/// Resident blocks per multiprocessor of the vector kernels.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

pub(crate) fn group_norm(
    cx: &Context,
    x: &CudaTensor,
    groups: usize,
    weight: &CudaTensor,
    bias: &CudaTensor,
    eps: f32,
    f: Option<Activation>,
) -> Result<CudaTensor> {
    let shape = shapes::group_norm(x, groups, weight, bias)?;
    let [h, w, channels] = image_dims(&shape);
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let pixels = h * w;
    if pixels == 0 || channels == 0 {
        return Ok(out);
    }
    let size = |n: usize| int("group_norm", n);
    let width = channels / groups;
    let aligned = [x, weight, bias].iter().all(|t| t.is_aligned());
    let vector = channels % 8 == 0 && channels <= 8 * THREADS && aligned;
    let chunks = pixels.div_ceil(PIXELS_PER_THREAD * (THREADS / (channels / 8).max(1)).max(1));
    let vector_blocks = chunks.min(BLOCKS_PER_MULTIPROCESSOR * cx.gpu().multiprocessors.max(1) as usize);
    let moments = x.moments().filter(|_| width.is_multiple_of(Moments::CHANNELS));
    let (partials, count, parts) = match moments {
        Some(moments) => (moments.buffer.clone(), moments.blocks, width / Moments::CHANNELS),
        None => {
            let pixels_per_block = (ELEMENTS_PER_BLOCK / channels).max(1);
            let blocks = if vector { vector_blocks } else { pixels.div_ceil(pixels_per_block) };
            // Per partial result: count, mean and sum of squared deviations.
            let partials = cx.allocate(blocks * groups * 3 * 4)?;
            if vector {
                let parameters = GroupNormPartialVector {
                    x: x.ptr(cx),
                    partials: partials.ptr(cx),
                    pixels: pixels as i64,
                    chunks: size(chunks)?,
                    channels: size(channels)?,
                    groups: size(groups)?,
                };
                let kernel = GROUP_NORM_PARTIAL_VECTOR.of(x.dtype());
                cx.launch(kernel, [blocks, 1], THREADS, 0, &parameters)?;
            } else {
                let parameters = GroupNormPartial {
                    x: x.ptr(cx),
                    partials: partials.ptr(cx),
                    pixels: pixels as i64,
                    channels: size(channels)?,
                    groups: size(groups)?,
                    pixels_per_block: size(pixels_per_block)?,
                };
                let kernel = GROUP_NORM_PARTIAL.of(x.dtype());
                cx.launch(kernel, [blocks, groups], THREADS, 0, &parameters)?;
            }
            (partials, blocks, 1)
        }
    };
    let stats = cx.allocate(groups * 2 * 4)?;
    let parameters = GroupNormMerge {
        partials: partials.ptr(cx),
        stats: stats.ptr(cx),
        count: size(count)?,
        groups: size(groups)?,
        parts: size(parts)?,
        eps,
    };
    cx.launch(GROUP_NORM_MERGE, [groups, 1], THREADS, 0, &parameters)?;
    if vector {
        let parameters = GroupNormApplyVector {
            x: x.ptr(cx),
            stats: stats.ptr(cx),
            weight: weight.ptr(cx),
            bias: bias.ptr(cx),
            out: out.ptr(cx),
            pixels: pixels as i64,
            chunks: size(chunks)?,
            channels: size(channels)?,
            width: size(width)?,
            // The end was written last; otherwise the beginning has been read last, for the partial results.
            backward: i32::from(moments.is_some()),
            f: activation_code(f),
        };
        cx.launch(GROUP_NORM_APPLY_VECTOR.of(x.dtype()), [vector_blocks, 1], THREADS, 0, &parameters)?;
    } else {
        let parameters = GroupNormApply {
            x: x.ptr(cx),
            stats: stats.ptr(cx),
            weight: weight.ptr(cx),
            bias: bias.ptr(cx),
            out: out.ptr(cx),
            pixels: pixels as i64,
            channels: size(channels)?,
            width: size(width)?,
            f: activation_code(f),
        };
        cx.launch(GROUP_NORM_APPLY.of(x.dtype()), row_grid(pixels, channels), THREADS, 0, &parameters)?;
    }
    Ok(out)
}
