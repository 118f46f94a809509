//! The kernels as Rust sees them: each is declared once, with the names and types of its parameters, in `table.rs`, and
//! launched with a value of that type. A test holds the table against the sources.

mod arguments;
mod kernel;
mod table;

#[cfg(test)]
mod tests;

pub(crate) use arguments::{Attention, Conv, HopperAttention, HopperConv, MAX_SEGMENTS, Packed, Segments};
pub(crate) use kernel::{Kernel, Parameters};
pub(crate) use table::*;
