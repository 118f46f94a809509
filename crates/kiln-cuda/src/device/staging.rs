//! Staging buffers in pinned memory, for large copies between host and device at the bus's full bandwidth: several threads
//! take the pieces of a copy in turn, each with two buffers, one filled or emptied while the other is in transit.

use std::num::NonZero;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::event::Event;
use super::pinned::PinnedMemory;
use super::primary_context::PrimaryContext;
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::sys::driver::DevicePtr;

/// Bytes of a buffer. Pinning 1 MiB takes half a millisecond.
const PIECE_BYTES: usize = 2 << 20;
/// Smallest copy that is staged, in bytes.
pub(crate) const MIN_STAGED_BYTES: usize = 1 << 20;
/// Maximum number of threads. 7 GiB of cached files to an H200: 43 GB/s with 8, 47 with 12; the bus has 51.
const MAX_LANES: usize = 12;

/// Threads, and the buffers of each.
pub(crate) struct Staging {
    threads: ThreadPool,
    lanes: Vec<Lane>,
}

/// The buffers of one thread, each with an event behind its last copy.
struct Lane {
    buffers: [(PinnedMemory, Event); 2],
    next: usize,
}

impl Lane {
    /// Returns the buffer whose turn it is, after the GPU is done with it.
    fn buffer(&mut self) -> Result<&(PinnedMemory, Event)> {
        let buffer = &self.buffers[self.next];
        self.next = 1 - self.next;
        buffer.1.wait()?;
        Ok(buffer)
    }
}

impl Staging {
    pub fn new(primary: &Arc<PrimaryContext>) -> Result<Staging> {
        let buffer = || Ok((PinnedMemory::new(primary, PIECE_BYTES)?, Event::untimed(primary)?));
        let lane = |_| Ok(Lane { buffers: [buffer()?, buffer()?], next: 0 });
        let lanes = std::thread::available_parallelism().map_or(1, NonZero::get).min(MAX_LANES);
        let threads = ThreadPoolBuilder::new()
            .num_threads(lanes)
            .build()
            .map_err(|e| Error::Call { call: "a thread pool for copies", what: e.to_string() })?;
        Ok(Staging { threads, lanes: (0..lanes).map(lane).collect::<Result<_>>()? })
    }

    /// Copies to the device. The bytes may be dropped when this returns.
    pub fn upload(&mut self, bytes: &[u8], to: DevicePtr, stream: &Stream) -> Result<()> {
        self.share(bytes.len(), bytes.chunks(PIECE_BYTES), |lane, piece, offset| {
            let (buffer, event) = lane.buffer()?;
            // SAFETY: the buffer has room and is unused; the caller's allocation has all pieces.
            unsafe {
                buffer.ptr().cast::<u8>().copy_from_nonoverlapping(piece.as_ptr(), piece.len());
                stream.copy_to_device(buffer.ptr(), to + offset, piece.len())?;
            }
            stream.record(event)
        })
    }

    /// Copies from the device and waits.
    pub fn download(&mut self, from: DevicePtr, bytes: &mut [u8], stream: &Stream) -> Result<()> {
        self.share(bytes.len(), bytes.chunks_mut(PIECE_BYTES), |lane, piece, offset| {
            let (buffer, event) = lane.buffer()?;
            // SAFETY: the buffer has room and is unused; the caller's allocation has all pieces.
            unsafe { stream.copy_to_host(from + offset, buffer.ptr(), piece.len())? };
            stream.record(event)?;
            event.wait()?;
            // SAFETY: the copy is complete.
            unsafe {
                piece.as_mut_ptr().copy_from_nonoverlapping(buffer.ptr().cast::<u8>(), piece.len());
            }
            Ok(())
        })
    }

    /// Runs `copy` for each piece with its offset, on as many threads as there are lanes.
    fn share<P: Send>(
        &mut self,
        bytes: usize,
        pieces: impl Iterator<Item = P> + Send,
        copy: impl Fn(&mut Lane, P, u64) -> Result<()> + Sync,
    ) -> Result<()> {
        let (pieces, error) = (Mutex::new(pieces.enumerate()), Mutex::new(None));
        let run = |lane: &mut Lane| {
            let next = || lock(&pieces).next();
            while let Some((i, piece)) = next() {
                if let Err(e) = copy(lane, piece, (i * PIECE_BYTES) as u64) {
                    *lock(&error) = Some(e);
                    return;
                }
            }
        };
        let lanes = self.lanes.iter_mut().take(bytes.div_ceil(PIECE_BYTES));
        self.threads.in_place_scope(|scope| lanes.for_each(|lane| scope.spawn(|_| run(lane))));
        lock(&error).take().map_or(Ok(()), Err)
    }
}
