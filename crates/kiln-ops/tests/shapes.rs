//! What the refusals say: the argument, what it was and what it should have been.

use kiln_ops::{AttentionSpec, ConvGeometry, Groups, Mask, Result, shapes};
use kiln_tensor::{DType, Delta, HostTensor};

fn zeros<const N: usize>(shape: [usize; N]) -> HostTensor {
    HostTensor::zeros(shape)
}

fn half<const N: usize>(shape: [usize; N]) -> HostTensor {
    zeros(shape).to_dtype(DType::BF16).unwrap()
}

#[track_caller]
fn says<T: std::fmt::Debug>(result: Result<T>, expected: &str) {
    assert_eq!(result.unwrap_err().to_string(), expected);
}

#[test]
fn results_have_the_documented_shapes() {
    let dims = |shape: Result<kiln_tensor::Shape>| shape.unwrap().dims().to_vec();
    assert_eq!(dims(shapes::linear(&zeros([5, 4]), [7, 4])), [5, 7]);
    assert_eq!(dims(shapes::swiglu(&half([5, 6]))), [5, 3]);
    assert_eq!(dims(shapes::concat_rows(&[&zeros([1, 3]), &zeros([4, 3])])), [5, 3]);
    assert_eq!(dims(shapes::concat_columns(&[&zeros([2, 3]), &zeros([2, 4])])), [2, 7]);
    assert_eq!(dims(shapes::slice_rows(&zeros([6, 2, 3]), &(1..5))), [4, 2, 3]);
    assert_eq!(dims(shapes::space_to_depth(&zeros([4, 6, 3]))), [2, 3, 12]);
    assert_eq!(dims(shapes::depth_to_space(&zeros([2, 3, 12]))), [4, 6, 3]);
    let up = ConvGeometry { upsample: true, ..ConvGeometry::same(3) };
    assert_eq!(dims(shapes::conv2d(&zeros([4, 5, 2]), [7, 2, 3, 3], &up, None)), [8, 10, 7]);
    let down = ConvGeometry { stride: 2, padding: [0, 1, 0, 1], upsample: false };
    assert_eq!(dims(shapes::conv2d(&zeros([4, 5, 2]), [7, 2, 3, 3], &down, None)), [2, 2, 7]);
    let split = shapes::linear_split(&zeros([5, 4]), [7, 4], &[3, 4]).unwrap();
    assert_eq!(split.map(|shape| shape.dims().to_vec()), [[5, 3], [5, 4]]);
}

#[test]
fn shapes_and_dtypes_are_named() {
    says(shapes::linear(&zeros([5, 3]), [7, 4]), "linear: x has shape [5, 3], expected [5, 4]");
    says(shapes::rms_norm(&zeros([8]), &zeros([8])), "rms_norm: x has shape [8], expected [rows, columns]");
    says(shapes::rms_norm(&zeros([5, 8]), &half([8])), "rms_norm: weight is bf16, expected f32");
    says(shapes::add(&half([2]), &zeros([2])), "add: y is f32, expected bf16 like the first argument");
    says(shapes::cast(&zeros([2]), DType::F16), "cast: the result can't be f16, expected f32 or bf16");
    says(shapes::slice_rows(&zeros([3, 2]), &(1..4)), "slice_rows: rows 1..4 are outside shape [3, 2]");
    says(shapes::concat_rows::<HostTensor>(&[]), "concat_rows: parts is an empty list");
}

#[test]
fn sums_that_do_not_come_out_are_named() {
    says(
        shapes::linear_split(&zeros([5, 4]), [7, 4], &[3, 3]),
        "linear_split: the widths [3, 3] add up to 6, expected 7",
    );
    let x = zeros([5, 3]);
    says(
        shapes::linear_gated_add(&[&x, &x], [7, 4], None, &zeros([5, 7])),
        "linear_gated_add: xs are 6 columns wide together, expected 4",
    );
    says(
        shapes::ada_layer_norm(&x, &zeros([1, 3]), &zeros([1, 3]), &Groups::one(4)),
        "ada_layer_norm: the groups cover 4 rows, expected 5",
    );
    says(
        shapes::group_norm(&zeros([2, 2, 6]), 4, &zeros([6]), &zeros([6])),
        "group_norm: x has shape [2, 2, 6], whose channels don't form 4 groups",
    );
    let delta = Delta { row: 3, down: zeros([2, 4]), up: zeros([4, 2]), scale: 1.0 };
    says(
        shapes::with_deltas(&[delta], [6, 4]),
        "with_deltas: a delta changes rows 3..7 of a linear layer with 6",
    );
}

#[test]
fn attention_says_which_part_does_not_fit() {
    let (x, long) = (zeros([5, 8]), zeros([6, 8]));
    let spec = |heads, kv_heads, mask| AttentionSpec { heads, kv_heads, mask };
    says(
        shapes::attention(&[&x], &[&x], &[&long], &spec(2, 2, Mask::None)),
        "attention: k has 5 rows and v 6, expected the same number, at least 1",
    );
    says(
        shapes::attention(&[&x], &[&x], &[&x], &spec(2, 1, Mask::None)),
        "attention: k is 8 columns wide, expected 1 heads of 4",
    );
    says(
        shapes::attention(&[&x], &[&x], &[&x], &spec(4, 3, Mask::None)),
        "attention: 4 query heads can't share 3 key heads evenly",
    );
    says(
        shapes::attention(&[&x], &[&x], &[&x], &spec(2, 2, Mask::Causal { valid: 6 })),
        "attention: 6 valid keys, expected 1 to 5",
    );
    says(
        shapes::attention(&[&x], &[&long], &[&long], &spec(2, 2, Mask::Causal { valid: 3 })),
        "attention: 5 queries and 6 keys under a causal mask, expected as many",
    );
}

#[test]
fn a_convolution_larger_than_its_input_is_refused() {
    let bare = ConvGeometry { stride: 1, padding: [0; 4], upsample: false };
    says(
        shapes::conv2d(&zeros([2, 5, 3]), [7, 3, 3, 3], &bare, None),
        "conv2d: x has shape [2, 5, 3], which with padding [0, 0, 0, 0] is smaller than the kernel [3, 3]",
    );
    says(
        shapes::conv2d(&zeros([2, 5, 3]), [7, 3, 3, 3], &ConvGeometry { stride: 0, ..bare }, None),
        "conv2d: the stride is 0, expected at least 1",
    );
}
