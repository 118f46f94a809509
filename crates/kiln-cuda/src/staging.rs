//! Memory that the GPU reads and writes by itself: large copies between host and device go through it at the speed of the
//! bus, one half filled by several threads while the other is on its way.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::thread;

use crate::Result;
use crate::sys::driver::{DevicePtr, Driver};

/// Bytes of a half.
const HALF: usize = 32 << 20;
/// Bytes from which on a copy takes this way.
pub(crate) const LARGE: usize = 1 << 20;
/// Bytes that are worth a thread, and how many threads fill a half.
const SHARE: usize = 2 << 20;
const THREADS: usize = 8;

/// Two halves, and an event for the last copy out of each.
pub(crate) struct Staging {
    halves: [*mut c_void; 2],
    events: [*mut c_void; 2],
    next: usize,
}

// SAFETY: the driver's handles and memory may be used from any thread that has made the context current.
unsafe impl Send for Staging {}

impl Staging {
    /// The context is current.
    pub fn new(driver: &Driver) -> Result<Staging> {
        let mut staging = Staging { halves: [null_mut(); 2], events: [null_mut(); 2], next: 0 };
        for i in 0..2 {
            // SAFETY: both calls write a handle.
            let made = unsafe {
                driver.check("cuMemHostAlloc", (driver.host_alloc)(&mut staging.halves[i], HALF, 0)).and_then(
                    |()| driver.check("cuEventCreate", (driver.event_create)(&mut staging.events[i], 0)),
                )
            };
            if let Err(e) = made {
                staging.free(driver);
                return Err(e);
            }
        }
        Ok(staging)
    }

    /// Copies to the device; the bytes may go away when this returns.
    pub fn upload(
        &mut self,
        driver: &Driver,
        bytes: &[u8],
        to: DevicePtr,
        stream: *mut c_void,
    ) -> Result<()> {
        for (i, piece) in bytes.chunks(HALF).enumerate() {
            let (half, event) = (self.halves[self.next], self.events[self.next]);
            self.next = 1 - self.next;
            // SAFETY: the half has room for the piece, and the event tells when the GPU has read what was in it (at once if
            // nothing ever was); the caller has a block of that size.
            unsafe {
                driver.check("cuEventSynchronize", (driver.event_wait)(event))?;
                let room = std::slice::from_raw_parts_mut(half.cast::<u8>(), piece.len());
                copy(piece, room);
                let to = to + (i * HALF) as u64;
                let status = (driver.copy_to_device)(to, half, piece.len(), stream);
                driver.check("cuMemcpyHtoDAsync", status)?;
                driver.check("cuEventRecord", (driver.event_record)(event, stream))?;
            }
        }
        Ok(())
    }

    /// Copies from the device and waits.
    pub fn download(
        &self,
        driver: &Driver,
        from: DevicePtr,
        bytes: &mut [u8],
        stream: *mut c_void,
    ) -> Result<()> {
        let half = self.halves[0];
        for (i, piece) in bytes.chunks_mut(HALF).enumerate() {
            // SAFETY: the half has room for the piece; what it may still be read for comes earlier on the stream.
            unsafe {
                let from = from + (i * HALF) as u64;
                driver.check("cuMemcpyDtoHAsync", (driver.copy_to_host)(half, from, piece.len(), stream))?;
                driver.check("cuStreamSynchronize", (driver.stream_wait)(stream))?;
                copy(std::slice::from_raw_parts(half.cast::<u8>(), piece.len()), piece);
            }
        }
        Ok(())
    }

    /// Gives everything back; nothing is on its way any more.
    pub fn free(&mut self, driver: &Driver) {
        // SAFETY: the last use; what was not made is null.
        unsafe {
            for half in self.halves.iter().filter(|half| !half.is_null()) {
                (driver.host_free)(*half);
            }
            for event in self.events.iter().filter(|event| !event.is_null()) {
                (driver.event_destroy)(*event);
            }
        }
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
