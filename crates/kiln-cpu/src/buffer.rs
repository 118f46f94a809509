//! Memory of tensors and of packed operands.

use std::ops::{Deref, DerefMut};

use bytemuck::Zeroable;
use kiln_ops::{Error, Result};

/// Bytes of a cache line, and of the widest vector.
const ALIGNMENT: usize = 64;

/// A fixed number of elements, the first at a multiple of 64 bytes.
pub(crate) struct Buffer<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Zeroable> Buffer<T> {
    /// `len` zeros; the system hands large ones out untouched, so that this costs nothing by itself.
    pub fn zeros(len: usize) -> Result<Self> {
        let size = size_of::<T>();
        let failed = || Error::Memory { backend: "cpu".into(), bytes: len.saturating_mul(size) };
        let room = len.checked_add(ALIGNMENT / size).ok_or_else(failed)?;
        if room.checked_mul(size).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(failed());
        }
        let data: Vec<T> = bytemuck::allocation::try_zeroed_vec(room).map_err(|()| failed())?;
        let start = data.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT / size);
        Ok(Buffer { data, start, len })
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data[self.start..][..self.len]
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_at_a_cache_line() {
        for len in [0, 1, 1000] {
            let buffer = Buffer::<f32>::zeros(len).unwrap();
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % ALIGNMENT), (len, 0));
        }
    }

    #[test]
    fn too_much_memory_is_an_error() {
        for len in [usize::MAX, usize::MAX / 8] {
            assert!(matches!(Buffer::<f32>::zeros(len), Err(Error::Memory { .. })));
        }
    }
}
