//! 2-D convolutions as matrix products of image patches (im2col) with the kernel. Patches are made row by row inside the
//! product and never stored as a whole.

use kiln_ops::{ConvGeometry, Result, shapes};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use kiln_tensor::DType;
use kiln_tensor::Shape;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::bf16;

use super::epilogue::{FusedEpilogue, OutputColumns};
use super::movement::image_dims;
use crate::Context;
use crate::buffer::Buffer;
use crate::element::{Scalar, convert};
#[cfg(target_arch = "x86_64")]
use crate::gemm::{Bf16Rows, TiledOperand, amx_conv_gemm};
use crate::gemm::{
    Block, BlockGrid, Epilogue, GemmSize, PackedFormat, RowSource, SMALL_N, ScratchSizes, SmallNOperands,
    SumBlock, gemm_small_n, padded_depth, run_epilogue, small_n_scratch_len, widen_rows,
};
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::matrix::ZeroPadded;
use crate::parallel::DisjointMut;
use crate::simd::{KC, Simd};
use crate::tensor::{CpuTensor, TensorElement, by_dtype};
use crate::weight::CpuConv;

pub(crate) fn conv2d(
    cx: &Context,
    x: &CpuTensor,
    conv: &CpuConv,
    geometry: ConvGeometry,
    residual: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let shape = shapes::conv2d(x, conv.size, &geometry, residual)?;
    by_dtype!(x, T => {
        run(cx, T::elements(x), image_dims(x), conv, geometry, residual.map(T::elements), shape)
    })
}

fn run<T: TensorElement>(
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
    let epilogue = FusedEpilogue {
        bias: conv.bias.as_deref(),
        gate: None,
        residual,
        width: out_channels,
        outputs: vec![OutputColumns { start: 0, width: out_channels, data: DisjointMut::new(&mut out) }],
        stream: false,
    };
    let pixels = shape.dims()[0] * width;
    multiply_patches(cx, &patches, conv, pixels, &epilogue)?;
    drop(epilogue);
    Ok(T::into_tensor(out, shape))
}

/// Computes the output pixels with the product that suits the instruction set and the number of channels.
fn multiply_patches<T: TensorElement>(
    cx: &Context,
    patches: &Patches<'_, T>,
    conv: &CpuConv,
    pixels: usize,
    epilogue: &impl Epilogue,
) -> Result<()> {
    let out_channels = conv.kernel.rows;
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), Some(patches)) = (cx.level, patches.as_bf16()) {
        let kernel = TiledOperand::pack_bf16(cx, amx, &conv.kernel, 0..out_channels, conv.kernel.cols)?;
        return amx_conv_gemm(cx, amx, &patches, pixels, &kernel, epilogue);
    }
    if out_channels <= SMALL_N {
        return conv_small_n(cx, patches, conv, pixels, epilogue);
    }
    #[cfg(target_arch = "aarch64")]
    if let (Some(bf16), DType::BF16) = (cx.level.bf16(), T::DTYPE) {
        return conv_packed(cx, bf16, patches, conv, pixels, epilogue);
    }
    conv_packed(cx, cx.level, patches, conv, pixels, epilogue)
}

/// Maximum rows of a strip.
const MAX_STRIP_ROWS: usize = 512;

/// The blocked product with operands packed in this format: strips of pixels with enough rows to pay for reading the kernel,
/// and few enough that their sums stay in the L2 cache.
fn conv_packed<P: PackedFormat>(
    cx: &Context,
    format: P,
    patches: &impl RowSource,
    conv: &CpuConv,
    pixels: usize,
    epilogue: &impl Epilogue,
) -> Result<()> {
    let panels = pack_kernel(cx, format, conv)?;
    let (cols, depth) = (conv.kernel.rows, conv.kernel.cols);
    let count = cols.div_ceil(format.tile_cols());
    let stride = count * format.tile_cols();
    let (threads, tile_rows) = (cx.pool.threads(), format.tile_rows());
    let grid = BlockGrid::row_strips(threads, [pixels, cols], stride, tile_rows, MAX_STRIP_ROWS);
    let scratch = ScratchSizes {
        packed: grid.block_rows * KC * size_of::<P::Element>(),
        sums: grid.block_rows * stride,
        ..ScratchSizes::default()
    };
    grid.run(cx, scratch, |task, scratch| {
        let Block { rows, cols } = task.block;
        let left: &mut [P::Element] = bytemuck::cast_slice_mut(&mut scratch.packed);
        for from in (0..depth).step_by(KC) {
            let kc = KC.min(depth - from);
            format.pack_left(patches, rows.start, from, kc, &mut left[..rows.len() * KC]);
            let size = GemmSize { rows: rows.len(), panels: count, depth: kc, stride };
            let right = &panels[from * stride..][..format.panels_len(count, kc)];
            format.multiply(size, left, right, &mut scratch.sums, from > 0);
        }
        run_epilogue(cx.level, epilogue, SumBlock { rows, cols, sums: &scratch.sums, stride });
    })
}

