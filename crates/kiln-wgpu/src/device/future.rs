use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::thread;

/// The value of a future of wgpu's, which has one at the first poll where it calls a driver directly.
pub(crate) fn resolve<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::yield_now(),
        }
    }
}
