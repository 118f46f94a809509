//! Values that take a while to make: each is made on a thread of its own, and waited for where it is needed.

use std::panic::resume_unwind;
use std::sync::{Mutex, OnceLock};
use std::thread::{self, JoinHandle};

use kiln_base::lock;

/// A value that a thread makes. Dropping it waits for the thread.
pub(crate) struct Later<T> {
    value: OnceLock<T>,
    thread: Mutex<Option<JoinHandle<T>>>,
}

impl<T: Send + 'static> Later<T> {
    /// Starts to make a value.
    pub fn start(make: impl FnOnce() -> T + Send + 'static) -> Later<T> {
        Later { value: OnceLock::new(), thread: Mutex::new(Some(thread::spawn(make))) }
    }
}

impl<T> Later<T> {
    /// A value that is there already.
    pub fn ready(value: T) -> Later<T> {
        Later { value: OnceLock::from(value), thread: Mutex::default() }
    }

    /// Waits for the value. Continues a panic of its thread, at every call.
    pub fn get(&self) -> &T {
        self.value.get_or_init(|| {
            let thread = lock(&self.thread).take();
            match thread.map(JoinHandle::join) {
                Some(Ok(value)) => value,
                Some(Err(panic)) => resume_unwind(panic),
                None => panic!("the thread of a value panicked"),
            }
        })
    }
}

impl<T> Drop for Later<T> {
    fn drop(&mut self) {
        drop(lock(&self.thread).take().map(JoinHandle::join));
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn all_threads_get_the_same_value() {
        let later = Later::start(|| vec![1, 2, 3]);
        let addresses = thread::scope(|scope| {
            let threads = [0; 4].map(|_| scope.spawn(|| later.get().as_ptr() as usize));
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(addresses, [later.get().as_ptr() as usize; 4]);
        assert_eq!(*later.get(), [1, 2, 3]);
    }

    #[test]
    fn a_panic_reaches_everyone_who_waits() {
        let later = Later::<u8>::start(|| panic!("no value"));
        for _ in 0..2 {
            assert!(catch_unwind(AssertUnwindSafe(|| *later.get())).is_err());
        }
    }
}
