//! The token embedding. It stays on the host: a prompt needs only a few hundred rows.

use kiln_tensor::packed::{Format, PackedTensor};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Vars;

use crate::{Error, Result};

/// A row for each token of the vocabulary.
pub struct Embedding {
    rows: PackedTensor,
    count: usize,
    dim: usize,
}

impl Embedding {
    /// Opens `embed_tokens.weight` of `vars`, `[count, dim]`.
    pub fn load(vars: &Vars<'_>, [count, dim]: [usize; 2]) -> Result<Embedding> {
        Ok(Embedding { rows: vars.matrix("embed_tokens.weight", [count, dim])?, count, dim })
    }

    /// Looks up the rows of these tokens.
    pub fn rows(&self, ids: &[u32]) -> Result<HostTensor> {
        let dim = self.dim;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.count) {
            let what = format!("token {id} is outside the embedding of {} rows", self.count);
            return Err(Error::Tokenizer(what));
        }
        let shape = [ids.len(), dim];
        // bf16 rows are copied as they are: converting them to f32 and back would take longer than the copy to a GPU.
        if self.rows.format() == Format::BF16 && self.rows.scale().is_none() {
            let mut bytes = Vec::with_capacity(ids.len() * 2 * dim);
            for &id in ids {
                bytes.extend_from_slice(&self.rows.bytes()[id as usize * 2 * dim..][..2 * dim]);
            }
            return Ok(HostTensor::new(DType::BF16, shape, bytes.into())?);
        }
        let mut values = vec![0f32; ids.len() * dim];
        for (&id, row) in ids.iter().zip(values.chunks_exact_mut(dim)) {
            self.rows.decode(id as usize, 0, row);
        }
        Ok(HostTensor::from_f32(shape, values)?)
    }
}
