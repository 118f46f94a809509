use kiln_ops::{Activation, Result, Tensor as _, shapes};

use super::elementwise::code;
use super::movement::image;
use super::{THREADS, by_dtype, by_rows};
use crate::device::{Block, launch};
use crate::sources::GROUP_NORM;
use crate::{Context, CudaTensor, int};

/// Elements of one group that a block takes the mean and deviations of, where channels are no whole vectors.
const RUN: usize = 1 << 15;

/// Pixels that a thread holds at once, where they are; the number is that in `group_norm.cu`.
const HELD: usize = 4;
/// Blocks that a multiprocessor has room for there.
const RESIDENT: usize = 4;

pub(crate) fn group_norm(
    cx: &Context,
    x: &CudaTensor,
    groups: usize,
    [weight, bias]: [&CudaTensor; 2],
    eps: f32,
    f: Option<Activation>,
) -> Result<CudaTensor> {
    let shape = shapes::group_norm(x, groups, weight, bias)?;
    let [h, w, channels] = image(&shape);
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let pixels = h * w;
    if pixels == 0 || channels == 0 {
        return Ok(out);
    }
    let size = |n: usize| int("group_norm", n);
    let stats = cx.block(groups * 2 * 4)?;
    let width = size(channels / groups)?;
    let aligned = [x, weight, bias].iter().all(|t| t.at().is_multiple_of(16));
    let wide = channels % 8 == 0 && channels <= 8 * THREADS && aligned;
    // Of each part: how many numbers, their mean and their squared deviations.
    let parts = |count: usize| cx.block(count * groups * 3 * 4);
    let unite = |parts: &Block, count: usize| {
        cx.done(launch!(cx.device, GROUP_NORM, "group_unite", [groups, 1], THREADS, 0;
            parts.at(), stats.at(), size(count)?, size(groups)?, eps))
    };
    if wide {
        let chunks = pixels.div_ceil(HELD * (THREADS / (channels / 8)));
        let blocks = chunks.min(RESIDENT * cx.device.gpu.processors.max(1) as usize);
        let parts = parts(blocks)?;
        let name = by_dtype(x.dtype(), "group_parts_wide_f32", "group_parts_wide_bf16");
        cx.done(launch!(cx.device, GROUP_NORM, name, [blocks, 1], THREADS, 0;
            x.at(), parts.at(), pixels as i64, size(chunks)?, size(channels)?, size(groups)?))?;
        unite(&parts, blocks)?;
        let name = by_dtype(x.dtype(), "group_apply_wide_f32", "group_apply_wide_bf16");
        cx.done(launch!(cx.device, GROUP_NORM, name, [blocks, 1], THREADS, 0;
            x.at(), stats.at(), weight.at(), bias.at(), out.at(), pixels as i64, size(chunks)?, size(channels)?,
            width, code(f)))?;
        return Ok(out);
    }
    let run = (RUN / channels).max(1);
    let runs = pixels.div_ceil(run);
    let parts = parts(runs)?;
    let name = by_dtype(x.dtype(), "group_parts_f32", "group_parts_bf16");
    cx.done(launch!(cx.device, GROUP_NORM, name, [runs, groups], THREADS, 0;
        x.at(), parts.at(), pixels as i64, size(channels)?, size(groups)?, size(run)?))?;
    unite(&parts, runs)?;
    let name = by_dtype(x.dtype(), "group_apply_f32", "group_apply_bf16");
    cx.done(launch!(cx.device, GROUP_NORM, name, by_rows(pixels, channels), THREADS, 0;
        x.at(), stats.at(), weight.at(), bias.at(), out.at(), pixels as i64, size(channels)?, width, code(f)))?;
    Ok(out)
}
