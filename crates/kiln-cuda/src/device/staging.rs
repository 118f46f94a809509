//! Memory that the GPU reads and writes by itself: large copies between host and device go through it at the speed of the
//! bus, one half filled by several threads while the other is on its way.

use std::sync::Arc;
use std::thread;

use super::event::Event;
use super::pinned::PinnedMemory;
use super::primary::Primary;
use super::stream::Stream;
use crate::error::Result;
use crate::sys::driver::DevicePtr;

/// Bytes of a half.
const HALF: usize = 32 << 20;
/// Bytes from which on a copy takes this way.
pub(crate) const LARGE: usize = 1 << 20;
/// Bytes that are worth a thread, and how many threads fill a half.
const SHARE: usize = 2 << 20;
const THREADS: usize = 8;

/// Two halves, and an event for the last copy out of each.
pub(crate) struct Staging {
    halves: [(PinnedMemory, Event); 2],
    next: usize,
}

impl Staging {
    pub fn new(primary: &Arc<Primary>) -> Result<Staging> {
        let half = || Ok((PinnedMemory::new(primary, HALF)?, Event::timed(primary)?));
        Ok(Staging { halves: [half()?, half()?], next: 0 })
    }

    /// Copies to the device; the bytes may go away when this returns.
    pub fn upload(&mut self, bytes: &[u8], to: DevicePtr, stream: &Stream) -> Result<()> {
        for (i, piece) in bytes.chunks(HALF).enumerate() {
            let (half, event) = &self.halves[self.next];
            self.next = 1 - self.next;
            // The GPU has read what was in it; at once if nothing ever was.
            event.wait()?;
            // SAFETY: the half has room for the piece, and nothing reads it; the caller has a block of that size.
            unsafe {
                let room = std::slice::from_raw_parts_mut(half.at().cast::<u8>(), piece.len());
                copy(piece, room);
                stream.copy_to_device(half.at(), to + (i * HALF) as u64, piece.len())?;
            }
            stream.record(event)?;
        }
        Ok(())
    }

    /// Copies from the device and waits.
    pub fn download(&self, from: DevicePtr, bytes: &mut [u8], stream: &Stream) -> Result<()> {
        let (half, _) = &self.halves[0];
        for (i, piece) in bytes.chunks_mut(HALF).enumerate() {
            // SAFETY: the half has room for the piece; what it may still be read for comes earlier on the stream.
            unsafe {
                stream.copy_to_host(from + (i * HALF) as u64, half.at(), piece.len())?;
                stream.wait()?;
                copy(std::slice::from_raw_parts(half.at().cast::<u8>(), piece.len()), piece);
            }
        }
        Ok(())
    }
}

/// A copy by as many threads as are worth it.
fn copy(from: &[u8], to: &mut [u8]) {
    let share = from.len().div_ceil(THREADS).max(SHARE);
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
        for len in [0, 1, SHARE - 1, SHARE + 1, 5 * SHARE + 7] {
            let from: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
            let mut to = vec![0; len];
            copy(&from, &mut to);
            assert!(from == to, "{len}");
        }
    }
}
