//! Launchers: each checks its arguments, picks the kernel and sets the grid.

pub(crate) mod attention;
mod attention_f32;
mod attention_hopper;
mod attention_wide;
pub(crate) mod conv;
mod conv_f32;
pub(crate) mod conv_hopper;
pub(crate) mod elementwise;
pub(crate) mod fp8;
pub(crate) mod group_norm;
pub(crate) mod int8;
pub(crate) mod linear;
pub(crate) mod movement;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod round_fp8;

use kiln_tensor::DType;

/// Threads of a block where nothing asks for another number.
pub(crate) const THREADS: usize = 256;

/// The kernel for f32 or the one for bf16.
pub(crate) fn by_dtype<K>(dtype: DType, f32: K, bf16: K) -> K {
    if dtype == DType::BF16 { bf16 } else { f32 }
}

/// A grid in which every thread has eight of `n` elements.
fn flat(n: usize) -> [usize; 2] {
    [n.div_ceil(8 * THREADS), 1]
}

/// A grid in which every thread has eight columns of a row.
pub(crate) fn by_rows(rows: usize, cols: usize) -> [usize; 2] {
    [(rows * cols.div_ceil(8)).div_ceil(THREADS), 1]
}
