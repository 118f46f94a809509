//! `TimedBackend` returns the results of its inner backend and measures the operations.

use kiln_ops::{
    AttentionMask, AttentionSpec, Backend, ConvGeometry, Reference, Residency, Result, RopeLayout, RopeTable,
    TimedBackend,
};
use kiln_tensor::{DType, HostLinear, HostTensor};

fn host<const N: usize>(shape: [usize; N]) -> HostTensor {
    let values = (0..shape.iter().product()).map(|i: usize| (i * 37 % 101) as f32 * 0.02 - 1.0).collect();
    HostTensor::from_f32(shape, values).unwrap()
}

/// A small model: operations with weights, tables and lists of arguments.
fn run<B: Backend>(b: &B) -> Result<Vec<HostTensor>> {
    let upload = |x: &HostTensor| b.upload(x, DType::F32);
    let weight = |rows, cols| b.load_weight(HostLinear::dense(vec![host([rows, cols])])?, Residency::Device);
    let x = upload(&host([6, 8]))?;
    let [q, k, v] = b.linear_split(&x, &weight(24, 8)?, [8; 3])?;
    let table = || upload(&host([6, 2]));
    let rope = RopeTable { cos: table()?, sin: table()?, pairs: RopeLayout::Interleaved };
    let q = b.norm_rope(&q, Some(&upload(&host([4]))?), &rope, 1e-6)?;
    let spec = AttentionSpec::new(2, 2, AttentionMask::Causal { valid: 4 });
    let attended = b.attention(&[&q], &[&k], &[&v], &spec)?;
    let x = b.linear_gated_add(&[&attended, &x], &weight(8, 16)?, None, &x)?;
    let image = b.reshape(&x, [4, 6, 2].into())?;
    let conv = b.load_conv(&host([5, 2, 3, 3]), Some(&host([5])))?;
    let image = b.conv2d(&image, &conv, ConvGeometry::same(3), None)?;
    [&x, &image].into_iter().map(|x| b.download(x)).collect()
}

#[test]
fn results_are_those_of_the_inner_backend() {
    let timed = TimedBackend::new(Reference::new());
    assert_eq!(run(&timed).unwrap(), run(&Reference::new()).unwrap());
    assert_eq!(timed.name(), Reference::new().name());
}

#[test]
fn every_operation_is_measured_with_its_cost() {
    let b = TimedBackend::new(Reference::new());
    run(&b).unwrap();
    let stats = b.timer().take();
    let of = |op: &str| {
        let found: Vec<_> = stats.iter().filter(|c| c.op == op).collect();
        assert_eq!(found.len(), 1, "{op}: {found:?}");
        (found[0].calls, found[0].flops, found[0].detail.as_str())
    };
    assert_eq!(of("linear_split"), (1, 2 * 6 * 8 * 24, "6 × 8 → 24"));
    assert_eq!(of("linear_gated_add"), (1, 2 * 6 * 16 * 8, "6 × 16 → 8"));
    // Attended pairs: 1 + 2 + 3 + 4 + 4 + 4, eight channels, two products.
    assert_eq!(of("attention"), (1, 4 * 18 * 8, "6 × 6, 2 heads × 4, causal"));
    assert_eq!(of("conv2d"), (1, 2 * 24 * 5 * 2 * 9, "4 × 6, 2 → 5, 3 × 3"));
    assert_eq!(of("norm_rope"), (1, 0, "6 × 8"));
    assert!(stats.iter().all(|c| c.calls > 0));
    assert!(b.timer().take().is_empty());
}

#[test]
fn a_failed_call_is_not_measured() {
    let b = TimedBackend::new(Reference::new());
    let x = b.upload(&host([2, 3]), DType::F32).unwrap();
    b.timer().take();
    assert!(b.swiglu(&x).is_err());
    assert!(b.timer().take().is_empty());
}
