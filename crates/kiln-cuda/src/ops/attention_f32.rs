//! Attention in f32 on CUDA cores.

use kiln_ops::Result;

use crate::context::Context;
use crate::kernels::{AttentionArgs, kernels};

kernels! {
    "attention_f32" {
        AttentionF32(args: AttentionArgs):
            ATTENTION_F32_64 = "attention_f32_64", ATTENTION_F32_128 = "attention_f32_128";
    }
}

/// Tile sizes, stages and threads, as in `attention_f32.cu`.
const QUERIES: usize = 64;
const KEYS: usize = 128;
const CHUNK: usize = 16;
const STAGES: usize = 2;
const THREADS: usize = 128;
/// Minimum queries for which a tile pays off.
const MIN_QUERIES: i32 = 8;

/// Bytes of shared memory: queries, probabilities, stages of keys or values, and row addresses of two tiles.
const fn shared(dim: usize) -> usize {
    let floats = QUERIES * (dim + 4) + QUERIES * (KEYS + 16) + STAGES * KEYS * (CHUNK + 4);
    4 * floats + 2 * 2 * KEYS * 8
}

const _: () = assert!(shared(128) <= 99 << 10, "the smallest GPU has that much");

/// Whether the kernel takes these arguments, which are f32 and aligned.
pub(super) fn supports(args: &AttentionArgs) -> bool {
    matches!(args.head_dim, 64 | 128) && args.queries >= MIN_QUERIES && args.keys > 0
}

pub(super) fn run(cx: &Context, args: &AttentionArgs) -> Result<()> {
    let kernel = if args.head_dim == 64 { ATTENTION_F32_64 } else { ATTENTION_F32_128 };
    let grid = [(args.queries as usize).div_ceil(QUERIES), args.heads as usize];
    cx.launch(kernel, grid, THREADS, shared(args.head_dim as usize), &AttentionF32 { args: *args })
}
