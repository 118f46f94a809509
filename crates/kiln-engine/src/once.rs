//! A cell that is filled on first use by a function that may fail.

use std::fmt;
use std::sync::{Mutex, OnceLock};

use kiln_base::lock;

/// A [`OnceLock`] with a fallible initializer.
pub(crate) struct TryOnceLock<T> {
    value: OnceLock<T>,
    initializing: Mutex<()>,
}

impl<T> TryOnceLock<T> {
    pub fn new() -> TryOnceLock<T> {
        TryOnceLock { value: OnceLock::new(), initializing: Mutex::new(()) }
    }

    /// Returns the value, computing it with `init` on first use. Other threads wait meanwhile; after an error the next
    /// call tries again.
    pub fn get_or_try_init<E>(&self, init: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let _initializing = lock(&self.initializing);
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let value = init()?;
        Ok(self.value.get_or_init(|| value))
    }
}

impl<T> From<T> for TryOnceLock<T> {
    fn from(value: T) -> TryOnceLock<T> {
        let cell = TryOnceLock::new();
        cell.value.get_or_init(|| value);
        cell
    }
}

impl<T> fmt::Debug for TryOnceLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = self.value.get().is_some();
        f.write_str(if set { "TryOnceLock(set)" } else { "TryOnceLock(unset)" })
    }
}
