use kiln_ops::Result;

use crate::context::Context;
use crate::kernels::{ATTENTION_F32_64, ATTENTION_F32_128, Attention, AttentionF32};

/// Queries and keys of a tile, and what a block brings at once; the numbers are those in `attention_f32.cu`.
const QUERIES: usize = 64;
const KEYS: usize = 128;
const PIECE: usize = 16;
const STAGES: usize = 2;
const THREADS: usize = 128;
/// Queries from which on a tile of them is worth its reads.
const LEAST_QUERIES: i32 = 8;

/// Bytes of shared memory: queries, probabilities, stages of keys or values, and where the rows of two tiles begin.
const fn shared(dim: usize) -> usize {
    let floats = QUERIES * (dim + 4) + QUERIES * (KEYS + 16) + STAGES * KEYS * (PIECE + 4);
    4 * floats + 2 * 2 * KEYS * 8
}

const _: () = assert!(shared(128) <= 99 << 10, "the smallest GPU has that much");

/// Whether there is a kernel for heads of this width. `call` is one of f32 in whole vectors.
pub(super) fn takes(call: &Attention) -> bool {
    matches!(call.head_dim, 64 | 128) && call.queries >= LEAST_QUERIES && call.keys > 0
}

pub(super) fn run(cx: &Context, call: &Attention) -> Result<()> {
    let kernel = if call.head_dim == 64 { ATTENTION_F32_64 } else { ATTENTION_F32_128 };
    let grid = [(call.queries as usize).div_ceil(QUERIES), call.heads as usize];
    cx.launch(kernel, grid, THREADS, shared(call.head_dim as usize), &AttentionF32 { t: *call })
}