/// The product for very few output channels, such as a decoder's last convolution.
fn conv_small_n(
    cx: &Context,
    patches: &impl RowSource,
    conv: &CpuConv,
    pixels: usize,
    epilogue: &impl Epilogue,
) -> Result<()> {
    const PIXELS_PER_TASK: usize = 256;
    let (cols, depth) = (conv.kernel.rows, conv.kernel.cols);
    let mut right = cx.buffer::<f32>(cols * padded_depth(depth))?;
    right.fill(0.0);
    let kernel = ZeroPadded { matrix: &conv.kernel, first_row: 0 };
    widen_rows(cx.level, &kernel, depth, padded_depth(depth), &mut right);
    let operands = SmallNOperands { left: patches, depth, right: &right, cols };
    let scratch = ScratchSizes {
        packed: small_n_scratch_len(depth) * size_of::<f32>(),
        sums: PIXELS_PER_TASK * SMALL_N,
        ..ScratchSizes::default()
    };
    BlockGrid::new([pixels, cols], [PIXELS_PER_TASK, SMALL_N]).run(cx, scratch, |task, scratch| {
        let Block { rows, cols } = task.block;
        let left = bytemuck::cast_slice_mut(&mut scratch.packed);
        gemm_small_n(cx.level, &operands, rows.start, left, &mut scratch.sums[..rows.len() * SMALL_N]);
        run_epilogue(cx.level, epilogue, SumBlock { rows, cols, sums: &scratch.sums, stride: SMALL_N });
    })
}

/// Packs the whole kernel as panels, depth block after depth block. At most a few MiB, read again for every strip.
fn pack_kernel<P: PackedFormat>(cx: &Context, format: P, conv: &CpuConv) -> Result<Buffer<P::Element>> {
    let (depth, cols) = (conv.kernel.cols, format.tile_cols());
    let count = conv.kernel.rows.div_ceil(cols);
    let mut panels = cx.buffer::<P::Element>(format.panels_len(count, depth))?;
    let out = DisjointMut::new(&mut panels);
    let kernel = ZeroPadded { matrix: &conv.kernel, first_row: 0 };
    let blocks = depth.div_ceil(KC);
    cx.pool.for_each(blocks * count, |task| {
        let (block, panel) = (task / count, task % count);
        let from = block * KC;
        let kc = KC.min(depth - from);
        let start = from * count * cols + format.panels_len(panel, kc);
        // SAFETY: every task has a panel of its own.
        let out = unsafe { out.slice(start..start + format.panels_len(1, kc)) };
        format.pack_right(&kernel, panel * cols, from, kc, out);
    });
    Ok(panels)
}

/// The left operand: row `p` is the patch of the image under the kernel at output pixel `p`.
struct Patches<'a, T> {
    x: &'a [T],
    /// Height, width and channels of the input.
    size: [usize; 3],
    geometry: ConvGeometry,
    /// Height and width of the kernel.
    kernel: [usize; 2],
    /// Width of the output.
    width: usize,
}

impl<'a, T: TensorElement> Patches<'a, T> {
    /// The same patches, if they are bf16.
    #[cfg(target_arch = "x86_64")]
    fn as_bf16(&self) -> Option<Patches<'a, bf16>> {
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

impl<T: Scalar> Patches<'_, T> {
    /// A cursor at element `from` of patch `row`.
    #[inline(always)]
    fn cursor(&self, row: usize, from: usize) -> PatchCursor {
        let channels = self.size[2];
        let stride = self.geometry.stride;
        PatchCursor {
            y: row / self.width * stride,
            x: row % self.width * stride,
            tap: from / channels,
            channel: from % channels,
        }
    }

    /// The length of the next run of up to `max` elements of a patch and their values, or `None` for padding; advances the
    /// cursor to the next tap.
    #[inline(always)]
    fn next_run(&self, cursor: &mut PatchCursor, max: usize) -> (usize, Option<&[T]>) {
        let [height, width, channels] = self.size;
        let [top, _, left, _] = self.geometry.padding;
        let shift = usize::from(self.geometry.upsample);
        let count = max.min(channels - cursor.channel);
        // A coordinate in the padding wraps around below zero and so lies outside, like one past the end.
        let y = (cursor.y + cursor.tap / self.kernel[1]).wrapping_sub(top) >> shift;
        let x = (cursor.x + cursor.tap % self.kernel[1]).wrapping_sub(left) >> shift;
        let at = (y < height && x < width).then(|| (y * width + x) * channels + cursor.channel);
        (cursor.tap, cursor.channel) = (cursor.tap + 1, 0);
        (count, at.map(|at| &self.x[at..][..count]))
    }
}

/// A position in the patch of an output pixel.
struct PatchCursor {
    /// The pixel under the kernel's first tap, before padding.
    y: usize,
    x: usize,
    tap: usize,
    channel: usize,
}

impl<T: Scalar> RowSource for Patches<'_, T> {
    #[inline(always)]
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, mut out: &mut [f32]) {
        let mut cursor = self.cursor(row, from);
        while !out.is_empty() {
            let (count, values) = self.next_run(&mut cursor, out.len());
            let (run, rest) = out.split_at_mut(count);
            match values {
                Some(values) => convert(s, values, run),
                None => run.fill(0.0),
            }
            out = rest;
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Bf16Rows for Patches<'_, bf16> {
    #[inline(always)]
    fn copy_row(&self, row: usize, from: usize, mut out: &mut [bf16]) {
        let mut cursor = self.cursor(row, from);
        while !out.is_empty() {
            let (count, values) = self.next_run(&mut cursor, out.len());
            let (run, rest) = out.split_at_mut(count);
            match values {
                Some(values) => run.copy_from_slice(values),
                None => run.fill(bf16::ZERO),
            }
            out = rest;
        }
    }
}
