//! Shape checks: one function per operation of [`Backend`] that checks its arguments and returns the shape of its result,
//! so that all backends reject the same calls with the same messages.
//!
//! Tensors may have no rows; only attention needs at least one key.
//!
//! ```
//! use kiln_ops::shapes;
//! use kiln_tensor::HostTensor;
//!
//! let (x, weight) = (HostTensor::zeros([5, 8]), HostTensor::zeros([7]));
//! let error = shapes::rms_norm(&x, &weight).unwrap_err();
//! assert_eq!(error.to_string(), "rms_norm: weight has shape [7], expected [8]");
//! ```

mod check;
mod linear;

use std::ops::Range;

use kiln_tensor::{DType, HostTensor, Shape};

#[cfg(doc)]
use crate::Backend;
use crate::{AttentionMask, AttentionSpec, ConvGeometry, Result, RopeTable, RowGroups, Tensor};
pub(crate) use check::Op;
pub use linear::{
    ada_linear_split, ada_linear_swiglu, linear, linear_gated_add, linear_split, linear_swiglu, with_deltas,
};

/// [`Backend::upload`]: a float tensor, to f32 or bf16.
pub fn upload(host: &HostTensor, dtype: DType) -> Result<Shape> {
    let op = Op("upload");
    if !matches!(host.dtype(), DType::F32 | DType::BF16 | DType::F16 | DType::F64) {
        return op.fail(format!("the host tensor is {}, expected a float type", host.dtype()));
    }
    check_target(op, dtype)?;
    Ok(host.shape().clone())
}

/// [`Backend::cast`]: to f32 or bf16.
pub fn cast(x: &impl Tensor, dtype: DType) -> Result<Shape> {
    check_target(Op("cast"), dtype)?;
    Ok(x.shape().clone())
}

fn check_target(op: Op, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::BF16 => Ok(()),
        other => op.fail(format!("the result can't be {other}, expected f32 or bf16")),
    }
}

