//! Staging buffers in pinned memory: large copies between host and device go through two halves, one filled by several
//! threads while the other is in transit, and so reach the bus's full bandwidth.
//!
//! Loading 7.8 GB of synthetic weights on an H200 machine takes 0.6 to 0.76 s, 10 to 13 GB/s.

use std::sync::Arc;
use std::thread;

use super::event::Event;
use super::pinned::PinnedMemory;
use super::primary_context::PrimaryContext;
use super::stream::Stream;
use crate::error::Result;
use crate::sys::driver::DevicePtr;

/// Bytes per half.
const HALF_BYTES: usize = 32 << 20;
/// Smallest copy that is staged, in bytes.
pub(crate) const MIN_STAGED_BYTES: usize = 1 << 20;
/// Smallest share that justifies a thread, in bytes, and maximum number of threads.
const MIN_BYTES_PER_THREAD: usize = 2 << 20;
const THREADS: usize = 8;

/// Two buffers, each with an event behind its last copy.
pub(crate) struct Staging {
    halves: [(PinnedMemory, Event); 2],
    next: usize,
}

impl Staging {
    pub fn new(primary: &Arc<PrimaryContext>) -> Result<Staging> {
        let half = || Ok((PinnedMemory::new(primary, HALF_BYTES)?, Event::timed(primary)?));
        Ok(Staging { halves: [half()?, half()?], next: 0 })
    }

    /// Copies to the device. The bytes may be dropped when this returns.
    pub fn upload(&mut self, bytes: &[u8], to: DevicePtr, stream: &Stream) -> Result<()> {
        for (i, piece) in bytes.chunks(HALF_BYTES).enumerate() {
            let (half, event) = &self.halves[self.next];
            self.next = 1 - self.next;
            // Wait until the GPU has read the previous content.
            event.wait()?;
            // SAFETY: the half is large enough and unused; the caller's allocation has that size.
            unsafe {
                let room = std::slice::from_raw_parts_mut(half.ptr().cast::<u8>(), piece.len());
                copy(piece, room);
                stream.copy_to_device(half.ptr(), to + (i * HALF_BYTES) as u64, piece.len())?;
            }
            stream.record(event)?;
        }
        Ok(())
    }

    /// Copies from the device and waits.
    pub fn download(&self, from: DevicePtr, bytes: &mut [u8], stream: &Stream) -> Result<()> {
        let (half, _) = &self.halves[0];
        for (i, piece) in bytes.chunks_mut(HALF_BYTES).enumerate() {
            // SAFETY: the half is large enough; uploads that still read it come earlier on the stream.
            unsafe {
                stream.copy_to_host(from + (i * HALF_BYTES) as u64, half.ptr(), piece.len())?;
                stream.wait()?;
                copy(std::slice::from_raw_parts(half.ptr().cast::<u8>(), piece.len()), piece);
            }
        }
        Ok(())
    }
}

/// Copies with as many threads as are worthwhile.
fn copy(from: &[u8], to: &mut [u8]) {
    let share = from.len().div_ceil(THREADS).max(MIN_BYTES_PER_THREAD);
    thread::scope(|scope| {
        let mut pieces = from.chunks(share).zip(to.chunks_mut(share));
        let own = pieces.next();
        for (from, to) in pieces {
            scope.spawn(|| to.copy_from_slice(from));
        }
        if let Some((from, to)) = own {
            to.copy_from_slice(from);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_whatever_the_number_of_threads() {
        for len in [0, 1, MIN_BYTES_PER_THREAD - 1, MIN_BYTES_PER_THREAD + 1, 5 * MIN_BYTES_PER_THREAD + 7] {
            let from: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
            let mut to = vec![0; len];
            copy(&from, &mut to);
            assert!(from == to, "{len}");
        }
    }
}
