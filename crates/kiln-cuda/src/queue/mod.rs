//! Where work goes: to the GPU's one stream, or to a recording.
//!
//! Every operation is handed its queue. A block's address is known to a queue only, so that a recording hears of everything
//! its work reads.

mod recording;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use crate::device::{Allocation, Arrival, Device, Memory, Stream};
use crate::error::{Error, Result};
use crate::probe::Gpu;
use crate::sources::Source;
use crate::sys::driver::{DevicePtr, Driver};
pub(crate) use recording::{Kept, Recording};

/// Where work goes. Clones are the same queue.
#[derive(Clone)]
pub(crate) struct Queue {
    device: Arc<Device>,
    /// What takes the place of the device's stream and memory, where work is recorded.
    recording: Option<Arc<Recording>>,
}

impl Queue {
    /// Work that is done at once.
    pub fn live(device: Arc<Device>) -> Queue {
        Queue { device, recording: None }
    }

    /// Work on the same GPU that is only written down.
    pub fn record(&self) -> Result<(Queue, Arc<Recording>)> {
        let recording = Recording::begin(self.device("cuStreamBeginCapture")?)?;
        let queue = Queue { device: Arc::clone(&self.device), recording: Some(Arc::clone(&recording)) };
        Ok((queue, recording))
    }

    /// Whether work is only written down.
    pub fn records(&self) -> bool {
        self.recording.is_some()
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.device.primary.gpu
    }

    /// The driver.
    pub fn driver(&self) -> &Driver {
        &self.device.primary.driver
    }

    /// The device itself, for a call that waits, reads the host's memory or makes what is kept. Where work is recorded this
    /// fails, and so does the recording, whatever becomes of this error.
    pub fn device(&self, call: &'static str) -> Result<&Arc<Device>> {
        match &self.recording {
            Some(recording) => Err(recording.refuse(call)),
            None => Ok(&self.device),
        }
    }

    /// The device's memory, to ask about.
    pub fn device_memory(&self) -> &Memory {
        &self.device.memory
    }

    /// Where its work is put.
    pub fn stream(&self) -> Result<&Stream> {
        match &self.recording {
            Some(recording) => recording.stream(),
            None => Ok(&self.device.stream),
        }
    }

    /// Memory for `bytes` bytes; `None` when there is no more.
    pub fn memory(&self, bytes: usize) -> Result<Option<Block>> {
        let block = match &self.recording {
            Some(recording) => recording.pool().take(bytes),
            None => self.device.memory.take(bytes)?,
        };
        Ok(block.map(|block| Block(Arc::new(block))))
    }

    /// Copies from the host; the bytes may go away when this returns.
    pub fn upload(&self, bytes: &[u8], to: DevicePtr) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.device("cuMemcpyHtoDAsync")?.upload(bytes, to)
    }

    /// Copies to the host and waits.
    pub fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.device("cuMemcpyDtoHAsync")?.download(from, bytes)
    }

    /// Copies to the host without waiting.
    pub fn download_later(&self, from: DevicePtr, bytes: usize) -> Result<Arrival> {
        self.device("cuMemcpyDtoHAsync")?.download_later(from, bytes)
    }

    /// Marks the end of the work so far.
    pub fn mark(&self) -> Result<Arrival> {
        self.device("cuEventRecord")?.mark()
    }

    /// Copies within the device.
    pub fn copy(&self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<()> {
        match bytes {
            0 => Ok(()),
            // SAFETY: both blocks have that size.
            _ => unsafe { self.stream()?.copy(from, to, bytes) },
        }
    }

    /// Waits for all work so far.
    pub fn wait(&self) -> Result<()> {
        self.device("cuStreamSynchronize")?.stream.wait()
    }

    /// Milliseconds that some work takes on the device.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.device("cuEventSynchronize")?.stream.time(work)
    }

    /// Puts a kernel on the stream. An empty grid is no work.
    ///
    /// # Safety
    ///
    /// The arguments are the kernel's, and the memory they point to suffices.
    pub unsafe fn launch(
        &self,
        source: &Source,
        name: &'static str,
        grid: [usize; 2],
        threads: usize,
        shared: usize,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let [x, y] = grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let function = match self.device.modules.loaded(name, shared)? {
            Some(function) => function,
            // Also while work is recorded: which kernel is taken may depend on where memory lies, so that it is not the one of
            // the run before. Nothing of it goes to a stream.
            None => self.device.modules.load(source, name, shared)?,
        };
        let stream = self.stream()?.raw();
        let (function, threads, shared) = (function.raw(), threads as u32, shared as u32);
        let driver = self.driver();
        let arguments = arguments.as_mut_ptr();
        // SAFETY: as the caller promises.
        let status = unsafe {
            (driver.launch)(function, x, y, 1, threads, 1, 1, shared, stream, arguments, null_mut())
        };
        driver.check("cuLaunchKernel", status).map_err(|e| match e {
            Error::Call { call, what } => Error::Call { call, what: format!("{what} (kernel `{name}`)") },
            other => other,
        })
    }
}

/// Memory of a GPU, given back to where it came from when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Block(Arc<Allocation>);

/// Which block it was; of one that is gone no other has the name.
pub(crate) struct BlockName(Weak<Allocation>);

impl Block {
    /// Memory that belongs to somebody else, who takes care that it stays.
    pub fn lent(at: DevicePtr) -> Block {
        Block(Arc::new(Allocation::lent(at)))
    }

    /// Its address, for work on this queue. A recording keeps what its work reads, and fails if others use its own memory.
    pub fn at(&self, queue: &Queue) -> DevicePtr {
        match (&queue.recording, self.0.pool()) {
            (None, None) => {}
            (Some(recording), Some(pool)) if Arc::ptr_eq(pool, recording.pool()) => {}
            (recording, pool) => {
                pool.into_iter().for_each(|pool| pool.share());
                recording.iter().for_each(|recording| recording.keep(&self.0));
            }
        }
        self.0.at()
    }

    /// Whether the address `start` bytes after its beginning is a multiple of 16.
    pub fn is_aligned(&self, start: usize) -> bool {
        (self.0.at() + start as u64).is_multiple_of(16)
    }

    /// A name for this block, which doesn't keep it.
    pub fn name(&self) -> BlockName {
        BlockName(Arc::downgrade(&self.0))
    }

    /// Whether this is the block of that name.
    pub fn is(&self, name: &BlockName) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.0), name.0.as_ptr())
    }
}
