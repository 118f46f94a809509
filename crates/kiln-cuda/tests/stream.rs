//! Weights that are brought in when they are used compute the same bits as those that stay.

use kiln_cuda::{CudaBackend, Options};
use kiln_ops::{Backend, Residency};
use kiln_tensor::packed::{Format, Packed};
use kiln_tensor::{DType, HostTensor, LinearParts};

/// The GPU, or `None` with a word about it.
fn gpu(memory_limit: Option<usize>) -> Option<CudaBackend> {
    let options = Options { keep: false, memory_limit, ..Options::default() };
    CudaBackend::new(&options).map_err(|e| println!("skipped: {e}")).ok()
}

const WIDTH: usize = 1056;
const LAYERS: usize = 7;

fn values(rows: usize, seed: usize) -> HostTensor {
    let value = |i: usize| ((i + 7919 * seed).wrapping_mul(2_654_435_761) % 2003) as f32 / 40_000.0 - 0.025;
    HostTensor::from_f32([rows, WIDTH], (0..rows * WIDTH).map(value).collect()).unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Stored(DType),
    Int8,
    Fp8,
    Packed(Format),
}

fn parts(kind: Kind, seed: usize) -> LinearParts {
    let weight = values(WIDTH, seed);
    match kind {
        Kind::Stored(dtype) => LinearParts::dense(vec![weight.to_dtype(dtype).unwrap()]).unwrap(),
        Kind::Int8 => {
            let bytes: Vec<u8> = (0..WIDTH * WIDTH).map(|i| (i * 31 + seed) as u8).collect();
            let integers = HostTensor::new(DType::I8, [WIDTH, WIDTH], bytes.into()).unwrap();
            let scales = HostTensor::from_f32([WIDTH], vec![1e-4; WIDTH]).unwrap();
            LinearParts::int8(vec![integers], vec![scales]).unwrap()
        }
        Kind::Fp8 => {
            LinearParts::dense(vec![weight.to_dtype(DType::BF16).unwrap()]).unwrap().in_fp8().unwrap()
        }
        Kind::Packed(format) => {
            let bytes = (0..format.row_bytes(WIDTH).unwrap() * WIDTH).map(|i| (i * 29 + seed) as u8 & 0x3b);
            let packed = Packed::new(format, [WIDTH, WIDTH], bytes.collect::<Vec<_>>().into()).unwrap();
            let parts = LinearParts::packed(vec![packed.scaled(1e-5)]).unwrap();
            if format == Format::F8E4M3 { parts.in_fp8().unwrap() } else { parts }
        }
    }
}

/// What a few layers, one after the other and twice over, make of an input.
fn run(
    b: &CudaBackend,
    kind: Kind,
    dtype: DType,
    residency: impl Fn(usize) -> Residency,
) -> kiln_ops::Result<HostTensor> {
    let layers = (0..LAYERS).map(|i| b.weight(parts(kind, i), residency(i)));
    let layers = layers.collect::<kiln_ops::Result<Vec<_>>>()?;
    let mut x = b.upload(&values(24, 99), dtype)?;
    for _ in 0..2 {
        for layer in &layers {
            x = b.linear_gated_add(&[&x], layer, None, &x)?;
        }
    }
    b.download(&x)
}

#[test]
fn weights_that_are_brought_in_give_the_same_bits() {
    let Some(b) = gpu(None) else { return };
    let mut kinds = vec![Kind::Stored(DType::BF16), Kind::Stored(DType::F32), Kind::Int8];
    kinds.extend([Kind::Packed(Format::Q4_1), Kind::Packed(Format::F8E5M2)]);
    if b.gpu().has_fp8() {
        kinds.extend([Kind::Fp8, Kind::Packed(Format::F8E4M3)]);
    }
    for kind in kinds {
        for dtype in [DType::BF16, DType::F32] {
            let stay = run(&b, kind, dtype, |_| Residency::Device).unwrap();
            // All of them, and every other one.
            for every in [1, 2] {
                let place =
                    |i: usize| if i.is_multiple_of(every) { Residency::Host } else { Residency::Device };
                let come = run(&b, kind, dtype, place).unwrap();
                assert!(stay == come, "{kind:?}, {dtype}, every {every} brought in");
            }
            assert!(stay.to_f32().unwrap().iter().all(|v| v.is_finite()), "{kind:?}");
        }
    }
}

#[test]
fn a_model_that_is_larger_than_the_limit_runs_and_one_layer_that_is_says_so() {
    // The products' own memory, and three layers of the seven.
    const LIMIT: usize = (64 << 20) + 3 * 2 * WIDTH * WIDTH + (1 << 20);
    let Some(b) = gpu(Some(LIMIT)) else { return };
    let kind = Kind::Stored(DType::BF16);
    run(&b, kind, DType::BF16, |_| Residency::Host).unwrap();
    assert!(b.memory_peak() <= LIMIT, "{} bytes", b.memory_peak());
    let error = run(&b, kind, DType::BF16, |_| Residency::Device).unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    // And the process goes on.
    run(&b, kind, DType::BF16, |_| Residency::Host).unwrap();
}
