//! Devices that are lost, full or short of memory give errors, never panics; downloads have their values whatever follows.

use kiln_ops::{Backend, Error, Pending, Residency, Tensor};
use kiln_tensor::{DType, HostLinear, HostTensor};
use kiln_wgpu::{Options, WgpuBackend, WgpuTensor};

/// An adapter, or `None` with a note.
fn open(options: &Options) -> Option<WgpuBackend> {
    WgpuBackend::new(options).map_err(|e| println!("skipped: {e}")).ok()
}

fn tensor(b: &WgpuBackend, rows: usize, seed: usize, dtype: DType) -> WgpuTensor {
    let value = |i: usize| ((i + 7919 * seed).wrapping_mul(2_654_435_761) % 2003) as f32 / 1000.0 - 1.0;
    let host = HostTensor::from_f32([rows, 24], (0..rows * 24).map(value).collect()).unwrap();
    b.upload(&host, dtype).unwrap()
}

fn weight() -> HostLinear {
    HostLinear::dense(vec![HostTensor::zeros([24, 24])]).unwrap()
}

#[test]
fn a_lost_device_is_an_error_of_every_later_call() {
    let Some(b) = open(&Options::default()) else { return };
    let x = tensor(&b, 9, 1, DType::F32);
    let w = b.load_weight(weight(), Residency::Device).unwrap();
    let pending = b.download_async(&x).unwrap();
    b.destroy();
    let is_lost = |result: kiln_ops::Result<()>| match result {
        Err(Error::Device { what, .. }) => assert!(what.contains("lost"), "{what}"),
        other => panic!("expected the error of a lost device, found {other:?}"),
    };
    // Work before the loss may have been done.
    let _ = pending();
    for _ in 0..2 {
        is_lost(b.linear(&x, &w).map(drop));
        is_lost(b.download(&x).map(drop));
        is_lost(b.upload(&HostTensor::zeros([3, 5]), DType::F32).map(drop));
        is_lost(b.download_async(&x).and_then(|download| download()).map(drop));
        is_lost(b.synchronize());
    }
    // Another device of the same adapter works.
    let b = open(&Options::default()).unwrap();
    let x = tensor(&b, 9, 1, DType::F32);
    assert_eq!(b.download(&b.add(&x, &x).unwrap()).unwrap().shape(), x.shape());
}

#[test]
fn a_full_device_is_an_error_of_the_allocation() {
    let Some(b) = open(&Options { memory_limit: Some(1 << 20), ..Options::default() }) else { return };
    let x = tensor(&b, 5000, 1, DType::F32);
    let Err(Error::Memory { bytes, .. }) = b.add(&x, &x).and_then(|y| b.add(&y, &y).map(|z| (y, z))) else {
        panic!("two more tensors fit into the limit")
    };
    assert_eq!(bytes, 5000 * 24 * 4);
    assert!(b.memory_held() <= 1 << 20 && b.memory_free().is_some());
    // The memory of the failed call is free again.
    b.add(&x, &x).unwrap();
    let sum = b.download(&b.add(&x, &x).unwrap()).unwrap();
    assert_eq!(sum.numel(), 5000 * 24);
}

#[test]
fn a_tensor_beyond_all_limits_is_an_error() {
    let Some(b) = open(&Options { minimal: true, ..Options::default() }) else { return };
    let x = tensor(&b, 3, 1, DType::F32);
    // 2 GiB of result; WebGPU promises buffers of 256 MiB.
    let wide =
        HostLinear::dense(vec![HostTensor::new(DType::BF16, [1, 1], vec![0; 2].into()).unwrap()]).unwrap();
    let wide = b.load_weight(wide, Residency::Device).unwrap();
    let narrow = b.reshape(&x, [72, 1].into()).unwrap();
    assert_eq!(b.linear(&narrow, &wide).unwrap().shape().dims(), [72, 1]);
    let huge = b.concat_rows(&vec![&x; 1 << 20]);
    assert!(matches!(huge, Err(Error::Memory { .. })), "{huge:?}");
}

#[test]
fn a_missing_adapter_is_an_error() {
    let e = WgpuBackend::new(&Options { number: 1000, ..Options::default() }).unwrap_err();
    assert!(e.to_string().starts_with("there is no adapter 1000"), "{e}");
}

#[test]
fn async_downloads_equal_sync_downloads() {
    let Some(b) = open(&Options::default()) else { return };
    for dtype in [DType::F32, DType::BF16] {
        for rows in [0, 1, 7, 20_000] {
            let x = tensor(&b, rows, 3, dtype);
            assert!(b.download_async(&x).unwrap()().unwrap() == b.download(&x).unwrap(), "{rows} {dtype}");
            let bytes = b.download_bytes_async(&x, 0.5, 0.5).unwrap()().unwrap();
            assert!(bytes == b.download_bytes(&x, 0.5, 0.5).unwrap(), "{rows} {dtype}");
        }
    }
}

#[test]
fn later_work_does_not_change_a_pending_download() {
    let Some(b) = open(&Options::default()) else { return };
    let mut pending: Vec<(HostTensor, Pending<HostTensor>)> = Vec::new();
    for seed in 0..10 {
        let x = tensor(&b, 500, seed, DType::F32);
        let (expected, download) = (b.download(&x).unwrap(), b.download_async(&x).unwrap());
        // The next tensor reuses the memory.
        drop(x);
        let next = tensor(&b, 500, 100 + seed, DType::F32);
        b.add(&next, &next).unwrap();
        pending.push((expected, download));
    }
    // In reverse order, on another thread.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (expected, download) in pending.into_iter().rev() {
                assert!(download().unwrap() == expected);
            }
        });
    });
}

#[test]
fn weights_on_the_host_give_the_same_bits() {
    let Some(b) = open(&Options::default()) else { return };
    let x = tensor(&b, 17, 5, DType::F32);
    let rows = b.download(&tensor(&b, 31, 2, DType::BF16)).unwrap();
    let layer = HostLinear::dense(vec![rows]).unwrap();
    let product = |residency| {
        let w = b.load_weight(layer.clone(), residency).unwrap();
        b.download(&b.linear(&x, &w).unwrap()).unwrap()
    };
    assert_eq!(product(Residency::Host), product(Residency::Device));
}
