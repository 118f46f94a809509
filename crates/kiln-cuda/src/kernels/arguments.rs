//! Structures that kernels take, field by field as they stand there.

use super::kernel::Argument;
use crate::sys::driver::{DevicePtr, TensorMap};

macro_rules! arguments {
    ($($type:ty = $name:literal;)*) => {
        $(
            // SAFETY: of that size and, where it has fields, with the same ones in the same order.
            unsafe impl Argument for $type {
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
    Attention = "Attention";
    HopperAttention = "HopperAttention";
    Conv = "Conv";
    HopperConv = "HopperConv";
    Packed = "Packed";
}

const _: () = assert!(size_of::<Segments>() == 104 && size_of::<Attention>() == 3 * 104 + 48);
const _: () = assert!(size_of::<HopperAttention>() == 3 * 8 * 128 + 192);
const _: () = assert!(size_of::<Conv>() == 128);
const _: () = assert!(size_of::<HopperConv>() == 2 * 128 + 64);
const _: () = assert!(size_of::<Packed>() == 56);

/// How many row blocks the attention kernels look through.
pub(crate) const MAX_SEGMENTS: usize = 8;

/// Row blocks read as one matrix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segments {
    pub start: [DevicePtr; MAX_SEGMENTS],
    /// The row past each one's last.
    pub end: [i32; MAX_SEGMENTS],
    pub count: i32,
    pub unused: i32,
}

impl Segments {
    /// How many rows each has.
    pub fn rows(&self) -> impl Iterator<Item = usize> {
        (0..self.count as usize).map(|i| (self.end[i] - if i > 0 { self.end[i - 1] } else { 0 }) as usize)
    }
}

/// What the attention kernels take.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
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
}

impl Attention {
    /// Whether every row begins where 16 bytes can be read at once.
    pub fn aligned(&self) -> bool {
        [self.q, self.k, self.v].iter().all(|s| s.start.iter().all(|at| at % 16 == 0))
    }
}

/// What Hopper's attention kernel takes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperAttention {
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
    pub shared_items: i32,
    pub share: i32,
    pub longer: i32,
    pub unused: i32,
    pub left: DevicePtr,
    pub ready: DevicePtr,
}

/// What the convolution kernels take.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conv {
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
    /// 1 where each pixel of the input stands for 2 by 2, 2 where the weights are folded.
    pub upsample: i32,
}

/// What Hopper's convolution kernels take.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperConv {
    pub x: TensorMap,
    pub w: TensorMap,
    pub bias: DevicePtr,
    pub add: DevicePtr,
    pub out: DevicePtr,
    pub channels: i32,
    pub height: i32,
    pub width: i32,
    pub n: i32,
    pub top: i32,
    pub left: i32,
    pub tiles_x: i32,
    pub tiles_n: i32,
    pub tiles: i32,
    pub kinds: i32,
}

/// Packed rows that are written out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    pub data: DevicePtr,
    pub row_scales: DevicePtr,
    pub block_scales: DevicePtr,
    pub rows: i64,
    pub row_bytes: i64,
    pub cols: i32,
    pub format: i32,
    pub scale: f32,
    pub high_first: i32,
}
