use kiln_ops::{ConvGeometry, Result, shapes};
use kiln_tensor::Shape;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::{DType, bf16};

use super::movement::image;
use super::output::{Output, Part};
use crate::Context;
use crate::buffer::Buffer;
use crate::element::{Source, convert};
use crate::gemm::{
    DEPTH, Extent, FEW_COLS, Finished, Narrow, Rows, Sink, emit, multiply, narrow, narrow_scratch, pack_left,
    pack_right, padded, widen_rows,
};
#[cfg(target_arch = "x86_64")]
use crate::gemm::{Halves, Panels, product_by_rows};
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::parallel::Disjoint;
use crate::simd::Simd;
use crate::tensor::{CpuTensor, Stored, by_dtype};
use crate::weight::{CpuConv, Placed};

pub(crate) fn conv2d(
    cx: &Context,
    x: &CpuTensor,
    conv: &CpuConv,
    geometry: ConvGeometry,
    residual: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let shape = shapes::conv2d(x, conv.size, &geometry, residual)?;
    by_dtype!(x, T => run(cx, T::of(x), image(x), conv, geometry, residual.map(T::of), shape))
}

fn run<T: Stored>(
    cx: &Context,
    x: &[T],
    size: [usize; 3],
    conv: &CpuConv,
    geometry: ConvGeometry,
    residual: Option<&[T]>,
    shape: Shape,
) -> Result<CpuTensor> {
    let [out_channels, _, kernel_height, kernel_width] = conv.size;
    let width = shape.dims()[1];
    let patches = Patches { x, size, geometry, kernel: [kernel_height, kernel_width], width };
    let mut out = cx.buffer::<T>(shape.numel())?;
    let part = Part { start: 0, width: out_channels, data: Disjoint::new(&mut out) };
    let bias = conv.bias.as_deref();
    let output = Output { bias, gate: None, residual, width: out_channels, parts: vec![part], stream: false };
    let pixels = shape.dims()[0] * width;
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), Some(patches)) = (cx.level, patches.halves()) {
        let kernel = Panels::of_halves(cx, amx, &conv.kernel, 0..out_channels, conv.kernel.cols)?;
        product_by_rows(cx, amx, &patches, pixels, &kernel, &output)?;
        drop(output);
        return Ok(T::wrap(out, shape));
    }
    if out_channels <= FEW_COLS {
        by_dots(cx, &patches, conv, pixels, &output)?;
    } else {
        by_tiles(cx, &patches, conv, pixels, &output)?;
    }
    drop(output);
    Ok(T::wrap(out, shape))
}

/// Sums that a thread collects at once: enough pixels that reading the kernel is paid for, few enough that the sums
/// stay in the second-level cache.
const SUMS_AT_ONCE: usize = 1 << 17;

fn by_tiles(
    cx: &Context,
    patches: &impl Rows,
    conv: &CpuConv,
    pixels: usize,
    output: &impl Sink,
) -> Result<()> {
    let panels = pack_kernel(cx, conv)?;
    let (cols, depth) = (conv.kernel.rows, conv.kernel.cols);
    let count = cols.div_ceil(cx.level.tile_cols());
    let stride = count * cx.level.tile_cols();
    let tile_rows = cx.level.tile_rows();
    let fair = pixels.div_ceil(4 * cx.pool.threads());
    let rows = (SUMS_AT_ONCE / stride).clamp(tile_rows, 512).min(fair).next_multiple_of(tile_rows);
    let scratch = || Ok((cx.buffer(rows * DEPTH)?, cx.buffer(rows * stride)?));
    cx.pool.each_with(pixels.div_ceil(rows), scratch, |task, (left, sums)| {
        let first = task * rows;
        let rows = rows.min(pixels - first);
        for from in (0..depth).step_by(DEPTH) {
            let deep = DEPTH.min(depth - from);
            pack_left(cx.level, patches, first, from, deep, &mut left[..rows * DEPTH]);
            let size = Extent { rows, panels: count, depth: deep, stride };
            multiply(cx.level, size, left, &panels[from * stride..][..deep * stride], sums, from > 0);
        }
        let done = Finished { rows: first..first + rows, cols: 0..cols, sums, stride };
        emit(cx.level, output, done);
    })
}

/// For a kernel of very few channels, such as the last one of a decoder.
fn by_dots(
    cx: &Context,
    patches: &impl Rows,
    conv: &CpuConv,
    pixels: usize,
    output: &impl Sink,
) -> Result<()> {
    const PIXELS_AT_ONCE: usize = 256;
    let (cols, depth) = (conv.kernel.rows, conv.kernel.cols);
    let mut right = cx.buffer::<f32>(cols * padded(depth))?;
    right.fill(0.0);
    widen_rows(cx.level, &Placed { stack: &conv.kernel, at: 0 }, depth, padded(depth), &mut right);
    let by = Narrow { source: patches, depth, right: &right, cols };
    let scratch = || cx.buffer(narrow_scratch(depth));
    cx.pool.each_with(pixels.div_ceil(PIXELS_AT_ONCE), scratch, |task, scratch| {
        let first = task * PIXELS_AT_ONCE;
        let end = pixels.min(first + PIXELS_AT_ONCE);
        let mut sums = [0.0; PIXELS_AT_ONCE * FEW_COLS];
        narrow(cx.level, &by, first, scratch, &mut sums[..(end - first) * FEW_COLS]);
        emit(cx.level, output, Finished { rows: first..end, cols: 0..cols, sums: &sums, stride: FEW_COLS });
    })
}

