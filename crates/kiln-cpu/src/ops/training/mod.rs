//! Training: products through frozen weights and with adapters, gradients, optimizer steps.
//!
//! All matrix products, those of attention included, go through the blocked driver of [`gemm`](crate::gemm) in f32.

mod attention;
mod backward;
mod matmul;
mod optimizer;

pub(crate) use {attention::*, backward::*, matmul::*, optimizer::*};
