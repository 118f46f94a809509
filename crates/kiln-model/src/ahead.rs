//! The next block's weights, asked for while this one computes.

use kiln_ops::Backend;
use kiln_weights::{Pages, Vars};

/// Where each block's weights lie in their files, in the order the blocks run.
pub(crate) struct Ahead {
    blocks: Vec<Pages>,
    again: bool,
}

impl Ahead {
    /// Of these blocks, which are run `again` and again or once; of none when the backend has its own copy.
    pub fn new<'v, B: Backend>(b: &B, blocks: impl Iterator<Item = Vars<'v>>, again: bool) -> Ahead {
        let blocks =
            if b.reads_host_weights() { blocks.map(|vars| vars.pages()).collect() } else { Vec::new() };
        Ahead { blocks, again }
    }

    /// Block `index` begins: asks for the one after it.
    pub fn begin(&self, index: usize) {
        let first = self.blocks.first().filter(|_| self.again);
        if let Some(next) = self.blocks.get(index + 1).or(first) {
            next.will_need();
        }
    }
}
