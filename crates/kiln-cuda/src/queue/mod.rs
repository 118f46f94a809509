//! The queue that work is submitted to: the GPU's stream, or a recording.
//! Every operation receives its queue. A buffer reveals its address only to a queue, so a recording learns of everything
//! its work reads.

mod recording;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use crate::device::{Allocation, Device, DeviceMemory, PendingCopy, Stream};
use crate::error::{Error, Result};
use crate::images::Images;
use crate::probe::Gpu;
use crate::sources::KernelSource;
use crate::sys::driver::{DevicePtr, Driver};
pub(crate) use recording::{Recording, RetainedMemory};

/// A destination for work. Clones refer to the same queue.
#[derive(Clone)]
pub(crate) struct Queue {
    device: Arc<Device>,
    /// Replaces the device's stream and memory while work is recorded.
    recording: Option<Arc<Recording>>,
}

impl Queue {
    /// A queue whose work is executed.
    pub fn immediate(device: Arc<Device>) -> Queue {
        Queue { device, recording: None }
    }

    /// Starts a recording on the same GPU and returns its queue.
    pub fn begin_recording(&self) -> Result<(Queue, Arc<Recording>)> {
        let recording = Recording::begin(self.device("cuStreamBeginCapture")?)?;
        let queue = Queue { device: Arc::clone(&self.device), recording: Some(Arc::clone(&recording)) };
        Ok((queue, recording))
    }

    /// Whether work is recorded instead of executed.
    pub fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.device.primary.gpu
    }

    /// The kernels' machine code.
    pub fn images(&self) -> &Images {
        self.device.modules.images()
    }

    /// The driver.
    pub fn driver(&self) -> &Driver {
        &self.device.primary.driver
    }

    /// Returns the device, for a call that waits, reads host memory or creates something that outlives a recording.
    /// On a recording this is an error that also fails the recording, even if the caller ignores it.
    pub fn device(&self, call: &'static str) -> Result<&Arc<Device>> {
        match &self.recording {
            Some(recording) => Err(recording.reject(call)),
            None => Ok(&self.device),
        }
    }

    /// The device's memory, for statistics.
    pub fn device_memory(&self) -> &DeviceMemory {
        &self.device.memory
    }

    /// The stream to submit to.
    pub fn stream(&self) -> Result<&Stream> {
        match &self.recording {
            Some(recording) => recording.stream(),
            None => Ok(&self.device.stream),
        }
    }

    /// Allocates `bytes` bytes; `None` if there is not enough memory.
    pub fn allocate(&self, bytes: usize) -> Result<Option<DeviceBuffer>> {
        let block = match &self.recording {
            Some(recording) => recording.pool().allocate(bytes),
            None => self.device.memory.allocate(bytes)?,
        };
        Ok(block.map(|block| DeviceBuffer(Arc::new(block))))
    }

    /// Copies from the host. The bytes may be dropped when this returns.
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
    pub fn download_async(&self, from: DevicePtr, bytes: usize) -> Result<PendingCopy> {
        self.device("cuMemcpyDtoHAsync")?.download_async(from, bytes)
    }

    /// Marks the end of the work submitted so far.
    pub fn mark(&self) -> Result<PendingCopy> {
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

    /// Waits for all work submitted so far.
    pub fn wait(&self) -> Result<()> {
        self.device("cuStreamSynchronize")?.stream.wait()
    }

    /// Runs `work` and returns its time on the device, in milliseconds.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.device("cuEventSynchronize")?.stream.time(work)
    }

    /// The shorter of two times, in milliseconds, of a few runs each.
    pub fn time_repeated(&self, run: impl Fn() -> Result<()>) -> Result<f32> {
        run()?;
        let repeat = || -> Result<()> { (0..4).try_for_each(|_| run()) };
        Ok(self.time(repeat)?.min(self.time(repeat)?))
    }

    /// Launches a kernel. An empty grid does nothing.
    ///
    /// # Safety
    ///
    /// The arguments match the kernel's parameters and point to enough memory.
    pub unsafe fn launch(
        &self,
        source: &KernelSource,
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
            // Allowed while recording: kernel choice may depend on addresses, so it can differ from the run before, and
            // loading submits nothing to a stream.
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

/// A buffer in GPU memory, freed when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct DeviceBuffer(Arc<Allocation>);

/// Identity of a buffer; never reused, and does not keep the buffer alive.
pub(crate) struct BufferId(Weak<Allocation>);

impl DeviceBuffer {
    /// Wraps memory owned elsewhere; the caller keeps it alive.
    pub fn borrowed(at: DevicePtr) -> DeviceBuffer {
        DeviceBuffer(Arc::new(Allocation::borrowed(at)))
    }

    /// Device address, for work on this queue. A recording retains what its work reads, and fails if other work uses its
    /// own memory.
    pub fn ptr(&self, queue: &Queue) -> DevicePtr {
        match (&queue.recording, self.0.pool()) {
            (None, None) => {}
            (Some(recording), Some(pool)) if Arc::ptr_eq(pool, recording.pool()) => {}
            (recording, pool) => {
                pool.into_iter().for_each(|pool| pool.mark_shared());
                recording.iter().for_each(|recording| recording.retain(&self.0));
            }
        }
        self.0.ptr()
    }

    /// Whether the address at offset `start` is aligned to 16 bytes.
    pub fn is_aligned(&self, start: usize) -> bool {
        (self.0.ptr() + start as u64).is_multiple_of(16)
    }

    /// Whether there is neither a clone nor an identity of it.
    pub fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some()
    }

    /// The buffer's identity.
    pub fn id(&self) -> BufferId {
        BufferId(Arc::downgrade(&self.0))
    }

    /// Whether this is the buffer with that identity.
    pub fn has_id(&self, id: &BufferId) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.0), id.0.as_ptr())
    }
}
