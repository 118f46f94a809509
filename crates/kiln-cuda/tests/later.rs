//! Downloads that are waited for later give what downloads give, whatever comes between and on whichever thread.

use std::thread;

use kiln_cuda::{CudaBackend, CudaTensor, Options};
use kiln_ops::{Backend, Later};
use kiln_tensor::{DType, HostTensor};

/// The GPU, or `None` with a word about it.
fn gpu() -> Option<CudaBackend> {
    CudaBackend::new(&Options::default()).map_err(|e| println!("skipped: {e}")).ok()
}

fn tensor(b: &CudaBackend, rows: usize, seed: usize, dtype: DType) -> CudaTensor {
    let value = |i: usize| ((i + 7919 * seed).wrapping_mul(2_654_435_761) % 2003) as f32 / 1000.0 - 1.0;
    let host = HostTensor::from_f32([rows, 24], (0..rows * 24).map(value).collect()).unwrap();
    b.upload(&host, dtype).unwrap()
}

#[test]
fn a_later_download_is_a_download() {
    let Some(b) = gpu() else { return };
    for dtype in [DType::F32, DType::BF16] {
        // Nothing, little, and more than goes through staging memory.
        for rows in [0, 1, 7, 100_000] {
            let x = tensor(&b, rows, 3, dtype);
            assert!(b.download_later(&x).unwrap()().unwrap() == b.download(&x).unwrap(), "{rows} {dtype}");
            let bytes = b.download_bytes_later(&x, 0.5, 0.5).unwrap()().unwrap();
            assert!(bytes == b.download_bytes(&x, 0.5, 0.5).unwrap(), "{rows} {dtype}");
        }
    }
}

#[test]
fn work_that_is_asked_for_afterwards_changes_nothing() {
    let Some(b) = gpu() else { return };
    let mut pending: Vec<(HostTensor, Later<HostTensor>)> = Vec::new();
    for seed in 0..20 {
        let x = tensor(&b, 500, seed, DType::F32);
        let (expected, later) = (b.download(&x).unwrap(), b.download_later(&x).unwrap());
        // The tensor's memory goes to what is made next.
        drop(x);
        let next = tensor(&b, 500, 100 + seed, DType::F32);
        b.add(&next, &next).unwrap();
        pending.push((expected, later));
    }
    // The last one first.
    for (expected, later) in pending.into_iter().rev() {
        assert!(later().unwrap() == expected);
    }
}

#[test]
fn buffers_of_downloads_nobody_waited_for_are_used_again() {
    let Some(b) = gpu() else { return };
    for seed in 0..50 {
        let (x, y) = (tensor(&b, 300, seed, DType::F32), tensor(&b, 299, seed + 1, DType::F32));
        drop(b.download_later(&x).unwrap());
        drop(b.fence().unwrap());
        let (first, second) = (b.download_later(&x).unwrap(), b.download_later(&y).unwrap());
        assert!(second().unwrap() == b.download(&y).unwrap());
        assert!(first().unwrap() == b.download(&x).unwrap());
    }
}

#[test]
fn another_thread_may_wait_and_outlive_the_backend() {
    let Some(b) = gpu() else { return };
    let x = tensor(&b, 1000, 5, DType::BF16);
    let expected = b.download(&x).unwrap();
    let (later, fence) = (b.download_later(&x).unwrap(), b.fence().unwrap());
    drop((x, b));
    let waiting = thread::spawn(move || {
        fence().unwrap();
        later().unwrap()
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
                    let later = b.download_bytes_later(&x, 1.0, 0.0).unwrap();
                    assert!(later().unwrap() == b.download_bytes(&x, 1.0, 0.0).unwrap());
                }
            });
        }
    });
}
