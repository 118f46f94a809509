//! Products of bytes, for weights of 8-bit integers.
//!
//! Activations are rounded to bytes a row at a time ([`quantise`]), multiplied with the weight's bytes and summed in 32
//! bits, which is exact: whatever the instruction set, a product is the same to the last bit. Only then it becomes a
//! float, `sum · scale of the row · scale of the column`, and what a LoRA adds is added.
//!
//! [`words`] has the vectors' kernels, which [`product`] feeds; AMX multiplies bytes in [`gemm::tiles`](crate::gemm).

mod product;
mod quantise;
mod scale;
mod words;

use kiln_ops::Result;

#[cfg(target_arch = "x86_64")]
pub(crate) use quantise::quantise;
#[cfg(target_arch = "x86_64")]
pub(crate) use words::Kind;

#[cfg(target_arch = "x86_64")]
use super::{ByteProduct, Panels};
use super::{Rows, Sink, Term};
use crate::Context;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::weight::Stack;

/// A weight of bytes and the scale of each of its rows.
#[derive(Clone, Copy)]
pub(crate) struct Int8<'a> {
    pub stack: &'a Stack,
    pub scales: &'a [f32],
}

/// Hands `x · weightᵀ + Σ update.left · update.rightᵀ` to the sink, for `rows` of `x`.
pub(crate) fn product_of_bytes<X: Rows, R: Rows + Send, K: Sink>(
    cx: &Context,
    x: &X,
    rows: std::ops::Range<usize>,
    weight: Int8<'_>,
    updates: &[Term<'_, R>],
    sink: &K,
) -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), Some(turned)) = (cx.level, weight.stack.turned()) {
        let left = &Panels::of_bytes(cx, x, rows, weight.stack.cols)?;
        return ByteProduct { cx, amx, left, weight: turned, scales: weight.scales, updates }.run(sink);
    }
    let left = product::Left::new(cx, x, rows, weight.stack.cols)?;
    product::product(cx, &left, weight, updates, sink)
}
