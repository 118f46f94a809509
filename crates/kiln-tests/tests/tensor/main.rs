//! Block formats and random numbers, against what `gguf` and torch give.

mod gguf_blocks;
mod torch_rng;
mod torch_rng_half;
