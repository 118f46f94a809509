//! Attention of few queries with heads of 128: one token's to all tokens before it.

use kiln_ops::Result;
use kiln_tensor::DType;

use super::by_dtype;
use crate::context::Context;
use crate::kernels::{ATTENTION_FEW_BF16, ATTENTION_FEW_F32, AttentionArgs, AttentionFew};

/// Head dimension and threads, as in `attention_few.cu`.
const DIM: i32 = 128;
const THREADS: usize = 512;
/// Queries that share a head's keys: from here on tiles pay off, which read keys once for all queries.
const MAX_QUERIES: i32 = 4;

/// Whether the kernel takes these arguments, which are aligned, and leaves no multiprocessor more than one block.
pub(super) fn supports(cx: &Context, args: &AttentionArgs) -> bool {
    args.head_dim == DIM
        && args.queries <= MAX_QUERIES
        && args.queries * args.heads <= cx.gpu().multiprocessors.max(1)
        && args.keys > 0
}

pub(super) fn run(cx: &Context, args: &AttentionArgs, dtype: DType) -> Result<()> {
    let kernel = by_dtype(dtype, ATTENTION_FEW_F32, ATTENTION_FEW_BF16);
    let grid = [args.queries as usize, args.heads as usize];
    cx.launch(kernel, grid, THREADS, 0, &AttentionFew { args: *args })
}
