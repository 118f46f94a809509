//! Launchers: each checks its arguments, chooses the kernel and sets the grid. An operation is the function of its name,
//! whatever its file.
//!
//! A step of klein 4B at 1024×1024 in bf16 on an H200: 43.7 ms of matrix products with fused norms, SwiGLU and gates (550 to
//! 720 TFLOP/s), 12.9 ms of attention, 1.2 ms of norms and RoPE of queries and keys. The GPU is power limited (its clock
//! falls from 1980 to 1700 MHz within a second), so what saves energy saves time.

mod attention;
mod attention_8bit;
mod attention_f32;
mod attention_few;
mod attention_hopper;
mod attention_split;
mod attention_wide;
mod conv;
mod conv_f32;
mod conv_hopper;
pub(crate) mod elementwise;
mod epilogue;
mod fp8;
pub(crate) mod grid;
mod group_norm;
mod int8;
mod linear;
mod movement;
mod norm;
mod nvfp4;
pub(crate) mod quantize_fp8;
mod reduce;
mod rope;
mod training;

pub(crate) use crate::weight::{load_conv, load_weight, with_deltas};
pub(crate) use attention::*;
pub(crate) use conv::*;
pub(crate) use elementwise::*;
pub(crate) use group_norm::*;
pub(crate) use linear::*;
pub(crate) use movement::*;
pub(crate) use norm::*;
pub(crate) use reduce::*;
pub(crate) use rope::*;
pub use training::CudaQuantized;
pub(crate) use training::*;
