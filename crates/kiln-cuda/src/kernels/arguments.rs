//! Argument structs of kernels, with the same fields in the same order as in CUDA.

use super::kernel::KernelArgument;
use crate::sys::driver::{DevicePtr, TensorMap};

macro_rules! arguments {
    ($($type:ty = $name:literal;)*) => {
        $(
            // SAFETY: same size as in CUDA, and the same fields in the same order.
            unsafe impl KernelArgument for $type {
                #[cfg(test)]
                const TYPE: &'static str = $name;
            }
        )*
    };
}

arguments! {
    DevicePtr = "*";
    i32 = "int";
    i64 = "long long";
    f32 = "float";
    AttentionArgs = "AttentionArgs";
    HopperAttentionArgs = "HopperAttentionArgs";
    RoundAttentionArgs = "RoundAttentionArgs";
    WideScoresArgs = "WideScoresArgs";
    ConvArgs = "ConvArgs";
    HopperConvArgs = "HopperConvArgs";
    HopperGemmArgs = "HopperGemmArgs";
    MmaGemmArgs = "MmaGemmArgs";
    Nvfp4GemmArgs = "Nvfp4GemmArgs";
    PackedMatrixArgs = "PackedMatrixArgs";
    AttentionBackwardArgs = "AttentionBackwardArgs";
    HopperAttentionBackwardArgs = "HopperAttentionBackwardArgs";
    MmaAttentionBackwardArgs = "MmaAttentionBackwardArgs";
    AdamWArgs = "AdamWArgs";
    GradientArgs = "GradientArgs";
    LowRankArgs = "LowRankArgs";
    ProdigyArgs = "ProdigyArgs";
}

const _: () = assert!(size_of::<Segments>() == 104 && size_of::<AttentionArgs>() == 3 * 104 + 56);
const _: () = assert!(size_of::<HopperAttentionArgs>() == 3 * 8 * 128 + 192);
const _: () = assert!(size_of::<RoundAttentionArgs>() == 3 * 104 + 2 * 192 + 88);
const _: () = assert!(size_of::<WideScoresArgs>() == 2 * 128 + 64);
const _: () = assert!(size_of::<AttentionBackwardArgs>() == 4 * 104 + 96);
const _: () = assert!(size_of::<HopperAttentionBackwardArgs>() == 6 * 128 + 64);
const _: () = assert!(size_of::<MmaAttentionBackwardArgs>() == 88);
const _: () = assert!(size_of::<AdamWArgs>() == 36 && size_of::<ProdigyArgs>() == 28);
const _: () = assert!(size_of::<GradientArgs>() == 88 && size_of::<LowRankArgs>() == 104);
const _: () = assert!(size_of::<ConvArgs>() == 128);
const _: () = assert!(size_of::<HopperConvArgs>() == 2 * 128 + 128);
const _: () = assert!(size_of::<HopperGemmArgs>() == 5 * 128 + 192);
const _: () = assert!(size_of::<MmaGemmArgs>() == 9 * 8 + 7 * 8 + 40);
const _: () = assert!(size_of::<Nvfp4GemmArgs>() == size_of::<MmaGemmArgs>() + 16);
const _: () = assert!(size_of::<PackedMatrixArgs>() == 80);

/// Maximum number of segments in attention kernels.
pub(crate) const MAX_SEGMENTS: usize = 8;

/// Row blocks read as one matrix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segments {
    pub start: [DevicePtr; MAX_SEGMENTS],
    /// End row of each segment.
    pub end: [i32; MAX_SEGMENTS],
    pub count: i32,
    pub unused: i32,
}

impl Segments {
    /// Number of rows of each segment.
    pub fn rows(&self) -> impl Iterator<Item = usize> {
        (0..self.count as usize).map(|i| (self.end[i] - if i > 0 { self.end[i - 1] } else { 0 }) as usize)
    }
}

/// Arguments of the attention kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionArgs {
    pub q: Segments,
    pub k: Segments,
    pub v: Segments,
    pub out: DevicePtr,
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub mask: i32,
    pub a: i32,
    pub b: i32,
    pub scale: f32,
    pub unused: i32,
    /// Where to store the logarithms of the rows' sums, or 0.
    pub lse: DevicePtr,
}

impl AttentionArgs {
    /// Whether all segments are aligned to 16 bytes.
    pub fn aligned(&self) -> bool {
        [self.q, self.k, self.v].iter().all(|s| s.start.iter().all(|at| at % 16 == 0))
    }
}

