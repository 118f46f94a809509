use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also one that a panicking thread held.
///
/// Kiln reports a panic as the error of the request it happened in, and the state behind its locks is valid between
/// any two statements. So poison carries no news.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition variable; ignores poison as [`lock`] does.
pub fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_mutex_is_locked() {
        let mutex = Mutex::new(7);
        std::thread::scope(|scope| {
            let poisoner = scope.spawn(|| {
                let _guard = lock(&mutex);
                panic!("poison the mutex");
            });
            assert!(poisoner.join().is_err());
        });
        assert!(mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 7);
    }
}
