//! Launchers: each checks its arguments, chooses the kernel and sets the grid.
//!
//! A step of klein 4B at 1024×1024 in bf16 on an H200: 43.7 ms of matrix products with fused norms, SwiGLU and gates (550 to
//! 720 TFLOP/s), 12.9 ms of attention, 1.2 ms of norms and RoPE of queries and keys. The GPU is power limited (its clock
//! falls from 1980 to 1700 MHz within a second), so what saves energy saves time.

pub(crate) mod attention;
mod attention_f32;
mod attention_few;
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
pub(crate) mod quantize_fp8;
pub(crate) mod reduce;
pub(crate) mod rope;
pub(crate) mod training;

use kiln_tensor::DType;

/// Default threads per block.
pub(crate) const THREADS: usize = 256;

/// Chooses the f32 or the bf16 kernel.
pub(crate) fn by_dtype<K>(dtype: DType, f32: K, bf16: K) -> K {
    if dtype == DType::BF16 { bf16 } else { f32 }
}

/// Grid for `n` elements, eight per thread.
fn elementwise_grid(n: usize) -> [usize; 2] {
    [n.div_ceil(8 * THREADS), 1]
}

/// Grid for rows, eight columns per thread.
pub(crate) fn row_grid(rows: usize, cols: usize) -> [usize; 2] {
    [(rows * cols.div_ceil(8)).div_ceil(THREADS), 1]
}
