//! Memory of tensors and packed operands.
//!
//! Memory fresh from the system costs a page fault every 4 KiB, which takes longer than the cheaper operations
//! themselves. So large buffers use huge pages where the system has them, and are recycled for the next operation that
//! needs about as much.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

use bytemuck::Pod;
use kiln_base::lock;
use kiln_ops::{Error, Result};
use memmap2::MmapMut;

/// Bytes of a cache line, and of the widest vector.
const ALIGNMENT: usize = 64;
/// Buffers of at least this many bytes are mapped; smaller ones come from the allocator.
const MMAP_THRESHOLD: usize = 128 << 10;
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Maximum bytes of unused maps that are kept.
const MAX_UNUSED: usize = 512 << 20;

/// Where buffers come from and return to when they are dropped.
#[derive(Default)]
pub(crate) struct BufferPool {
    /// Unused maps, least recently used first.
    unused: Mutex<VecDeque<MmapMut>>,
}

impl BufferPool {
    /// A buffer of `len` elements with arbitrary values.
    pub fn buffer<T: Pod>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>> {
        let failed = || Error::Memory { backend: "cpu".into(), bytes: len.saturating_mul(size_of::<T>()) };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(failed)?;
        let storage = if bytes < MMAP_THRESHOLD {
            Storage::Heap(vec![0; bytes.div_ceil(4) + ALIGNMENT / 4])
        } else {
            let step = if bytes < HUGE_PAGE / 8 { MMAP_THRESHOLD } else { HUGE_PAGE };
            let whole = bytes.checked_next_multiple_of(step).ok_or_else(failed)?;
            let map = self.reuse(whole).map_or_else(|| self.allocate(whole), Ok).map_err(|_| failed())?;
            Storage::Mapped { map: Some(map), pool: Arc::clone(self) }
        };
        Ok(Buffer { storage, len, element: PhantomData })
    }

    /// Takes the smallest unused map of at least `bytes` that doesn't waste much.
    fn reuse(&self, bytes: usize) -> Option<MmapMut> {
        let mut unused = lock(&self.unused);
        let fits = |map: &MmapMut| map.len() >= bytes && map.len() - bytes <= bytes / 4;
        let (best, _) = unused.iter().enumerate().filter(|(_, m)| fits(m)).min_by_key(|(_, m)| m.len())?;
        unused.remove(best)
    }

    /// Maps memory from the system. A large request first releases all unused maps: few tensors of such a size fit
    /// in memory.
    fn allocate(&self, bytes: usize) -> std::io::Result<MmapMut> {
        if bytes >= MAX_UNUSED / 2 {
            lock(&self.unused).clear();
        }
        map(bytes)
    }

    /// Keeps a map for later; releases the oldest ones if there are too many.
    fn recycle(&self, map: MmapMut) {
        let mut unused = lock(&self.unused);
        unused.push_back(map);
        let mut total: usize = unused.iter().map(|m| m.len()).sum();
        while total > MAX_UNUSED
            && let Some(oldest) = unused.pop_front()
        {
            total -= oldest.len();
        }
    }
}

fn map(bytes: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(bytes)?;
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_PAGE {
        // Only a hint: without huge pages the map has small ones.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    Ok(map)
}

enum Storage {
    /// Words from the allocator, with room for the alignment.
    Heap(Vec<u32>),
    /// A map, which goes back to the pool when it is dropped.
    Mapped { map: Option<MmapMut>, pool: Arc<BufferPool> },
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Storage::Mapped { map, pool } = self
            && let Some(map) = map.take()
        {
            pool.recycle(map);
        }
    }
}

/// A fixed number of elements, aligned to 64 bytes.
pub(crate) struct Buffer<T> {
    storage: Storage,
    len: usize,
    element: PhantomData<T>,
}

/// The words before the first aligned one.
fn unaligned_words(words: &[u32]) -> usize {
    words.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT / 4)
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes = self.len * size_of::<T>();
        bytemuck::cast_slice(match &self.storage {
            Storage::Heap(words) => &bytemuck::cast_slice(&words[unaligned_words(words)..])[..bytes],
            Storage::Mapped { map, .. } => map.as_deref().map_or(&[], |map| &map[..bytes]),
        })
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes = self.len * size_of::<T>();
        bytemuck::cast_slice_mut(match &mut self.storage {
            Storage::Heap(words) => {
                let start = unaligned_words(words);
                &mut bytemuck::cast_slice_mut(&mut words[start..])[..bytes]
            }
            Storage::Mapped { map, .. } => map.as_deref_mut().map_or(&mut [], |map| &mut map[..bytes]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_at_a_cache_line() {
        let pool = Arc::new(BufferPool::default());
        for len in [0, 1, 1000, 1 << 20] {
            let mut buffer = pool.buffer::<f32>(len).unwrap();
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % ALIGNMENT), (len, 0));
            buffer.fill(1.0);
            assert!(buffer.iter().all(|&x| x == 1.0));
        }
    }

    #[test]
    fn a_dropped_buffer_is_reused_for_similar_sizes_only() {
        let pool = Arc::new(BufferPool::default());
        let first = pool.buffer::<f32>(4 << 20).unwrap();
        let address = first.as_ptr();
        drop(first);
        let less = pool.buffer::<f32>(1 << 20).unwrap();
        assert_ne!(less.as_ptr(), address);
        let again = pool.buffer::<f32>((4 << 20) - 5).unwrap();
        assert_eq!(again.as_ptr(), address);
        assert_ne!(pool.buffer::<f32>(4 << 20).unwrap().as_ptr(), address);
    }

    #[test]
    fn unused_memory_is_limited() {
        let pool = Arc::new(BufferPool::default());
        let buffers: Vec<_> = (0..9).map(|_| pool.buffer::<u8>(MAX_UNUSED / 8).unwrap()).collect();
        drop(buffers);
        assert_eq!(lock(&pool.unused).len(), 8);
    }

    #[test]
    fn a_large_allocation_releases_unused_memory() {
        let pool = Arc::new(BufferPool::default());
        drop(pool.buffer::<u8>(MAX_UNUSED / 8).unwrap());
        let _small = pool.buffer::<u8>(MAX_UNUSED / 16).unwrap();
        assert_eq!(lock(&pool.unused).len(), 1);
        let _large = pool.buffer::<u8>(MAX_UNUSED / 2).unwrap();
        assert_eq!(lock(&pool.unused).len(), 0);
    }

    #[test]
    fn too_much_memory_is_an_error() {
        let pool = Arc::new(BufferPool::default());
        for len in [usize::MAX, usize::MAX / 8, 1 << 56] {
            assert!(matches!(pool.buffer::<f32>(len), Err(Error::Memory { .. })));
        }
    }
}
