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

pub(crate) use attention::attention;
pub(crate) use conv::conv2d;
pub(crate) use elementwise::{activation, add, add_scaled, affine, blend_rows, guide, lerp, swiglu};
pub(crate) use group_norm::group_norm;
pub(crate) use linear::{linear, linear_gated_add, linear_split};
pub(crate) use movement::{
    cast, concat_columns, concat_rows, depth_to_space, reshape, slice_rows, space_to_depth, write_rows,
};
pub(crate) use norm::{ada_layer_norm, rms_norm};
pub(crate) use quantize::{Quantized, quantize_rows};
pub(crate) use reduce::relative_l1;
pub(crate) use rope::norm_rope;
pub(crate) use transfer::{
    download, download_async, download_bytes, download_bytes_async, fence, synchronize, upload,
};

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
