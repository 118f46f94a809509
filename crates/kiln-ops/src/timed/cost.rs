//! The cost of an operation: floating-point operations, and the bytes that must pass through memory at least once.

use kiln_tensor::{DType, HostLinear, HostTensor, LinearWeight, LoraDelta, Shape};

use crate::training::LowRankGradient;
use crate::{Activation, AttentionMask, AttentionSpec, RopeTable, RowGroups, Tensor};

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

/// An argument of an operation. What is not a tensor counts as 0 bytes.
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

impl<T: Tensor, const N: usize> Argument for [&T; N] {
    fn bytes(&self) -> u64 {
        bytes(*self)
    }
}

impl<T: Tensor, const N: usize> Argument for Option<[&T; N]> {
    fn bytes(&self) -> u64 {
        self.map_or(0, bytes)
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
impl Argument for &[usize] {}
impl Argument for [usize; 2] {}
impl Argument for Shape {}
impl Argument for DType {}
impl Argument for bool {}
impl Argument for f32 {}
impl Argument for u64 {}
impl Argument for usize {}

/// The result of an operation: one tensor or several.
pub(super) trait Output {
    type Tensor: Tensor;

    fn tensors(&self) -> &[Self::Tensor];

    /// Sizes and cost of an operation that reads this many bytes and writes the result.
    fn memory_cost(&self, read: u64) -> (String, Cost) {
        let (mut detail, mut rows) = (String::new(), 0);
        for tensor in self.tensors() {
            let shape = tensor.shape();
            detail = match detail.as_str() {
                "" => dims(shape),
                others if shape.rows() == rows => format!("{others} + {}", shape.last()),
                others => format!("{others}, {}", dims(shape)),
            };
            rows = shape.rows();
        }
        (detail, Cost::memory(read + bytes(self.tensors())))
    }
}

impl<T: Tensor> Output for T {
    type Tensor = T;

    fn tensors(&self) -> &[T] {
        std::slice::from_ref(self)
    }
}

impl<T: Tensor, const N: usize> Output for [T; N] {
    type Tensor = T;

    fn tensors(&self) -> &[T] {
        self
    }
}

impl<T: Tensor> Output for Vec<T> {
    type Tensor = T;

    fn tensors(&self) -> &[T] {
        self
    }
}

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
            LinearWeight::Int8 { rows, scales, .. } => rows.iter().chain(scales).map(size).sum(),
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

/// A weight and its cost.
#[derive(Clone)]
pub struct TimedWeight<W> {
    pub(super) inner: W,
    /// Without LoRA deltas.
    pub(super) base: WeightCost,
    /// With LoRA deltas.
    pub(super) total: WeightCost,
}

/// A convolution and its size.
pub struct TimedConv<C> {
    pub(super) inner: C,
    pub(super) bytes: u64,
    /// `[out, in, height, width]`.
    pub(super) size: [usize; 4],
}

/// Such as `4608 × 3072`.
pub(super) fn dims(shape: &Shape) -> String {
    shape.dims().iter().map(usize::to_string).collect::<Vec<_>>().join(" × ")
}

/// Sizes and cost of a matmul of the concatenated `xs`; `others` are the bytes of further arguments.
pub(super) fn linear_cost<T: Tensor, W>(
    xs: &[&T],
    w: &TimedWeight<W>,
    others: u64,
    outputs: &impl Output<Tensor = T>,
) -> (String, Cost) {
    let outputs = outputs.tensors();
    let rows = xs.first().map_or(0, |x| x.shape().rows());
    let input: usize = xs.iter().map(|x| x.shape().last()).sum();
    let output: usize = outputs.iter().map(|y| y.shape().last()).sum();
    let bytes = bytes(xs.iter().copied()) + w.total.bytes + others + bytes(outputs);
    (format!("{rows} × {input} → {output}"), Cost { flops: 2 * rows as u64 * w.total.macs, bytes })
}

pub(super) fn attention_cost<T: Tensor>(
    [q, k, v]: [&[&T]; 3],
    spec: &AttentionSpec,
    out: &T,
) -> (String, Cost) {
    let keys: usize = k.iter().map(|k| k.shape().rows()).sum();
    let (queries, width) = (out.shape().rows(), out.shape().last());
    let mask = match spec.mask {
        AttentionMask::None => "",
        AttentionMask::Causal { .. } => ", causal",
        AttentionMask::Isolated { .. } => ", isolated",
    };
    let detail = format!("{queries} × {keys}, {} heads × {}{mask}", spec.heads, width / spec.heads.max(1));
    let flops = 4 * attended_pairs(queries, keys, &spec.mask) * width as u64;
    let inputs = q.iter().chain(k).chain(v).copied();
    (detail, Cost { flops, bytes: bytes(inputs) + bytes([out]) })
}

pub(super) fn conv_cost<T: Tensor, C>(
    x: &T,
    conv: &TimedConv<C>,
    residual: Option<&T>,
    out: &T,
) -> (String, Cost) {
    let [channels, input, height, width] = conv.size;
    let pixels = out.shape().numel() / channels.max(1);
    let (rows, columns) = (out.shape().dims()[0], out.shape().dims()[1]);
    let cost = Cost {
        flops: 2 * (pixels * channels * input * height * width) as u64,
        bytes: bytes([x, out]) + bytes(residual) + conv.bytes,
    };
    (format!("{rows} × {columns}, {input} → {channels}, {height} × {width}"), cost)
}

/// Sizes and cost of a product of `[rows, k]` and `[k, n]`, or of these transposed.
pub(super) fn product_cost<T: Tensor>(
    [rows, k, n]: [usize; 3],
    inputs: [&T; 2],
    add: Option<&T>,
    out: &T,
) -> (String, Cost) {
    let flops = 2 * (rows * k * n) as u64;
    (format!("{rows} × {k} × {n}"), Cost { flops, bytes: bytes(inputs) + bytes(add) + bytes([out]) })
}

/// Sizes and cost of the gradients of low-rank updates.
pub(super) fn low_rank_cost<T: Tensor>(
    dys: &[&T],
    x: &T,
    inner: &[T],
    gradients: &[LowRankGradient<T>],
) -> (String, Cost) {
    let out: usize = dys.iter().map(|dy| dy.shape().last()).sum();
    let rank: usize = inner.iter().map(|inner| inner.shape().last()).sum();
    let [rows, cols] = [x.shape().rows(), x.shape().last()];
    let moved = bytes(dys.iter().copied().chain([x]))
        + bytes(gradients.iter().flat_map(|g| [&g.down, &g.up, &g.inner]));
    let cost = Cost { flops: (2 * rows * rank * (2 * out + cols)) as u64, bytes: moved };
    (format!("{rows} × {out} → {cols}, rank {rank}"), cost)
}

/// Sizes and cost of an optimizer step that moves this many bytes for each parameter.
pub(super) fn step_cost<'t, T: Tensor + 't>(
    params: impl IntoIterator<Item = &'t T>,
    bytes: usize,
) -> (String, Cost) {
    let count: usize = params.into_iter().map(|param| param.shape().numel()).sum();
    (count.to_string(), Cost::memory((bytes * count) as u64))
}

/// Number of query–key pairs that the mask allows.
fn attended_pairs(queries: usize, keys: usize, mask: &AttentionMask) -> u64 {
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