/// [`Backend::load_conv`]. Returns `[out, in, height, width]`.
pub fn load_conv(kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<[usize; 4]> {
    let op = Op("load_conv");
    let dims: [usize; 4] = op.rank("kernel", kernel.shape(), "[out, in, height, width]")?;
    if dims.contains(&0) {
        return op.fail(format!("kernel has shape {}, expected at least one element", kernel.shape()));
    }
    if let Some(bias) = bias {
        op.shape("bias", bias.shape(), &dims[..1])?;
    }
    Ok(dims)
}

/// [`Backend::reshape`].
pub fn reshape(x: &impl Tensor, shape: &Shape) -> Result<Shape> {
    if shape.checked_numel() != Some(x.shape().numel()) {
        return Op("reshape")
            .fail(format!("x has shape {}, which does not have as many elements as {shape}", x.shape()));
    }
    Ok(shape.clone())
}

/// [`Backend::slice_rows`].
pub fn slice_rows(x: &impl Tensor, range: &Range<usize>) -> Result<Shape> {
    let op = Op("slice_rows");
    let mut dims = x.shape().dims().to_vec();
    match dims.first_mut() {
        Some(rows) if range.start <= range.end && range.end <= *rows => *rows = range.len(),
        _ => {
            return op.fail(format!("rows {}..{} are outside shape {}", range.start, range.end, x.shape()));
        }
    }
    Ok(dims.into())
}

/// [`Backend::concat_rows`].
pub fn concat_rows<T: Tensor>(parts: &[&T]) -> Result<Shape> {
    let [rows, cols] = row_blocks(Op("concat_rows"), "parts", parts, None)?;
    Ok([rows, cols].into())
}

/// [`Backend::write_rows`].
pub fn write_rows<T: Tensor>(x: &T, first: usize, rows: &T) -> Result<()> {
    let op = Op("write_rows");
    let dtype = op.activation("x", x)?;
    let [height, cols] = op.matrix("x", x.shape())?;
    op.same_dtype("rows", rows, dtype)?;
    let [count, _] = op.matrix("rows", rows.shape())?;
    op.shape("rows", rows.shape(), &[count, cols])?;
    if first.checked_add(count).is_none_or(|end| end > height) {
        return op.fail(format!("{count} rows from row {first} on are outside shape {}", x.shape()));
    }
    Ok(())
}

/// [`Backend::concat_columns`].
pub fn concat_columns<T: Tensor>(parts: &[&T]) -> Result<Shape> {
    Ok(column_blocks(Op("concat_columns"), "parts", parts)?.into())
}

/// [`Backend::ada_layer_norm`].
pub fn ada_layer_norm<T: Tensor>(x: &T, scale: &T, shift: &T, groups: &RowGroups) -> Result<Shape> {
    let op = Op("ada_layer_norm");
    op.activation("x", x)?;
    let [rows, dim] = op.matrix("x", x.shape())?;
    op.groups(groups, rows)?;
    op.parameter("scale", scale, &[groups.count(), dim])?;
    op.parameter("shift", shift, &[groups.count(), dim])?;
    Ok([rows, dim].into())
}

/// [`Backend::rms_norm`].
pub fn rms_norm<T: Tensor>(x: &T, weight: &T) -> Result<Shape> {
    let op = Op("rms_norm");
    op.activation("x", x)?;
    let [rows, dim] = op.matrix("x", x.shape())?;
    op.parameter("weight", weight, &[dim])?;
    Ok([rows, dim].into())
}

/// [`Backend::norm_rope`]. Returns `[tokens, heads, head_dim]`; the result has `x`'s shape.
pub fn norm_rope<T: Tensor>(x: &T, weight: Option<&T>, rope: &RopeTable<T>) -> Result<[usize; 3]> {
    let op = Op("norm_rope");
    op.activation("x", x)?;
    let [tokens, dim] = op.matrix("x", x.shape())?;
    let head_dim = match weight {
        Some(weight) => {
            let [head_dim] = op.rank("weight", weight.shape(), "[head_dim]")?;
            op.parameter("weight", weight, &[head_dim])?;
            if head_dim == 0 || head_dim % 2 != 0 {
                return op.fail(format!("weight has shape [{head_dim}], expected an even head_dim"));
            }
            head_dim
        }
        None => {
            let [_, half] = op.matrix("cos", rope.cos.shape())?;
            if half == 0 {
                return op
                    .fail(format!("cos has shape {}, expected [tokens, head_dim / 2]", rope.cos.shape()));
            }
            2 * half
        }
    };
    if dim % head_dim != 0 {
        return op.fail(format!(
            "x has shape {}, whose columns are not a multiple of head_dim {head_dim}",
            x.shape()
        ));
    }
    op.parameter("cos", &rope.cos, &[tokens, head_dim / 2])?;
    op.parameter("sin", &rope.sin, &[tokens, head_dim / 2])?;
    Ok([tokens, dim / head_dim, head_dim])
}

/// The sizes of one [`Backend::attention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSize {
    /// Number of query rows.
    pub queries: usize,
    /// Number of key and value rows; at least 1.
    pub keys: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl AttentionSize {
    /// The result's shape: `[queries, heads · head_dim]`.
    pub fn result(&self) -> Shape {
        [self.queries, self.heads * self.head_dim].into()
    }
}

/// [`Backend::attention`].
pub fn attention<T: Tensor>(q: &[&T], k: &[&T], v: &[&T], spec: &AttentionSpec) -> Result<AttentionSize> {
    let op = Op("attention");
    let AttentionSpec { heads, kv_heads, mask, eight_bits: _ } = spec;
    let (&heads, &kv_heads) = (heads, kv_heads);
    if kv_heads == 0 || heads == 0 || heads % kv_heads != 0 {
        return op.fail(format!("{heads} query heads are not a multiple of {kv_heads} key heads"));
    }
    let [queries, dim] = row_blocks(op, "q", q, None)?;
    let dtype = Some(q[0].dtype());
    let [keys, kv_dim] = row_blocks(op, "k", k, dtype)?;
    let [values, v_dim] = row_blocks(op, "v", v, dtype)?;
    if dim == 0 || dim % heads != 0 {
        return op.fail(format!("q has {dim} columns, expected a multiple of {heads} heads"));
    }
    let head_dim = dim / heads;
    for (name, width) in [("k", kv_dim), ("v", v_dim)] {
        if width != kv_heads * head_dim {
            return op.fail(format!("{name} has {width} columns, expected {kv_heads} heads of {head_dim}"));
        }
    }
    if keys == 0 || values != keys {
        return op.fail(format!("k has {keys} rows and v {values}, expected the same number, at least 1"));
    }
    let check_square = |mask: &str| {
        if queries != keys {
            return op.fail(format!(
                "{queries} queries and {keys} keys with a {mask} mask, expected equal numbers"
            ));
        }
        Ok(())
    };
    match mask {
        AttentionMask::None => {}
        AttentionMask::Causal { valid } => {
            check_square("causal")?;
            if *valid == 0 || *valid > keys {
                return op.fail(format!("{valid} valid keys, expected 1 to {keys}"));
            }
        }
        AttentionMask::Isolated { rows } => {
            check_square("isolated")?;
            if rows.start > rows.end || rows.end > keys {
                return op.fail(format!("isolated rows {}..{} outside {keys} rows", rows.start, rows.end));
            }
        }
    }
    Ok(AttentionSize { queries, keys, heads, kv_heads, head_dim })
}

/// [`Backend::swiglu`].
pub fn swiglu(x: &impl Tensor) -> Result<Shape> {
    let op = Op("swiglu");
    op.activation("x", x)?;
    op.matrix("x", x.shape())?;
    halves(x.shape())
}

/// The shape of SwiGLU of a matrix.
fn halves(x: &Shape) -> Result<Shape> {
    if !x.last().is_multiple_of(2) {
        return Op("swiglu").fail(format!("x has shape {x}, expected an even number of columns"));
    }
    Ok([x.rows(), x.last() / 2].into())
}

/// [`Backend::activation`].
pub fn activation(x: &impl Tensor) -> Result<Shape> {
    Op("activation").activation("x", x)?;
    Ok(x.shape().clone())
}

/// [`Backend::add`].
pub fn add<T: Tensor>(x: &T, y: &T) -> Result<Shape> {
    same_shape(Op("add"), ["x", "y"], x, y)
}

/// [`Backend::add_scaled`].
pub fn add_scaled<T: Tensor>(x: &T, y: &T) -> Result<Shape> {
    same_shape(Op("add_scaled"), ["x", "y"], x, y)
}

/// [`Backend::lerp`].
pub fn lerp<T: Tensor>(x: &T, y: &T) -> Result<Shape> {
    same_shape(Op("lerp"), ["x", "y"], x, y)
}

/// [`Backend::guide`].
pub fn guide<T: Tensor>(c: &T, u: &T) -> Result<Shape> {
    same_shape(Op("guide"), ["c", "u"], c, u)
}

/// [`Backend::relative_l1`].
pub fn relative_l1<T: Tensor>(x: &T, y: &T) -> Result<Shape> {
    same_shape(Op("relative_l1"), ["x", "y"], x, y)?;
    Ok([1, 1].into())
}

/// [`Backend::blend_rows`].
pub fn blend_rows<T: Tensor>(x: &T, y: &T, mask: &T) -> Result<Shape> {
    let op = Op("blend_rows");
    let [rows, _] = op.matrix("x", x.shape())?;
    let shape = same_shape(op, ["x", "y"], x, y)?;
    op.parameter("mask", mask, &[rows])?;
    Ok(shape)
}

/// [`Backend::affine`].
pub fn affine<T: Tensor>(x: &T, scale: &T, shift: &T) -> Result<Shape> {
    let op = Op("affine");
    op.activation("x", x)?;
    let Some(&dim) = x.shape().dims().last() else {
        return op.fail("x has shape [], expected at least one axis".into());
    };
    op.parameter("scale", scale, &[dim])?;
    op.parameter("shift", shift, &[dim])?;
    Ok(x.shape().clone())
}

/// [`Backend::space_to_depth`].
pub fn space_to_depth(x: &impl Tensor) -> Result<Shape> {
    let op = Op("space_to_depth");
    op.activation("x", x)?;
    let [h, w, c] = op.image("x", x.shape())?;
    if h % 2 != 0 || w % 2 != 0 {
        return op.fail(format!("x has shape {}, expected an even height and width", x.shape()));
    }
    Ok([h / 2, w / 2, 4 * c].into())
}

/// [`Backend::depth_to_space`].
pub fn depth_to_space(x: &impl Tensor) -> Result<Shape> {
    let op = Op("depth_to_space");
    op.activation("x", x)?;
    let [h, w, c] = op.image("x", x.shape())?;
    if c % 4 != 0 {
        return op.fail(format!("x has shape {}, expected a multiple of 4 channels", x.shape()));
    }
    Ok([2 * h, 2 * w, c / 4].into())
}

/// [`Backend::group_norm`].
pub fn group_norm<T: Tensor>(x: &T, groups: usize, weight: &T, bias: &T) -> Result<Shape> {
    let op = Op("group_norm");
    op.activation("x", x)?;
    let [_, _, channels] = op.image("x", x.shape())?;
    if groups == 0 || channels % groups != 0 {
        return op.fail(format!(
            "x has shape {}, whose channels are not a multiple of {groups} groups",
            x.shape()
        ));
    }
    op.parameter("weight", weight, &[channels])?;
    op.parameter("bias", bias, &[channels])?;
    Ok(x.shape().clone())
}

/// [`Backend::conv2d`] with a kernel of shape `[out, in, height, width]`.
pub fn conv2d<T: Tensor>(
    x: &T,
    kernel: [usize; 4],
    geometry: &ConvGeometry,
    residual: Option<&T>,
) -> Result<Shape> {
    let op = Op("conv2d");
    let dtype = op.activation("x", x)?;
    let [h, w, _] = op.image("x", x.shape())?;
    let [out, channels, kh, kw] = kernel;
    op.shape("x", x.shape(), &[h, w, channels])?;
    if geometry.stride == 0 {
        return op.fail("the stride is 0, expected at least 1".into());
    }
    op.sum("padding and size", geometry.padding.into_iter().chain([h, h, w, w]))?;
    let Some([oh, ow]) = geometry.output(h, w, [kh, kw]) else {
        return op.fail(format!(
            "x has shape {}, which with padding {:?} is smaller than the kernel [{kh}, {kw}]",
            x.shape(),
            geometry.padding
        ));
    };
    let shape = Shape::from([oh, ow, out]);
    if let Some(residual) = residual {
        op.same_dtype("residual", residual, dtype)?;
        op.shape("residual", residual.shape(), shape.dims())?;
    }
    Ok(shape)
}

/// Checks tensors to be concatenated by rows; returns `[Σ rows_i, columns]`.
pub(crate) fn row_blocks<T: Tensor>(
    op: Op,
    name: &str,
    parts: &[&T],
    dtype: Option<DType>,
) -> Result<[usize; 2]> {
    let Some(first) = parts.first() else {
        return op.fail(format!("{name} is an empty list"));
    };
    let dtype = dtype.map_or_else(|| op.activation(name, *first), Ok)?;
    let [_, cols] = op.matrix(name, first.shape())?;
    let mut heights = Vec::with_capacity(parts.len());
    for part in parts {
        op.same_dtype(name, *part, dtype)?;
        let [rows, _] = op.matrix(name, part.shape())?;
        op.shape(name, part.shape(), &[rows, cols])?;
        heights.push(rows);
    }
    Ok([op.sum("rows", heights)?, cols])
}

/// Checks tensors to be concatenated by columns; returns `[rows, Σ columns_i]`.
pub(crate) fn column_blocks<T: Tensor>(op: Op, name: &str, parts: &[&T]) -> Result<[usize; 2]> {
    let Some(first) = parts.first() else {
        return op.fail(format!("{name} is an empty list"));
    };
    let dtype = op.activation(name, *first)?;
    let [rows, _] = op.matrix(name, first.shape())?;
    let mut widths = Vec::with_capacity(parts.len());
    for part in parts {
        op.same_dtype(name, *part, dtype)?;
        let [_, cols] = op.matrix(name, part.shape())?;
        op.shape(name, part.shape(), &[rows, cols])?;
        widths.push(cols);
    }
    Ok([rows, op.sum("columns", widths)?])
}

/// Checks two activations of the same shape.
pub(crate) fn same_shape<T: Tensor>(op: Op, names: [&str; 2], x: &T, y: &T) -> Result<Shape> {
    let dtype = op.activation(names[0], x)?;
    op.same_dtype(names[1], y, dtype)?;
    op.shape(names[1], y.shape(), x.shape().dims())?;
    Ok(x.shape().clone())
}
