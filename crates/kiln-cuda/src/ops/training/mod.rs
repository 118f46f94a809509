//! Launchers of training operations: gradients, adapters and optimizer steps.

mod adapter;
mod attention;
mod attention_bf16;
mod backward;
mod low_rank;
mod matmul;
mod optimizer;

pub(crate) use adapter::*;
pub(crate) use attention::*;
pub(crate) use backward::*;
pub(crate) use matmul::*;
pub use optimizer::CudaQuantized;
pub(crate) use optimizer::*;
