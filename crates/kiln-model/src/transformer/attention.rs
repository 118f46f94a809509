use kiln_ops::{AttentionSpec, Backend, Mask, Tensor as _};

use super::KvCache;
use crate::Result;

/// What the blocks of one call do at their attention: plain, keeping the references' keys and values, or using them.
pub(super) struct Attention<'a, B: Backend> {
    spec: AttentionSpec,
    references: Kept<'a, B>,
}

enum Kept<'a, B: Backend> {
    None,
    /// The first `rows` rows of the image stream are references; their keys and values are collected.
    Collecting {
        rows: usize,
        blocks: Vec<[B::Tensor; 2]>,
    },
    /// Keys and values of the blocks to come.
    Using(std::slice::Iter<'a, [B::Tensor; 2]>),
}

impl<'a, B: Backend> Attention<'a, B> {
    pub(super) fn plain(heads: usize) -> Self {
        Attention { spec: spec(heads, Mask::None), references: Kept::None }
    }

    pub(super) fn extract(heads: usize, mask: Mask, rows: usize) -> Self {
        Attention { spec: spec(heads, mask), references: Kept::Collecting { rows, blocks: Vec::new() } }
    }

    pub(super) fn cached(heads: usize, cache: &'a KvCache<B>) -> Self {
        Attention { spec: spec(heads, Mask::None), references: Kept::Using(cache.blocks.iter()) }
    }

    /// Attention of one block. `k` and `v` are given as their text rows and their image-stream rows.
    pub(super) fn forward(
        &mut self,
        b: &B,
        q: &[&B::Tensor],
        [k_text, k_image]: [&B::Tensor; 2],
        [v_text, v_image]: [&B::Tensor; 2],
    ) -> Result<B::Tensor> {
        let attend = |k: &[&B::Tensor], v: &[&B::Tensor]| Ok(b.attention(q, k, v, &self.spec)?);
        match &mut self.references {
            Kept::None => attend(&[k_text, k_image], &[v_text, v_image]),
            Kept::Collecting { rows, blocks } => {
                blocks.push([b.slice_rows(k_image, 0..*rows)?, b.slice_rows(v_image, 0..*rows)?]);
                attend(&[k_text, k_image], &[v_text, v_image])
            }
            Kept::Using(blocks) => match blocks.next() {
                Some([k, v]) => attend(&[k_text, k, k_image], &[v_text, v, v_image]),
                None => attend(&[k_text, k_image], &[v_text, v_image]),
            },
        }
    }

    /// What was collected.
    pub(super) fn into_cache(self) -> Option<KvCache<B>> {
        match self.references {
            Kept::Collecting { blocks, .. } => Some(KvCache { blocks }),
            _ => None,
        }
    }
}

fn spec(heads: usize, mask: Mask) -> AttentionSpec {
    AttentionSpec { heads, kv_heads: heads, mask }
}

/// The rows before and after `at`.
pub(super) fn cut<B: Backend>(b: &B, x: &B::Tensor, at: usize) -> Result<[B::Tensor; 2]> {
    Ok([b.slice_rows(x, 0..at)?, b.slice_rows(x, at..x.shape().rows())?])
}