/// The whole kernel as panels, block after block; at most a few MiB, and read again for every strip of pixels.
fn pack_kernel(cx: &Context, conv: &CpuConv) -> Result<Buffer<f32>> {
    let (depth, cols) = (conv.kernel.cols, cx.level.tile_cols());
    let count = conv.kernel.rows.div_ceil(cols);
    let mut panels = cx.buffer::<f32>(count * cols * depth)?;
    let out = Disjoint::new(&mut panels);
    let kernel = Placed { stack: &conv.kernel, at: 0 };
    let blocks = depth.div_ceil(DEPTH);
    cx.pool.each(blocks * count, |task| {
        let (block, panel) = (task / count, task % count);
        let from = block * DEPTH;
        let deep = DEPTH.min(depth - from);
        let start = (from * count + panel * deep) * cols;
        // SAFETY: every task has a panel of its own.
        let out = unsafe { out.slice(start..start + cols * deep) };
        pack_right(cx.level, &kernel, panel * cols, from, deep, out);
    });
    Ok(panels)
}

/// The left operand: row `p` is what the kernel sees of the picture at output pixel `p`, never stored as a whole.
struct Patches<'a, T> {
    x: &'a [T],
    /// Height, width and channels of the input.
    size: [usize; 3],
    geometry: ConvGeometry,
    kernel: [usize; 2],
    /// Of the output.
    width: usize,
}

impl<'a, T: Stored> Patches<'a, T> {
    /// The same patches where they are bf16.
    #[cfg(target_arch = "x86_64")]
    fn halves(&self) -> Option<Patches<'a, bf16>> {
        let Patches { x, size, geometry, kernel, width } = *self;
        (T::DTYPE == DType::BF16).then(|| Patches {
            x: bytemuck::cast_slice(x),
            size,
            geometry,
            kernel,
            width,
        })
    }
}

impl<T: Source> Patches<'_, T> {
    /// Where element `from` of patch `row` lies.
    #[inline(always)]
    fn place(&self, row: usize, from: usize) -> Place {
        let channels = self.size[2];
        let stride = self.geometry.stride;
        Place {
            y: row / self.width * stride,
            x: row % self.width * stride,
            tap: from / channels,
            channel: from % channels,
        }
    }

    /// Up to `most` elements of a patch that lie side by side, or how many zeros there are; moves on behind them.
    #[inline(always)]
    fn run(&self, place: &mut Place, most: usize) -> (usize, Option<&[T]>) {
        let [height, width, channels] = self.size;
        let [top, _, left, _] = self.geometry.padding;
        let shift = usize::from(self.geometry.upsample);
        let count = most.min(channels - place.channel);
        // A place in the padding wraps around below zero and so lies outside like one beyond the end.
        let y = (place.y + place.tap / self.kernel[1]).wrapping_sub(top) >> shift;
        let x = (place.x + place.tap % self.kernel[1]).wrapping_sub(left) >> shift;
        let at = (y < height && x < width).then(|| (y * width + x) * channels + place.channel);
        (place.tap, place.channel) = (place.tap + 1, 0);
        (count, at.map(|at| &self.x[at..][..count]))
    }
}

/// A place in the patch of an output pixel.
struct Place {
    /// The pixel under the kernel's first tap, before padding.
    y: usize,
    x: usize,
    tap: usize,
    channel: usize,
}

impl<T: Source> Rows for Patches<'_, T> {
    #[inline(always)]
    fn fill<S: Simd>(&self, s: S, row: usize, from: usize, mut out: &mut [f32]) {
        let mut place = self.place(row, from);
        while !out.is_empty() {
            let (count, values) = self.run(&mut place, out.len());
            let (here, rest) = out.split_at_mut(count);
            match values {
                Some(values) => convert(s, values, here),
                None => here.fill(0.0),
            }
            out = rest;
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Halves for Patches<'_, bf16> {
    #[inline(always)]
    fn copy(&self, row: usize, from: usize, mut out: &mut [bf16]) {
        let mut place = self.place(row, from);
        while !out.is_empty() {
            let (count, values) = self.run(&mut place, out.len());
            let (here, rest) = out.split_at_mut(count);
            match values {
                Some(values) => here.copy_from_slice(values),
                None => here.fill(bf16::ZERO),
            }
            out = rest;
        }
    }
}
