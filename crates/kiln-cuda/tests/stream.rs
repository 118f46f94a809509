//! Streamed weights give the same bits as resident ones.

use kiln_cuda::{CudaBackend, Options};
use kiln_ops::{Backend, Residency};
use kiln_tensor::packed::{BlockScales, Format, PackedTensor};
use kiln_tensor::{DType, HostLinear, HostTensor, Rotation};

/// The GPU, or `None` with a note.
fn gpu(memory_limit: Option<usize>) -> Option<CudaBackend> {
    let options = Options { use_cache: false, memory_limit, ..Options::default() };
    CudaBackend::new(&options).map_err(|e| println!("skipped: {e}")).ok()
}

const WIDTH: usize = 1056;
const LAYERS: usize = 7;

fn values(rows: usize, seed: usize) -> HostTensor {
    let value = |i: usize| ((i + 7919 * seed).wrapping_mul(2_654_435_761) % 2003) as f32 / 40_000.0 - 0.025;
    HostTensor::from_f32([rows, WIDTH], (0..rows * WIDTH).map(value).collect()).unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Storage {
    Stored(DType),
    Int8,
    Fp8,
    Nvfp4,
    Packed(Format),
}

fn host_linear(storage: Storage, seed: usize) -> HostLinear {
    let weight = values(WIDTH, seed);
    match storage {
        Storage::Stored(dtype) => HostLinear::dense(vec![weight.to_dtype(dtype).unwrap()]).unwrap(),
        Storage::Int8 => {
            let bytes: Vec<u8> = (0..WIDTH * WIDTH).map(|i| (i * 31 + seed) as u8).collect();
            let integers = HostTensor::new(DType::I8, [WIDTH, WIDTH], bytes.into()).unwrap();
            let scales = HostTensor::from_f32([WIDTH], vec![1e-4; WIDTH]).unwrap();
            HostLinear::int8(vec![integers], vec![scales], Rotation::for_width(WIDTH)).unwrap()
        }
        Storage::Fp8 => {
            HostLinear::dense(vec![weight.to_dtype(DType::BF16).unwrap()]).unwrap().with_fp8_matmul().unwrap()
        }
        Storage::Nvfp4 => {
            let bytes: Vec<u8> = (0..WIDTH * WIDTH / 2).map(|i| (i * 31 + seed) as u8).collect();
            let scales = vec![0x38; WIDTH * WIDTH / 16];
            let scales =
                BlockScales { scales: scales.into(), swizzled: false, high_first: false, global: 1e-3 };
            let packed = PackedTensor::new(Format::NvFp4, [WIDTH, WIDTH], bytes.into()).unwrap();
            let packed = packed.with_block_scales(scales).unwrap();
            HostLinear::packed(vec![packed]).unwrap().with_nvfp4_matmul().unwrap()
        }
        Storage::Packed(format) => {
            let bytes = (0..format.row_bytes(WIDTH).unwrap() * WIDTH).map(|i| (i * 29 + seed) as u8 & 0x3b);
            let packed = PackedTensor::new(format, [WIDTH, WIDTH], bytes.collect::<Vec<_>>().into()).unwrap();
            let parts = HostLinear::packed(vec![packed.with_scale(1e-5)]).unwrap();
            if format == Format::F8E4M3 { parts.with_fp8_matmul().unwrap() } else { parts }
        }
    }
}

/// Runs a chain of layers twice.
fn run(
    b: &CudaBackend,
    storage: Storage,
    dtype: DType,
    residency: impl Fn(usize) -> Residency,
) -> kiln_ops::Result<HostTensor> {
    let layers = (0..LAYERS).map(|i| b.load_weight(host_linear(storage, i), residency(i)));
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
fn streamed_weights_give_the_same_bits() {
    let Some(b) = gpu(None) else { return };
    let mut storages = vec![Storage::Stored(DType::BF16), Storage::Stored(DType::F32), Storage::Int8];
    storages.extend([Storage::Packed(Format::Q4_1), Storage::Packed(Format::F8E5M2)]);
    if b.gpu().has_fp8() {
        storages.extend([Storage::Fp8, Storage::Packed(Format::F8E4M3)]);
    }
    if b.has_nvfp4() {
        storages.push(Storage::Nvfp4);
    }
    for storage in storages {
        for dtype in [DType::BF16, DType::F32] {
            let resident = run(&b, storage, dtype, |_| Residency::Device).unwrap();
            // All of them, and every other one.
            for every in [1, 2] {
                let residency =
                    |i: usize| if i.is_multiple_of(every) { Residency::Host } else { Residency::Device };
                let streamed = run(&b, storage, dtype, residency).unwrap();
                assert!(resident == streamed, "{storage:?}, {dtype}, every {every} streamed");
            }
            assert!(resident.to_f32().unwrap().iter().all(|v| v.is_finite()), "{storage:?}");
        }
    }
}

#[test]
fn a_streamed_model_runs_within_the_limit_and_a_resident_one_fails() {
    // The cuBLASLt workspace and three of the seven layers.
    const LIMIT: usize = (64 << 20) + 3 * 2 * WIDTH * WIDTH + (1 << 20);
    let Some(b) = gpu(Some(LIMIT)) else { return };
    let storage = Storage::Stored(DType::BF16);
    run(&b, storage, DType::BF16, |_| Residency::Host).unwrap();
    assert!(b.memory_peak() <= LIMIT, "{} bytes", b.memory_peak());
    let error = run(&b, storage, DType::BF16, |_| Residency::Device).unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    // The process still works.
    run(&b, storage, DType::BF16, |_| Residency::Host).unwrap();
}
