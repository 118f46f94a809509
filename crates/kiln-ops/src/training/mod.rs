//! The [`TrainingBackend`] trait: what training an adapter of the transformer needs beyond its forward pass.
//!
//! The transformer is frozen: gradients pass through its weights, norms and modulations, but none of these has a gradient of
//! its own. `dy` is the gradient of the loss by an operation's result, `dx` that by its input `x`; a gradient has its
//! tensor's shape, and an activation's gradient has the activations' dtype. Adapters, their gradients and the optimizer's
//! state are parameters: f32.
//!
//! `add` is added to a result, where a gradient has several sources: it has the result's shape and dtype.

mod args;
#[macro_use]
mod backend;
mod code_book;
mod random;
pub mod shapes;

pub use args::{
    AdamWFactors, AdamWStep, AdamWTensor, AdaptedOutput, LowRank, LowRankGradient, ProdigyStep,
    ProdigyTensor, QuantizedAdamWTensor,
};
pub use backend::{TrainingBackend, low_rank_backward};
pub use code_book::{BLOCK, CodeBook, Quantized8};
pub use random::keeps;
