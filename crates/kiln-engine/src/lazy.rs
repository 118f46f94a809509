//! A value that is made when it is first asked for, once, also where making it may fail.

use std::fmt;
use std::sync::{Mutex, OnceLock};

use kiln_base::lock;

pub(crate) struct Lazy<T> {
    value: OnceLock<T>,
    making: Mutex<()>,
}

impl<T> Lazy<T> {
    pub fn new() -> Lazy<T> {
        Lazy { value: OnceLock::new(), making: Mutex::new(()) }
    }

    /// The value, made by `make` if it is not there. Others wait meanwhile; after an error the next one tries again.
    pub fn get<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let _making = lock(&self.making);
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let value = make()?;
        Ok(self.value.get_or_init(|| value))
    }
}

impl<T> From<T> for Lazy<T> {
    fn from(value: T) -> Lazy<T> {
        let lazy = Lazy::new();
        lazy.value.get_or_init(|| value);
        lazy
    }
}

impl<T> fmt::Debug for Lazy<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.value.get().is_some() { "Lazy(made)" } else { "Lazy" })
    }
}
