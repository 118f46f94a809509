//! Prefetching of memory-mapped weights: the next block's pages are requested while the current one computes.

use kiln_ops::Backend;
use kiln_weights::{PageRanges, Vars};

/// The file ranges of each block's weights, in the order the blocks run.
#[derive(Clone)]
pub(crate) struct Prefetcher {
    blocks: Vec<PageRanges>,
    /// Whether the first block follows the last.
    repeats: bool,
}

impl Prefetcher {
    /// Prefetches nothing if the backend has its own copy of the weights. `repeats`: the blocks run more than once.
    pub fn new<'v, B: Backend>(b: &B, blocks: impl Iterator<Item = Vars<'v>>, repeats: bool) -> Prefetcher {
        let blocks =
            if b.reads_host_weights() { blocks.map(|vars| vars.page_ranges()).collect() } else { Vec::new() };
        Prefetcher { blocks, repeats }
    }

    /// Requests the block that runs after block `index`.
    pub fn prefetch_after(&self, index: usize) {
        let first = self.blocks.first().filter(|_| self.repeats);
        if let Some(next) = self.blocks.get(index + 1).or(first) {
            next.prefetch();
        }
    }
}
