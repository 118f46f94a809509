use kiln_ops::{Activation, Result, Tensor as _, shapes};

use super::elementwise::code;
use super::movement::image;
use super::{THREADS, by_dtype, by_rows};
use crate::device::launch;
use crate::sources::GROUP_NORM;
use crate::{Context, CudaTensor, int};

/// Elements that one block takes the mean and deviations of.
const RUN: usize = 1 << 15;

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
    let run = (RUN / channels).max(1);
    let runs = pixels.div_ceil(run);
    // Count of a run is known; of each: its mean and squared deviations.
    let parts = cx.block(runs * groups * 2 * 4)?;
    let stats = cx.block(groups * 2 * 4)?;
    let wide = channels % 8 == 0 && channels <= 8 * THREADS && x.at().is_multiple_of(16);
    let (name, grid) = match wide {
        true => (by_dtype(x.dtype(), "group_parts_wide_f32", "group_parts_wide_bf16"), [runs, 1]),
        false => (by_dtype(x.dtype(), "group_parts_f32", "group_parts_bf16"), [runs, groups]),
    };
    cx.done(launch!(cx.device, GROUP_NORM, name, grid, THREADS, 0;
        x.at(), parts.at(), pixels as i64, size(channels)?, size(groups)?, size(run)?))?;
    let width = size(channels / groups)?;
    cx.done(launch!(cx.device, GROUP_NORM, "group_unite", [groups, 1], 32, 0;
        parts.at(), stats.at(), size(runs)?, pixels as i64, size(run)?, width, size(groups)?, eps))?;
    let name = by_dtype(x.dtype(), "group_apply_f32", "group_apply_bf16");
    cx.done(launch!(cx.device, GROUP_NORM, name, by_rows(pixels, channels), THREADS, 0;
        x.at(), stats.at(), weight.at(), bias.at(), out.at(), pixels as i64, size(channels)?, width, code(f)))?;
    Ok(out)
}
