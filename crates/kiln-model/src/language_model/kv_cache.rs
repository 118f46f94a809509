//! The keys and values of a layer, for all tokens so far.
//!
//! Tensors are immutable, so appending a row copies what it is appended to. Rows are therefore kept in blocks that grow at
//! different rates: a token is appended to a short block, and a full short block to a long one. The text that is continued
//! is never copied. Attention reads the blocks as they are.

use kiln_ops::{Backend, Tensor as _};

use crate::Result;

/// Rows of a full short block.
const SHORT: usize = 32;

/// Keys and values of some tokens, `[tokens, heads · head_dim]` each.
type Block<B> = [<B as Backend>::Tensor; 2];

/// Blocks in the order of their tokens.
pub(super) struct KvCache<B: Backend> {
    /// The text that is continued.
    text: Option<Block<B>>,
    long: Option<Block<B>>,
    short: Option<Block<B>>,
}

impl<B: Backend> Default for KvCache<B> {
    fn default() -> Self {
        KvCache { text: None, long: None, short: None }
    }
}

impl<B: Backend> KvCache<B> {
    /// Appends the keys and values of the text or, after it, of a token.
    pub fn append(&mut self, b: &B, block: Block<B>) -> Result<()> {
        if self.text.is_none() {
            self.text = Some(block);
            return Ok(());
        }
        let short = join::<B>(b, self.short.take(), block)?;
        if short[0].shape().dims()[0] < SHORT {
            self.short = Some(short);
        } else {
            self.long = Some(join::<B>(b, self.long.take(), short)?);
        }
        Ok(())
    }

    /// The blocks of keys.
    pub fn keys(&self) -> Vec<&B::Tensor> {
        self.blocks().map(|[keys, _]| keys).collect()
    }

    /// The blocks of values.
    pub fn values(&self) -> Vec<&B::Tensor> {
        self.blocks().map(|[_, values]| values).collect()
    }

    fn blocks(&self) -> impl Iterator<Item = &Block<B>> {
        [&self.text, &self.long, &self.short].into_iter().flatten()
    }
}

fn join<B: Backend>(b: &B, before: Option<Block<B>>, [k, v]: Block<B>) -> Result<Block<B>> {
    match before {
        None => Ok([k, v]),
        Some([keys, values]) => Ok([b.concat_rows(&[&keys, &k])?, b.concat_rows(&[&values, &v])?]),
    }
}

#[cfg(test)]
mod tests {
    use kiln_ops::Reference;
    use kiln_tensor::HostTensor;

    use super::*;

    #[test]
    fn blocks_hold_all_rows_in_order() {
        let rows = |first: usize, count: usize| {
            HostTensor::from_f32([count, 1], (first..first + count).map(|i| i as f32).collect()).unwrap()
        };
        let mut cache = KvCache::<Reference>::default();
        cache.append(&Reference, [rows(0, 5), rows(100, 5)]).unwrap();
        for token in 5..5 + 3 * SHORT + 7 {
            cache.append(&Reference, [rows(token, 1), rows(100 + token, 1)]).unwrap();
            let values = |blocks: Vec<&HostTensor>| -> Vec<f32> {
                blocks.iter().flat_map(|block| block.to_f32().unwrap().into_owned()).collect()
            };
            let expected = |first: usize| (first..=first + token).map(|i| i as f32).collect::<Vec<_>>();
            assert_eq!((values(cache.keys()), values(cache.values())), (expected(0), expected(100)));
            assert!(cache.keys().len() <= 3);
        }
        let lengths: Vec<usize> = cache.keys().iter().map(|block| block.shape().dims()[0]).collect();
        assert_eq!(lengths, [5, 3 * SHORT, 7]);
    }
}
