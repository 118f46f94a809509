//! The cost of an operation: floating-point operations, and the bytes that must pass through memory at least once.

use kiln_tensor::{HostLinear, HostTensor, LinearWeight, LoraDelta};

use crate::{Activation, AttentionMask, RopeTable, RowGroups, Tensor};

/// The cost of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// Multiplications and additions of matmuls, attention and convolutions; 0 for other operations.
    pub flops: u64,
    /// Bytes of arguments, weights and results, each once.
    pub bytes: u64,
}

impl Cost {
    /// The cost of an operation that is limited by memory bandwidth.
    pub fn memory(bytes: u64) -> Cost {
        Cost { flops: 0, bytes }
    }
}

/// Total bytes of some tensors.
pub(super) fn bytes<'t, T: Tensor + 't>(tensors: impl IntoIterator<Item = &'t T>) -> u64 {
    tensors.into_iter().map(|t| (t.shape().numel() * t.dtype().size()) as u64).sum()
}

/// An argument of an operation. Scalars count as 0 bytes.
pub(super) trait Argument {
    fn bytes(&self) -> u64 {
        0
    }
}

impl<T: Tensor> Argument for &T {
    fn bytes(&self) -> u64 {
        bytes([*self])
    }
}

impl<T: Tensor> Argument for Option<&T> {
    fn bytes(&self) -> u64 {
        bytes(*self)
    }
}

impl<T: Tensor> Argument for &[&T] {
    fn bytes(&self) -> u64 {
        bytes(self.iter().copied())
    }
}

impl<T: Tensor> Argument for &RopeTable<T> {
    fn bytes(&self) -> u64 {
        bytes([&self.cos, &self.sin])
    }
}

impl Argument for &RowGroups {}
impl Argument for Activation {}
impl Argument for Option<Activation> {}
impl Argument for f32 {}
impl Argument for usize {}

/// Bytes of a weight, and its multiply-adds per row of activations.
#[derive(Clone, Copy)]
pub(super) struct WeightCost {
    pub bytes: u64,
    pub macs: u64,
}

impl WeightCost {
    /// The cost of a linear layer without its LoRA deltas.
    pub fn of_linear(linear: &HostLinear) -> WeightCost {
        let size = |t: &HostTensor| t.bytes().len() as u64;
        let weight: u64 = match linear.weight() {
            LinearWeight::Dense(dense) => dense.iter().map(size).sum(),
            LinearWeight::Int8 { rows, scales } => rows.iter().chain(scales).map(size).sum(),
            LinearWeight::Packed(packed) => packed.iter().map(|p| p.bytes().len() as u64).sum(),
        };
        let macs = (linear.rows() * linear.cols()) as u64;
        WeightCost { bytes: weight + linear.bias().map_or(0, size), macs }
    }

    /// The cost of LoRA deltas.
    pub fn of_deltas(deltas: &[LoraDelta]) -> WeightCost {
        let matrices = || deltas.iter().flat_map(|delta| [&delta.down, &delta.up]);
        WeightCost {
            bytes: matrices().map(|t| t.bytes().len() as u64).sum(),
            macs: matrices().map(|t| t.numel() as u64).sum(),
        }
    }

    pub fn plus(self, other: WeightCost) -> WeightCost {
        WeightCost { bytes: self.bytes + other.bytes, macs: self.macs + other.macs }
    }
}

/// Number of query–key pairs that the mask allows.
pub(super) fn attended_pairs(queries: usize, keys: usize, mask: &AttentionMask) -> u64 {
    let (queries, keys) = (queries as u64, keys as u64);
    match mask {
        AttentionMask::None => queries * keys,
        AttentionMask::Causal { valid } => {
            let valid = (*valid as u64).min(keys);
            let rising = queries.min(valid);
            rising * (rising + 1) / 2 + (queries - rising) * valid
        }
        AttentionMask::Isolated { rows } => {
            let isolated = rows.len() as u64;
            queries.saturating_sub(isolated) * keys + isolated * isolated
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_pairs_are_not_counted() {
        assert_eq!(attended_pairs(4, 6, &AttentionMask::None), 24);
        // 1 + 2 + 3 + 3 + 3
        assert_eq!(attended_pairs(5, 5, &AttentionMask::Causal { valid: 3 }), 12);
        assert_eq!(attended_pairs(6, 6, &AttentionMask::Isolated { rows: 1..3 }), 4 * 6 + 2 * 2);
    }
}
