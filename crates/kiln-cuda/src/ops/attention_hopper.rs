use kiln_ops::Result;

use super::attention::{Call, MAX_SEGMENTS, Segments};
use crate::Context;
use crate::device::{Argument, launch};
use crate::sources::ATTENTION_HOPPER;
use crate::sys::driver::{DevicePtr, TensorMap};

/// Queries of a block, and keys of a tile; the numbers are those in `attention_hopper.cu`.
const ROWS: usize = 128;
const DIM: i32 = 128;
const THREADS: usize = 384;
/// Queries, two stages of keys and values, barriers, and what it takes to begin at a multiple of 1024.
const SHARED: usize = 5 * ROWS * DIM as usize * 2 + 128 + 1024;

/// What the kernel takes; `struct HopperAttention` there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct HopperCall {
    q: [TensorMap; MAX_SEGMENTS],
    k: [TensorMap; MAX_SEGMENTS],
    v: [TensorMap; MAX_SEGMENTS],
    query_end: [i32; MAX_SEGMENTS],
    key_end: [i32; MAX_SEGMENTS],
    query_segments: i32,
    key_segments: i32,
    out: DevicePtr,
    queries: i32,
    keys: i32,
    heads: i32,
    kv_heads: i32,
    mask: i32,
    a: i32,
    b: i32,
    scale: f32,
}

// SAFETY: the fields of `struct HopperAttention`, in its order.
unsafe impl Argument for HopperCall {}

const _: () = assert!(size_of::<HopperCall>() == 3 * 8 * 128 + 128);

/// Whether this GPU and call are the kernel's. Values have to lie in blocks of the keys' sizes.
pub(super) fn takes(cx: &Context, call: &Call) -> bool {
    cx.device.gpu.capability == (9, 0)
        && call.head_dim == DIM
        && call.k.count == call.v.count
        && call.k.end == call.v.end
        && call.keys > 0
}

pub(super) fn run(cx: &Context, call: &Call) -> Result<()> {
    let maps = |s: &Segments, heads: i32| -> Result<[TensorMap; MAX_SEGMENTS]> {
        let mut maps = [TensorMap::NONE; MAX_SEGMENTS];
        let width = (heads * DIM) as usize;
        for (i, (map, rows)) in maps.iter_mut().zip(s.rows()).enumerate() {
            *map = cx.done(cx.device.tensor_map(s.start[i], [width, rows], [width], [ROWS]))?;
        }
        Ok(maps)
    };
    let tiles = call.q.rows().map(|rows| rows.div_ceil(ROWS)).sum();
    let arguments = HopperCall {
        q: maps(&call.q, call.heads)?,
        k: maps(&call.k, call.kv_heads)?,
        v: maps(&call.v, call.kv_heads)?,
        query_end: call.q.end,
        key_end: call.k.end,
        query_segments: call.q.count,
        key_segments: call.k.count,
        out: call.out,
        queries: call.queries,
        keys: call.keys,
        heads: call.heads,
        kv_heads: call.kv_heads,
        mask: call.mask,
        a: call.a,
        b: call.b,
        scale: call.scale,
    };
    let grid = [tiles, call.heads as usize];
    cx.done(launch!(cx.device, ATTENTION_HOPPER, "attention_hopper_128", grid, THREADS, SHARED; arguments))
}
