//! Handles: numbers in a table that look like pointers to the caller. They are never dereferenced, and no number is
//! used twice, so that a freed or foreign handle is always detected.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use kiln_base::lock;

use crate::status::Failure;

/// The next handle of any table: no two tables share a handle.
static NEXT: AtomicUsize = AtomicUsize::new(STEP);
/// Handles look like aligned pointers.
const STEP: usize = 16;

/// The values behind the handles of one type.
pub(crate) struct Table<T> {
    /// The type's name in C.
    name: &'static str,
    values: Mutex<BTreeMap<usize, Arc<T>>>,
}

impl<T> Table<T> {
    pub const fn new(name: &'static str) -> Table<T> {
        Table { name, values: Mutex::new(BTreeMap::new()) }
    }

    /// Adds a value and returns its handle.
    pub fn insert<H>(&self, value: T) -> *mut H {
        let handle = NEXT.fetch_add(STEP, Relaxed);
        lock(&self.values).insert(handle, Arc::new(value));
        std::ptr::without_provenance_mut(handle)
    }

    /// Returns the value of a handle. It stays alive while it is used, even if the handle is freed meanwhile.
    pub fn get<H>(&self, handle: *const H) -> Result<Arc<T>, Failure> {
        if handle.is_null() {
            return Err(Failure::invalid(format!("the {} is NULL", self.name)));
        }
        let value = lock(&self.values).get(&handle.addr()).cloned();
        value.ok_or_else(|| self.unknown())
    }

    /// Frees a handle. NULL is ignored.
    pub fn remove<H>(&self, handle: *mut H) -> Result<(), Failure> {
        if handle.is_null() {
            return Ok(());
        }
        // Dropped after the table is unlocked.
        let value = lock(&self.values).remove(&handle.addr());
        value.map(drop).ok_or_else(|| self.unknown())
    }

    fn unknown(&self) -> Failure {
        Failure::invalid(format!("this is no {0}, or a {0} that was freed", self.name))
            .hint("use a handle only until it is freed, and free it once")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_and_foreign_handles_are_refused() {
        let (a, b) = (Table::new("kiln_a"), Table::new("kiln_b"));
        let handle: *mut u8 = a.insert(7);
        assert_eq!(*a.get(handle).unwrap(), 7);
        assert!(b.get(handle).is_err() as u8 + b.remove(handle).is_err() as u8 == 2);
        b.insert::<u8>(8);
        a.remove(handle).unwrap();
        assert!(a.get(handle).unwrap_err().message.contains("freed"));
        assert!(a.remove(handle).is_err());
        assert!(a.remove(std::ptr::null_mut::<u8>()).is_ok());
        assert!(a.get(std::ptr::null::<u8>()).unwrap_err().message.contains("NULL"));
    }
}