/// Arguments of the Hopper attention kernel; the fields are explained in `attention_hopper.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperAttentionArgs {
    pub q: [TensorMap; MAX_SEGMENTS],
    pub k: [TensorMap; MAX_SEGMENTS],
    pub v: [TensorMap; MAX_SEGMENTS],
    pub query_end: [i32; MAX_SEGMENTS],
    pub key_end: [i32; MAX_SEGMENTS],
    pub query_segments: i32,
    pub key_segments: i32,
    pub out: DevicePtr,
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub mask: i32,
    pub a: i32,
    pub b: i32,
    pub scale: f32,
    pub query_tiles: i32,
    pub key_tiles: i32,
    pub split_items: i32,
    pub tiles_per_block: i32,
    pub longer_blocks: i32,
    pub unused: i32,
    pub partials: DevicePtr,
    pub ready: DevicePtr,
    pub lse: DevicePtr,
    pub q_scales: DevicePtr,
    pub k_scales: DevicePtr,
    pub v_scales: DevicePtr,
}

/// Arguments of the kernels that round the operands of attention; the fields are explained in `tile_rounding.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundAttentionArgs {
    pub q: Segments,
    pub k: Segments,
    pub v: Segments,
    pub q_norms: HeadNorms,
    pub k_norms: HeadNorms,
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub sums: DevicePtr,
    pub maxima: DevicePtr,
    pub q_out: DevicePtr,
    pub k_out: DevicePtr,
    pub v_out: DevicePtr,
    pub q_scales: DevicePtr,
    pub k_scales: DevicePtr,
    pub v_scales: DevicePtr,
    pub eps: f32,
    pub unused: i32,
}

/// What norms and rotates the heads of each segment's rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadNorms {
    pub weights: [DevicePtr; MAX_SEGMENTS],
    pub cosines: [DevicePtr; MAX_SEGMENTS],
    pub sines: [DevicePtr; MAX_SEGMENTS],
}

/// Arguments of the scores of attention with wide heads on Hopper; the fields are explained in `attention_wide.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct WideScoresArgs {
    pub q: TensorMap,
    pub k: TensorMap,
    pub out: DevicePtr,
    pub inverse_sums: DevicePtr,
    pub queries: i32,
    pub keys: i32,
    pub steps: i32,
    pub scale: f32,
}

/// Arguments of the attention's gradients; the fields are explained in `attention_backward.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionBackwardArgs {
    pub forward: AttentionArgs,
    pub dout: Segments,
    pub lse: DevicePtr,
    pub delta: DevicePtr,
    pub dq: DevicePtr,
    pub dk: DevicePtr,
    pub dv: DevicePtr,
}

/// Arguments of the attention's gradients on Hopper; the fields are explained in `attention_backward_hopper.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperAttentionBackwardArgs {
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub dout: TensorMap,
    pub streamed_q: TensorMap,
    pub streamed_dout: TensorMap,
    pub stats: DevicePtr,
    pub dq: DevicePtr,
    pub dk: DevicePtr,
    pub dv: DevicePtr,
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub padded: i32,
    pub scale: f32,
    pub unused: [i32; 3],
}

/// Arguments of the attention's gradients on tensor cores; the fields are explained in `attention_backward_mma.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MmaAttentionBackwardArgs {
    pub q: DevicePtr,
    pub k: DevicePtr,
    pub v: DevicePtr,
    pub dout: DevicePtr,
    pub stats: DevicePtr,
    pub dq: DevicePtr,
    pub dk: DevicePtr,
    pub dv: DevicePtr,
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub padded: i32,
    pub scale: f32,
    pub unused: i32,
}

/// Gradients side by side, as in `fp8.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradientArgs {
    pub x: [DevicePtr; 4],
    /// End column of each gradient.
    pub end: [i32; 4],
    pub column_scales: DevicePtr,
    pub q: DevicePtr,
    pub scales: DevicePtr,
    pub count: i32,
    pub rows: i32,
    pub padded: i32,
    pub unused: i32,
}

/// Wide matrices side by side and a low-rank update, as in `low_rank.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowRankArgs {
    pub x: [DevicePtr; 4],
    /// End column of each matrix.
    pub end: [i32; 4],
    pub up: DevicePtr,
    pub inner: DevicePtr,
    pub along_rows: DevicePtr,
    pub along_columns: DevicePtr,
    pub count: i32,
    pub rows: i32,
    pub rank: i32,
    pub by_rank: i32,
    pub column_tiles: i32,
    pub unused: i32,
}

/// The numbers of an AdamW step, as in `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamWArgs {
    pub grad_scale: f32,
    pub betas: [f32; 2],
    pub rest: [f32; 2],
    pub keep: f32,
    pub step_size: f32,
    pub root: f32,
    pub eps: f32,
}

/// The numbers of the first half of a Prodigy step, as in `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProdigyArgs {
    pub grad_scale: f32,
    pub betas: [f32; 3],
    pub first: f32,
    pub second: f32,
    pub s_factor: f32,
}

