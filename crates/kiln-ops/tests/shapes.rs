//! Error messages of the shape checks: the argument, what was expected and what was found.

use kiln_ops::{AttentionMask, AttentionSpec, ConvGeometry, Result, RowGroups, shapes};
use kiln_tensor::{DType, HostTensor, LoraDelta};

fn zeros<const N: usize>(shape: [usize; N]) -> HostTensor {
    HostTensor::zeros(shape)
}

fn bf16_zeros<const N: usize>(shape: [usize; N]) -> HostTensor {
    zeros(shape).to_dtype(DType::BF16).unwrap()
}

#[track_caller]
fn fails_with<T: std::fmt::Debug>(result: Result<T>, expected: &str) {
    assert_eq!(result.unwrap_err().to_string(), expected);
}

#[test]
fn results_have_the_documented_shapes() {
    let dims = |shape: Result<kiln_tensor::Shape>| shape.unwrap().dims().to_vec();
    assert_eq!(dims(shapes::linear(&zeros([5, 4]), [7, 4])), [5, 7]);
    assert_eq!(dims(shapes::swiglu(&bf16_zeros([5, 6]))), [5, 3]);
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
    fails_with(shapes::linear(&zeros([5, 3]), [7, 4]), "linear: x has shape [5, 3], expected [5, 4]");
    fails_with(
        shapes::rms_norm(&zeros([8]), &zeros([8])),
        "rms_norm: x has shape [8], expected [rows, columns]",
    );
    fails_with(shapes::rms_norm(&zeros([5, 8]), &bf16_zeros([8])), "rms_norm: weight is bf16, expected f32");
    fails_with(
        shapes::add(&bf16_zeros([2]), &zeros([2])),
        "add: y is f32, expected bf16 like the first argument",
    );
    fails_with(shapes::cast(&zeros([2]), DType::F16), "cast: the result can't be f16, expected f32 or bf16");
    fails_with(shapes::slice_rows(&zeros([3, 2]), &(1..4)), "slice_rows: rows 1..4 are outside shape [3, 2]");
    fails_with(
        shapes::write_rows(&zeros([3, 2]), 2, &zeros([2, 2])),
        "write_rows: 2 rows from row 2 on are outside shape [3, 2]",
    );
    fails_with(shapes::concat_rows::<HostTensor>(&[]), "concat_rows: parts is an empty list");
}

#[test]
fn wrong_totals_are_named() {
    fails_with(
        shapes::linear_split(&zeros([5, 4]), [7, 4], &[3, 3]),
        "linear_split: the widths [3, 3] add up to 6, expected 7",
    );
    let x = zeros([5, 3]);
    fails_with(
        shapes::linear_gated_add(&[&x, &x], [7, 4], None, &zeros([5, 7])),
        "linear_gated_add: xs have 6 columns in total, expected 4",
    );
    fails_with(
        shapes::ada_layer_norm(&x, &zeros([1, 3]), &zeros([1, 3]), &RowGroups::single(4)),
        "ada_layer_norm: the groups cover 4 rows, expected 5",
    );
    fails_with(
        shapes::group_norm(&zeros([2, 2, 6]), 4, &zeros([6]), &zeros([6])),
        "group_norm: x has shape [2, 2, 6], whose channels are not a multiple of 4 groups",
    );
    let delta = LoraDelta { row: 3, down: zeros([2, 4]), up: zeros([4, 2]), scale: 1.0 };
    fails_with(
        shapes::with_deltas(&[delta], [6, 4]),
        "with_deltas: a LoRA delta changes rows 3..7 of a linear layer with 6 rows",
    );
}

#[test]
fn attention_names_the_wrong_argument() {
    let (x, long) = (zeros([5, 8]), zeros([6, 8]));
    let spec = |heads, kv_heads, mask| AttentionSpec::new(heads, kv_heads, mask);
    fails_with(
        shapes::attention(&[&x], &[&x], &[&long], &spec(2, 2, AttentionMask::None)),
        "attention: k has 5 rows and v 6, expected the same number, at least 1",
    );
    fails_with(
        shapes::attention(&[&x], &[&x], &[&x], &spec(2, 1, AttentionMask::None)),
        "attention: k has 8 columns, expected 1 heads of 4",
    );
    fails_with(
        shapes::attention(&[&x], &[&x], &[&x], &spec(4, 3, AttentionMask::None)),
        "attention: 4 query heads are not a multiple of 3 key heads",
    );
    fails_with(
        shapes::attention(&[&x], &[&x], &[&x], &spec(2, 2, AttentionMask::Causal { valid: 6 })),
        "attention: 6 valid keys, expected 1 to 5",
    );
    fails_with(
        shapes::attention(&[&x], &[&long], &[&long], &spec(2, 2, AttentionMask::Causal { valid: 3 })),
        "attention: 5 queries and 6 keys with a causal mask, expected equal numbers",
    );
}

#[test]
fn a_kernel_larger_than_its_input_is_an_error() {
    let bare = ConvGeometry { stride: 1, padding: [0; 4], upsample: false };
    fails_with(
        shapes::conv2d(&zeros([2, 5, 3]), [7, 3, 3, 3], &bare, None),
        "conv2d: x has shape [2, 5, 3], which with padding [0, 0, 0, 0] is smaller than the kernel [3, 3]",
    );
    fails_with(
        shapes::conv2d(&zeros([2, 5, 3]), [7, 3, 3, 3], &ConvGeometry { stride: 0, ..bare }, None),
        "conv2d: the stride is 0, expected at least 1",
    );
}
