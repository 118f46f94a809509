//! The kernels' signatures: each kernel is declared once in `table.rs`, with the names and types of its parameters, and
//! launched with a value of that type. A test compares the table with the sources.

mod arguments;
mod kernel;
mod table;

#[cfg(test)]
mod tests;

pub(crate) use arguments::{
    AdamWArgs, AttentionArgs, AttentionBackwardArgs, ConvArgs, GradientArgs, HopperAttentionArgs,
    HopperAttentionBackwardArgs, HopperConvArgs, LowRankArgs, MAX_SEGMENTS, MmaAttentionBackwardArgs,
    PackedMatrixArgs, ProdigyArgs, Segments,
};
pub(crate) use kernel::{Kernel, Parameters};
pub(crate) use table::*;
