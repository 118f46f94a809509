//! Launchers of training operations: gradients, adapters and optimizer steps.

pub(crate) mod adapter;
pub(crate) mod attention;
mod attention_bf16;
pub(crate) mod backward;
mod low_rank;
pub(crate) mod matmul;
pub(crate) mod optimizer;

/// Blocks of the first launch of a sum over all elements, at most.
const MAX_BLOCKS: usize = 256;

/// Blocks of a sum over `n` elements, and elements per block.
fn sum_blocks(n: usize) -> (usize, usize) {
    let blocks = n.div_ceil(8 * super::THREADS).clamp(1, MAX_BLOCKS);
    (blocks, n.div_ceil(blocks))
}
