//! `Timed` gives the results of the backend inside, and counts what they took.

use kiln_ops::{
    AttentionSpec, Backend, ConvGeometry, Mask, Reference, Residency, Result, RopePairs, RopeTable, Timed,
};
use kiln_tensor::{DType, HostTensor, LinearParts};

fn host<const N: usize>(shape: [usize; N]) -> HostTensor {
    let values = (0..shape.iter().product()).map(|i: usize| (i * 37 % 101) as f32 * 0.02 - 1.0).collect();
    HostTensor::from_f32(shape, values).unwrap()
}

/// Operations with weights, tables and lists of arguments, end to end.
fn work<B: Backend>(b: &B) -> Result<Vec<HostTensor>> {
    let upload = |x: &HostTensor| b.upload(x, DType::F32);
    let weight = |rows, cols| b.weight(LinearParts::dense(vec![host([rows, cols])])?, Residency::Device);
    let x = upload(&host([6, 8]))?;
    let [q, k, v] = b.linear_split(&x, &weight(24, 8)?, [8; 3])?;
    let table = || upload(&host([6, 2]));
    let rope = RopeTable { cos: table()?, sin: table()?, pairs: RopePairs::Adjacent };
    let q = b.norm_rope(&q, &upload(&host([4]))?, &rope, 1e-6)?;
    let spec = AttentionSpec { heads: 2, kv_heads: 2, mask: Mask::Causal { valid: 4 } };
    let attended = b.attention(&[&q], &[&k], &[&v], &spec)?;
    let x = b.linear_gated_add(&[&attended, &x], &weight(8, 16)?, None, &x)?;
    let picture = b.reshape(&x, [4, 6, 2].into())?;
    let conv = b.conv(&host([5, 2, 3, 3]), Some(&host([5])))?;
    let picture = b.conv2d(&picture, &conv, ConvGeometry::same(3), None)?;
    [&x, &picture].into_iter().map(|x| b.download(x)).collect()
}

#[test]
fn results_are_those_of_the_backend_inside() {
    let timed = Timed::new(Reference::new());
    assert_eq!(work(&timed).unwrap(), work(&Reference::new()).unwrap());
    assert_eq!(timed.name(), Reference::new().name());
}

#[test]
fn every_operation_is_counted_with_its_work() {
    let b = Timed::new(Reference::new());
    work(&b).unwrap();
    let counts = b.take();
    let of = |op: &str| {
        let found: Vec<_> = counts.iter().filter(|c| c.op == op).collect();
        assert_eq!(found.len(), 1, "{op}: {found:?}");
        (found[0].calls, found[0].flops, found[0].detail.as_str())
    };
    assert_eq!(of("linear_split"), (1, 2 * 6 * 8 * 24, "6 × 8 → 24"));
    assert_eq!(of("linear_gated_add"), (1, 2 * 6 * 16 * 8, "6 × 16 → 8"));
    // Pairs: 1 + 2 + 3 + 4 + 4 + 4, eight channels, two products.
    assert_eq!(of("attention"), (1, 4 * 18 * 8, "6 × 6, 2 heads × 4, causal"));
    assert_eq!(of("conv2d"), (1, 2 * 24 * 5 * 2 * 9, "4 × 6, 2 → 5, 3 × 3"));
    assert_eq!(of("norm_rope"), (1, 0, "6 × 8"));
    assert!(counts.iter().all(|c| c.calls > 0));
    assert!(b.take().is_empty());
}

#[test]
fn a_refused_call_is_not_counted() {
    let b = Timed::new(Reference::new());
    let x = b.upload(&host([2, 3]), DType::F32).unwrap();
    b.take();
    assert!(b.swiglu(&x).is_err());
    assert!(b.take().is_empty());
}
