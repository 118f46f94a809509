//! Asynchronous downloads give the same bytes as synchronous ones, whatever runs in between and on any thread.

use std::thread;

use kiln_cuda::{CudaBackend, CudaTensor, Options};
use kiln_ops::{Backend, Pending};
use kiln_tensor::{DType, HostTensor};

/// The GPU, or `None` with a note.
fn gpu() -> Option<CudaBackend> {
    CudaBackend::new(&Options::default()).map_err(|e| println!("skipped: {e}")).ok()
}

fn tensor(b: &CudaBackend, rows: usize, seed: usize, dtype: DType) -> CudaTensor {
    let value = |i: usize| ((i + 7919 * seed).wrapping_mul(2_654_435_761) % 2003) as f32 / 1000.0 - 1.0;
    let host = HostTensor::from_f32([rows, 24], (0..rows * 24).map(value).collect()).unwrap();
    b.upload(&host, dtype).unwrap()
}

#[test]
fn async_downloads_equal_sync_downloads() {
    let Some(b) = gpu() else { return };
    for dtype in [DType::F32, DType::BF16] {
        // Empty, small, and larger than the staging buffers.
        for rows in [0, 1, 7, 100_000] {
            let x = tensor(&b, rows, 3, dtype);
            assert!(b.download_async(&x).unwrap()().unwrap() == b.download(&x).unwrap(), "{rows} {dtype}");
            let bytes = b.download_bytes_async(&x, 0.5, 0.5).unwrap()().unwrap();
            assert!(bytes == b.download_bytes(&x, 0.5, 0.5).unwrap(), "{rows} {dtype}");
        }
    }
}

#[test]
fn later_work_does_not_change_a_pending_download() {
    let Some(b) = gpu() else { return };
    let mut pending: Vec<(HostTensor, Pending<HostTensor>)> = Vec::new();
    for seed in 0..20 {
        let x = tensor(&b, 500, seed, DType::F32);
        let (expected, download) = (b.download(&x).unwrap(), b.download_async(&x).unwrap());
        // The next tensor reuses the memory.
        drop(x);
        let next = tensor(&b, 500, 100 + seed, DType::F32);
        b.add(&next, &next).unwrap();
        pending.push((expected, download));
    }
    // In reverse order.
    for (expected, download) in pending.into_iter().rev() {
        assert!(download().unwrap() == expected);
    }
}

#[test]
fn buffers_of_dropped_downloads_are_reused() {
    let Some(b) = gpu() else { return };
    for seed in 0..50 {
        let (x, y) = (tensor(&b, 300, seed, DType::F32), tensor(&b, 299, seed + 1, DType::F32));
        drop(b.download_async(&x).unwrap());
        drop(b.fence().unwrap());
        let (first, second) = (b.download_async(&x).unwrap(), b.download_async(&y).unwrap());
        assert!(second().unwrap() == b.download(&y).unwrap());
        assert!(first().unwrap() == b.download(&x).unwrap());
    }
}

#[test]
fn a_pending_download_outlives_the_backend_on_another_thread() {
    let Some(b) = gpu() else { return };
    let x = tensor(&b, 1000, 5, DType::BF16);
    let expected = b.download(&x).unwrap();
    let (download, fence) = (b.download_async(&x).unwrap(), b.fence().unwrap());
    drop((x, b));
    let waiting = thread::spawn(move || {
        fence().unwrap();
        download().unwrap()
    });
    assert!(waiting.join().unwrap() == expected);
}

#[test]
fn many_threads_download_at_once() {
    let Some(b) = gpu() else { return };
    thread::scope(|scope| {
        for seed in 0..6 {
            let b = &b;
            scope.spawn(move || {
                for round in 0..10 {
                    let x = tensor(b, 64 + round, seed, DType::F32);
                    let download = b.download_bytes_async(&x, 1.0, 0.0).unwrap();
                    assert!(download().unwrap() == b.download_bytes(&x, 1.0, 0.0).unwrap());
                }
            });
        }
    });
}
