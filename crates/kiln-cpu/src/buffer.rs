//! Memory of tensors and of packed operands.
//!
//! Memory fresh from the system costs a page fault every 4 KiB, which for the cheaper operations is more than the
//! operation itself. So large buffers come in huge pages where the system has them, and are kept for the next
//! operation that needs about as much.

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
/// Buffers from this size on are mapped, below they come from the allocator.
const LARGE: usize = 128 << 10;
/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Bytes that may be kept unused.
const KEPT: usize = 512 << 20;

/// Where buffers come from and go back to.
#[derive(Default)]
pub(crate) struct Memory {
    /// Maps out of use, longest unused first.
    unused: Mutex<VecDeque<MmapMut>>,
}

impl Memory {
    /// A buffer of `len` elements with whatever values some earlier one left in it.
    pub fn buffer<T: Pod>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>> {
        let failed = || Error::Memory { backend: "cpu".into(), bytes: len.saturating_mul(size_of::<T>()) };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(failed)?;
        let block = if bytes < LARGE {
            Block::Small(vec![0; bytes.div_ceil(4) + ALIGNMENT / 4])
        } else {
            let step = if bytes < HUGE / 8 { LARGE } else { HUGE };
            let whole = bytes.checked_next_multiple_of(step).ok_or_else(failed)?;
            let map = self.take(whole).map_or_else(|| self.fresh(whole), Ok).map_err(|_| failed())?;
            Block::Large { map: Some(map), home: Arc::clone(self) }
        };
        Ok(Buffer { block, len, element: PhantomData })
    }

    /// The smallest unused map of at least `bytes` that does not waste much.
    fn take(&self, bytes: usize) -> Option<MmapMut> {
        let mut unused = lock(&self.unused);
        let fits = |map: &MmapMut| map.len() >= bytes && map.len() - bytes <= bytes / 4;
        let (best, _) = unused.iter().enumerate().filter(|(_, m)| fits(m)).min_by_key(|(_, m)| m.len())?;
        unused.remove(best)
    }

    /// Memory from the system. Before much of it is asked for, what lies unused goes back: of tensors as large as that few
    /// fit a machine.
    fn fresh(&self, bytes: usize) -> std::io::Result<MmapMut> {
        if bytes >= KEPT / 2 {
            lock(&self.unused).clear();
        }
        map(bytes)
    }

    fn give(&self, map: MmapMut) {
        let mut unused = lock(&self.unused);
        unused.push_back(map);
        let mut total: usize = unused.iter().map(|m| m.len()).sum();
        while total > KEPT
            && let Some(oldest) = unused.pop_front()
        {
            total -= oldest.len();
        }
    }
}

fn map(bytes: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(bytes)?;
    #[cfg(target_os = "linux")]
    if bytes >= HUGE {
        // A system without huge pages gives small ones.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    Ok(map)
}

enum Block {
    /// Words, with room to begin at a cache line.
    Small(Vec<u32>),
    /// Emptied when the buffer is dropped.
    Large { map: Option<MmapMut>, home: Arc<Memory> },
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Block::Large { map, home } = self
            && let Some(map) = map.take()
        {
            home.give(map);
        }
    }
}

/// A fixed number of elements, the first at a multiple of 64 bytes.
pub(crate) struct Buffer<T> {
    block: Block,
    len: usize,
    element: PhantomData<T>,
}

/// Words before the first one at a cache line.
fn lead(words: &[u32]) -> usize {
    words.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT / 4)
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes = self.len * size_of::<T>();
        bytemuck::cast_slice(match &self.block {
            Block::Small(words) => &bytemuck::cast_slice(&words[lead(words)..])[..bytes],
            Block::Large { map, .. } => map.as_deref().map_or(&[], |map| &map[..bytes]),
        })
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes = self.len * size_of::<T>();
        bytemuck::cast_slice_mut(match &mut self.block {
            Block::Small(words) => {
                let lead = lead(words);
                &mut bytemuck::cast_slice_mut(&mut words[lead..])[..bytes]
            }
            Block::Large { map, .. } => map.as_deref_mut().map_or(&mut [], |map| &mut map[..bytes]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_at_a_cache_line() {
        let memory = Arc::new(Memory::default());
        for len in [0, 1, 1000, 1 << 20] {
            let mut buffer = memory.buffer::<f32>(len).unwrap();
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % ALIGNMENT), (len, 0));
            buffer.fill(1.0);
            assert!(buffer.iter().all(|&x| x == 1.0));
        }
    }

    #[test]
    fn a_dropped_buffer_is_used_again_for_as_much_but_not_for_much_less() {
        let memory = Arc::new(Memory::default());
        let first = memory.buffer::<f32>(4 << 20).unwrap();
        let place = first.as_ptr();
        drop(first);
        let less = memory.buffer::<f32>(1 << 20).unwrap();
        assert_ne!(less.as_ptr(), place);
        let again = memory.buffer::<f32>((4 << 20) - 5).unwrap();
        assert_eq!(again.as_ptr(), place);
        assert_ne!(memory.buffer::<f32>(4 << 20).unwrap().as_ptr(), place);
    }

    #[test]
    fn only_so_much_is_kept() {
        let memory = Arc::new(Memory::default());
        let buffers: Vec<_> = (0..9).map(|_| memory.buffer::<u8>(KEPT / 8).unwrap()).collect();
        drop(buffers);
        assert_eq!(memory.unused.lock().unwrap().len(), 8);
    }

    #[test]
    fn nothing_is_kept_beside_fresh_memory_for_a_large_tensor() {
        let memory = Arc::new(Memory::default());
        drop(memory.buffer::<u8>(KEPT / 8).unwrap());
        let _small = memory.buffer::<u8>(KEPT / 16).unwrap();
        assert_eq!(memory.unused.lock().unwrap().len(), 1);
        let _large = memory.buffer::<u8>(KEPT / 2).unwrap();
        assert_eq!(memory.unused.lock().unwrap().len(), 0);
    }

    #[test]
    fn too_much_memory_is_an_error() {
        let memory = Arc::new(Memory::default());
        for len in [usize::MAX, usize::MAX / 8, 1 << 56] {
            assert!(matches!(memory.buffer::<f32>(len), Err(Error::Memory { .. })));
        }
    }
}
