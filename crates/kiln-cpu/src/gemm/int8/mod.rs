//! Products with int8 weights.
//!
//! Activations are rotated as the weight is and quantized to int8 row by row ([`quantize`]), multiplied with the weight and summed in 32 bits. That is
//! exact: on every instruction set a product is the same to the last bit. The sums are then dequantized to
//! `sum · row scale · column scale`, and low-rank updates are added in f32.
//!
//! [`dot`] has the vector kernels that [`gemm_simd`] feeds; `gemm::amx` multiplies int8 in tiles.

mod dequantize;
mod dot;
mod gemm_simd;
mod quantize;
mod rotate;

use std::ops::Range;

use kiln_ops::Result;

#[cfg(target_arch = "x86_64")]
pub(crate) use dot::DotIsa;
#[cfg(target_arch = "x86_64")]
pub(crate) use quantize::quantize_row;

#[cfg(target_arch = "x86_64")]
use super::{AmxInt8Gemm, TiledOperand};
use super::{Epilogue, RowSource, Term};
use crate::Context;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::matrix::Int8Weight;

/// Computes `x · weightᵀ + Σ update.left · update.rightᵀ` for `rows` of `x`.
pub(crate) fn gemm_int8<X: RowSource, R: RowSource + Send, E: Epilogue>(
    cx: &Context,
    x: &X,
    rows: Range<usize>,
    weight: Int8Weight<'_>,
    updates: &[Term<'_, R>],
    epilogue: &E,
) -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), Some(packed)) = (cx.level, weight.matrix.amx_tiles()) {
        let left = &TiledOperand::quantize_int8(cx, x, rows, weight.matrix.cols, weight.rotation)?;
        return AmxInt8Gemm { cx, amx, left, weight: packed, scales: weight.scales, updates }.run(epilogue);
    }
    let left = gemm_simd::QuantizedRows::new(cx, x, rows, weight.matrix.cols, weight.rotation)?;
    gemm_simd::gemm_simd(cx, &left, weight, updates, epilogue)
}
