//! What is made once for a list of tokens: rotary tables, and the keys and values of reference tokens.

use kiln_ops::{Backend, RopeTable};

/// Keys (after the rotary embedding) and values of the reference tokens, a pair a block: double blocks, then single.
pub struct KvCache<B: Backend> {
    pub(super) blocks: Vec<[B::Tensor; 2]>,
}

impl<B: Backend> KvCache<B> {
    /// Key and value of each block, double blocks first.
    pub fn blocks(&self) -> &[[B::Tensor; 2]] {
        &self.blocks
    }
}

/// The rotary tables of one token list, made once and used in every step.
pub struct Layout<B: Backend> {
    pub(super) text: RopeTable<B>,
    pub(super) image: RopeTable<B>,
    pub(super) joined: RopeTable<B>,
}
