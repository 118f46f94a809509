use kiln_ops::{Activation, Result, Tensor as _, shapes};

use super::elementwise::code;
use super::movement::image;
use super::{THREADS, by_dtype, by_rows};
use crate::context::{Context, int};
use crate::kernels::{
    GROUP_APPLY_BF16, GROUP_APPLY_F32, GROUP_APPLY_WIDE_BF16, GROUP_APPLY_WIDE_F32, GROUP_PARTS_BF16,
    GROUP_PARTS_F32, GROUP_PARTS_WIDE_BF16, GROUP_PARTS_WIDE_F32, GROUP_UNITE, GroupApply, GroupApplyWide,
    GroupParts, GroupPartsWide, GroupUnite,
};
use crate::queue::Block;
use crate::tensor::CudaTensor;

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
    let aligned = [x, weight, bias].iter().all(|t| t.is_aligned());
    let wide = channels % 8 == 0 && channels <= 8 * THREADS && aligned;
    // Of each part: how many numbers, their mean and their squared deviations.
    let parts = |count: usize| cx.block(count * groups * 3 * 4);
    let unite = |parts: &Block, count: usize| {
        let parameters = GroupUnite {
            parts: parts.at(cx),
            stats: stats.at(cx),
            count: size(count)?,
            groups: size(groups)?,
            eps,
        };
        cx.launch(GROUP_UNITE, [groups, 1], THREADS, 0, &parameters)
    };
    if wide {
        let chunks = pixels.div_ceil(HELD * (THREADS / (channels / 8)));
        let blocks = chunks.min(RESIDENT * cx.gpu().processors.max(1) as usize);
        let parts = parts(blocks)?;
        let kernel = by_dtype(x.dtype(), GROUP_PARTS_WIDE_F32, GROUP_PARTS_WIDE_BF16);
        let parameters = GroupPartsWide {
            x: x.at(cx),
            parts: parts.at(cx),
            pixels: pixels as i64,
            chunks: size(chunks)?,
            channels: size(channels)?,
            groups: size(groups)?,
        };
        cx.launch(kernel, [blocks, 1], THREADS, 0, &parameters)?;
        unite(&parts, blocks)?;
        let kernel = by_dtype(x.dtype(), GROUP_APPLY_WIDE_F32, GROUP_APPLY_WIDE_BF16);
        let parameters = GroupApplyWide {
            x: x.at(cx),
            stats: stats.at(cx),
            weight: weight.at(cx),
            bias: bias.at(cx),
            out: out.at(cx),
            pixels: pixels as i64,
            chunks: size(chunks)?,
            channels: size(channels)?,
            width,
            f: code(f),
        };
        cx.launch(kernel, [blocks, 1], THREADS, 0, &parameters)?;
        return Ok(out);
    }
    let run = (RUN / channels).max(1);
    let runs = pixels.div_ceil(run);
    let parts = parts(runs)?;
    let kernel = by_dtype(x.dtype(), GROUP_PARTS_F32, GROUP_PARTS_BF16);
    let parameters = GroupParts {
        x: x.at(cx),
        parts: parts.at(cx),
        pixels: pixels as i64,
        channels: size(channels)?,
        groups: size(groups)?,
        run: size(run)?,
    };
    cx.launch(kernel, [runs, groups], THREADS, 0, &parameters)?;
    unite(&parts, runs)?;
    let kernel = by_dtype(x.dtype(), GROUP_APPLY_F32, GROUP_APPLY_BF16);
    let parameters = GroupApply {
        x: x.at(cx),
        stats: stats.at(cx),
        weight: weight.at(cx),
        bias: bias.at(cx),
        out: out.at(cx),
        pixels: pixels as i64,
        channels: size(channels)?,
        width,
        f: code(f),
    };
    cx.launch(kernel, by_rows(pixels, channels), THREADS, 0, &parameters)?;
    Ok(out)
}
