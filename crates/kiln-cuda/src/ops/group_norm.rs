use kiln_ops::{Activation, Result, Tensor as _, shapes};

use super::elementwise::code;
use super::movement::image;
use super::{THREADS, by_dtype, by_rows};
use crate::device::launch;
use crate::sources::GROUP_NORM;
use crate::{Context, CudaTensor, int};

/// Elements that one block takes the mean and deviations of.
const RUN: usize = 1 << 15;

/// Pixels that a thread holds where a block is a whole number of pixels and of groups; the number is that in `group_norm.cu`.
const HELD: usize = 8;

/// Whether it is, each group having at most a warp of threads.
fn held(channels: usize, groups: usize) -> bool {
    channels.is_multiple_of(8)
        && THREADS.is_multiple_of(channels / 8)
        && (8..=THREADS).contains(&groups)
        && THREADS.is_multiple_of(groups)
}

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
    let held = held(channels, groups) && [x, weight, bias].iter().all(|t| t.at().is_multiple_of(16));
    let run = if held { HELD * 8 * THREADS / channels } else { (RUN / channels).max(1) };
    let runs = pixels.div_ceil(run);
    // Count of a run is known; of each: its mean and squared deviations.
    let parts = cx.block(runs * groups * 2 * 4)?;
    let stats = cx.block(groups * 2 * 4)?;
    let wide = channels % 8 == 0 && channels <= 8 * THREADS && x.at().is_multiple_of(16);
    let (name, grid) = match (held, wide) {
        (true, _) => (by_dtype(x.dtype(), "group_parts_held_f32", "group_parts_held_bf16"), [runs, 1]),
        (_, true) => (by_dtype(x.dtype(), "group_parts_wide_f32", "group_parts_wide_bf16"), [runs, 1]),
        _ => (by_dtype(x.dtype(), "group_parts_f32", "group_parts_bf16"), [runs, groups]),
    };
    cx.done(launch!(cx.device, GROUP_NORM, name, grid, THREADS, 0;
        x.at(), parts.at(), pixels as i64, size(channels)?, size(groups)?, size(run)?))?;
    let width = size(channels / groups)?;
    cx.done(launch!(cx.device, GROUP_NORM, "group_unite", [groups, 1], THREADS, 0;
        parts.at(), stats.at(), size(runs)?, pixels as i64, size(run)?, width, size(groups)?, eps))?;
    if held {
        let name = by_dtype(x.dtype(), "group_apply_held_f32", "group_apply_held_bf16");
        cx.done(launch!(cx.device, GROUP_NORM, name, [runs, 1], THREADS, 0;
            x.at(), stats.at(), weight.at(), bias.at(), out.at(), pixels as i64, size(channels)?, width,
            size(run)?, code(f)))?;
        return Ok(out);
    }
    let name = by_dtype(x.dtype(), "group_apply_f32", "group_apply_bf16");
    cx.done(launch!(cx.device, GROUP_NORM, name, by_rows(pixels, channels), THREADS, 0;
        x.at(), stats.at(), weight.at(), bias.at(), out.at(), pixels as i64, size(channels)?, width, code(f)))?;
    Ok(out)
}
