//! How much an operation has to do: multiplications and additions, and bytes that must pass the memory at least once.

use kiln_tensor::{Delta, HostTensor, LinearMatrix, LinearParts};

use crate::{Mask, Tensor};

/// The work of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    /// Floating-point operations of the products; 0 for operations that only move or scale.
    pub flops: u64,
    /// Bytes of arguments, weights and results, each once.
    pub bytes: u64,
}

impl Work {
    pub fn moving(bytes: u64) -> Work {
        Work { flops: 0, bytes }
    }
}

/// Bytes of some tensors.
pub(super) fn bytes<'t, T: Tensor + 't>(tensors: impl IntoIterator<Item = &'t T>) -> u64 {
    tensors.into_iter().map(|t| (t.shape().numel() * t.dtype().size()) as u64).sum()
}

/// Bytes and multiply-adds a row of a linear layer without its low-rank updates.
pub(super) fn of_linear(parts: &LinearParts) -> (u64, u64) {
    let size = |t: &HostTensor| t.bytes().len() as u64;
    let weight: u64 = match parts.matrix() {
        LinearMatrix::Dense(dense) => dense.iter().map(size).sum(),
        LinearMatrix::Int8 { rows, scales } => rows.iter().chain(scales).map(size).sum(),
        LinearMatrix::Packed(packed) => packed.iter().map(|p| p.bytes().len() as u64).sum(),
    };
    let elements = (parts.rows() * parts.cols()) as u64;
    (weight + parts.bias().map_or(0, size), elements)
}

/// The same of low-rank updates.
pub(super) fn of_deltas(deltas: &[Delta]) -> (u64, u64) {
    let matrices = || deltas.iter().flat_map(|d| [&d.down, &d.up]);
    (matrices().map(|t| t.bytes().len() as u64).sum(), matrices().map(|t| t.numel() as u64).sum())
}

/// Pairs of a query and a key that it sees.
pub(super) fn pairs(queries: usize, keys: usize, mask: &Mask) -> u64 {
    let (queries, keys) = (queries as u64, keys as u64);
    match mask {
        Mask::None => queries * keys,
        Mask::Causal { valid } => {
            let valid = (*valid as u64).min(keys);
            let rising = queries.min(valid);
            rising * (rising + 1) / 2 + (queries - rising) * valid
        }
        Mask::Isolated { rows } => {
            let alone = rows.len() as u64;
            queries.saturating_sub(alone) * keys + alone * alone
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_pairs_are_not_counted() {
        assert_eq!(pairs(4, 6, &Mask::None), 24);
        // 1 + 2 + 3 + 3 + 3
        assert_eq!(pairs(5, 5, &Mask::Causal { valid: 3 }), 12);
        assert_eq!(pairs(6, 6, &Mask::Isolated { rows: 1..3 }), 4 * 6 + 2 * 2);
    }
}
