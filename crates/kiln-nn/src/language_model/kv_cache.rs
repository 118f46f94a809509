//! The keys and values of a layer, for all tokens so far.
//!
//! They are the first rows of tensors with room for more, into which those of further tokens are written.

use kiln_ops::{Backend, Tensor as _};

use crate::Result;

/// Keys and values of some tokens, `[tokens, heads · head_dim]` each.
type Rows<B> = [<B as Backend>::Tensor; 2];

/// The keys and values of a layer.
pub(super) struct KvCache<B: Backend> {
    /// Keys and values, the first `tokens` rows of each.
    buffers: Option<Rows<B>>,
    tokens: usize,
}

impl<B: Backend> Default for KvCache<B> {
    fn default() -> Self {
        KvCache { buffers: None, tokens: 0 }
    }
}

impl<B: Backend> KvCache<B> {
    /// Appends the keys and values of some tokens. Returns those of all tokens, which must be dropped before the next call:
    /// rows of a shared tensor are not written in place.
    pub fn append(&mut self, b: &B, rows: Rows<B>) -> Result<Rows<B>> {
        let first = self.tokens;
        self.tokens += rows[0].shape().dims()[0];
        let Some(buffers) = &mut self.buffers else {
            return Ok(self.buffers.insert(rows).clone());
        };
        for (buffer, rows) in buffers.iter_mut().zip(&rows) {
            while buffer.shape().dims()[0] < self.tokens {
                // The second half is room for as many tokens again.
                *buffer = b.concat_rows(&[buffer, buffer])?;
            }
            b.write_rows(buffer, first, rows)?;
        }
        let [keys, values] = buffers;
        Ok([b.slice_rows(keys, 0..self.tokens)?, b.slice_rows(values, 0..self.tokens)?])
    }
}

#[cfg(test)]
mod tests {
    use kiln_ops::Reference;
    use kiln_tensor::HostTensor;

    use super::*;

    #[test]
    fn keys_and_values_of_all_tokens_are_kept_in_order() {
        let rows = |first: usize, count: usize| {
            HostTensor::from_f32([count, 1], (first..first + count).map(|i| i as f32).collect()).unwrap()
        };
        let (mut cache, mut tokens) = (KvCache::<Reference>::default(), 0);
        for count in [3, 1, 1, 1, 1, 20, 1] {
            let appended = [rows(tokens, count), rows(100 + tokens, count)];
            let all = cache.append(&Reference, appended).unwrap();
            tokens += count;
            let expected = [rows(0, tokens), rows(100, tokens)];
            assert_eq!(
                all.map(|x| x.to_f32().unwrap().into_owned()),
                expected.map(|x| x.to_f32().unwrap().into_owned())
            );
        }
    }
}
