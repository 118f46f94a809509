//! The launchers: each checks its arguments, picks the kernel, cuts the work to the budget and launches. A family of operations is
//! a file here and one of `kernels/`.

mod attention;
mod conv;
mod elementwise;
mod group_norm;
mod linear;
mod movement;
mod norm;
mod product;
mod quantize;
mod reduce;
mod rope;
mod transfer;

pub(crate) use attention::*;
pub(crate) use conv::*;
pub(crate) use elementwise::*;
pub(crate) use group_norm::*;
pub(crate) use linear::*;
pub(crate) use movement::*;
pub(crate) use norm::*;
pub(crate) use quantize::*;
pub(crate) use reduce::*;
pub(crate) use rope::*;
pub(crate) use transfer::*;

pub(crate) use crate::weight::{load_conv, load_weight, with_deltas};

/// All kernels, for the test that translates every variant.
#[cfg(test)]
pub(crate) fn kernels() -> Vec<&'static crate::kernels::Kernel> {
    vec![
        &attention::ATTENTION,
        &elementwise::ELEMENTWISE,
        &elementwise::SWIGLU,
        &group_norm::SHARE,
        &group_norm::COMBINE,
        &group_norm::APPLY,
        &movement::COPY,
        &movement::CAST,
        &norm::NORM,
        &product::PRODUCT,
        &product::CONVOLUTION,
        &product::PRODUCT_INT8,
        &quantize::QUANTIZE,
        &quantize::ROTATE,
        &reduce::SHARES,
        &reduce::TOTAL,
        &rope::ROPE,
        &transfer::BYTES,
    ]
}