/// Arguments of the convolution kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvArgs {
    pub x: DevicePtr,
    pub w: DevicePtr,
    pub bias: DevicePtr,
    pub add: DevicePtr,
    pub out: DevicePtr,
    pub ldx: i64,
    pub ldw: i64,
    pub ldadd: i64,
    pub ldo: i64,
    pub alpha: f32,
    /// Height, width, channels.
    pub input: [i32; 3],
    pub output: [i32; 3],
    pub kernel: [i32; 2],
    pub stride: i32,
    /// Top and left.
    pub padding: [i32; 2],
    /// 0: none. 1: the input is upsampled 2x. 2: the same, with folded weights.
    pub upsample: i32,
}

impl ConvArgs {
    /// The product `x · wᵀ` of packed matrices `[rows, k]` and `[n, k]` as a convolution with a 1x1 kernel.
    pub fn product([x, w, out]: [DevicePtr; 3], [rows, n, k]: [i32; 3]) -> ConvArgs {
        ConvArgs {
            x,
            w,
            bias: 0,
            add: 0,
            out,
            ldx: k.into(),
            ldw: k.into(),
            ldadd: n.into(),
            ldo: n.into(),
            alpha: 1.0,
            input: [rows, 1, k],
            output: [rows, 1, n],
            kernel: [1, 1],
            stride: 1,
            padding: [0, 0],
            upsample: 0,
        }
    }
}

/// Arguments of the Hopper convolution kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperConvArgs {
    pub x: TensorMap,
    pub w: TensorMap,
    pub bias: DevicePtr,
    pub add: DevicePtr,
    pub out: DevicePtr,
    pub moments: DevicePtr,
    pub channels: i32,
    pub height: i32,
    pub width: i32,
    pub n: i32,
    pub top: i32,
    pub left: i32,
    pub tiles_x: i32,
    pub tiles_n: i32,
    pub tiles: i32,
    pub phases: i32,
}

/// Arguments of the Hopper matrix products.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperGemmArgs {
    pub x: TensorMap,
    pub x_right: TensorMap,
    pub w: TensorMap,
    /// Of a bf16 result.
    pub out: TensorMap,
    /// Of a bf16 summand.
    pub add_bf16: TensorMap,
    pub bias: DevicePtr,
    pub gate: DevicePtr,
    pub x_scales: DevicePtr,
    pub w_scales: DevicePtr,
    pub add: DevicePtr,
    pub to: DevicePtr,
    pub ldadd: i64,
    pub ldo: i64,
    pub stride_out: i64,
    pub alpha: f32,
    pub bf16_out: i32,
    pub rows: i32,
    pub n: i32,
    pub steps: i32,
    pub left_steps: i32,
    pub tiles_m: i32,
    pub tiles_n: i32,
    pub tiles_all: i32,
    pub group: i32,
    pub split_tiles: i32,
    pub steps_per_cluster: i32,
    pub longer_clusters: i32,
    pub unused: i32,
    pub partials: DevicePtr,
    pub ready: DevicePtr,
}

/// Arguments of the matrix products with `mma`; strides of `x` and `w` are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MmaGemmArgs {
    pub x: DevicePtr,
    pub x_right: DevicePtr,
    pub w: DevicePtr,
    pub bias: DevicePtr,
    pub gate: DevicePtr,
    pub x_scales: DevicePtr,
    pub w_scales: DevicePtr,
    pub add: DevicePtr,
    pub out: DevicePtr,
    pub ldx: i64,
    pub ldx_right: i64,
    pub ldw: i64,
    pub ldadd: i64,
    pub ldo: i64,
    pub stride_w: i64,
    pub stride_out: i64,
    pub alpha: f32,
    pub bf16_out: i32,
    pub rows: i32,
    pub n: i32,
    pub bytes: i32,
    pub left_bytes: i32,
    pub tiles_m: i32,
    pub tiles_n: i32,
    pub group: i32,
    pub unused: i32,
}

/// Arguments of the nvfp4 products, with the scales of blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nvfp4GemmArgs {
    pub product: MmaGemmArgs,
    pub x_blocks: DevicePtr,
    pub w_blocks: DevicePtr,
}

/// A packed matrix to dequantize.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedMatrixArgs {
    pub data: DevicePtr,
    pub row_scales: DevicePtr,
    pub block_scales: DevicePtr,
    pub tile_scales: DevicePtr,
    pub rows: i64,
    pub row_bytes: i64,
    pub cols: i32,
    pub format: i32,
    pub scale: f32,
    pub high_first: i32,
    pub tile_rows: i32,
    pub tile_cols: i32,
    pub tile_start: i32,
    pub block_bytes: i32,
}
