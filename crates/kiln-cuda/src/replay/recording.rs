//! A recording in progress: what this thread launches meanwhile is written down and not done.
//!
//! It goes to a stream of its own, so that other threads work on as if nothing was; and its memory comes from a pool of its
//! own, so that what it writes to is written to by nobody else, however late it is replayed.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{Arena, Source};
use crate::device::Device;
use crate::sys::driver::{CAPTURE_RELAXED, DevicePtr, STREAM_NON_BLOCKING};
use crate::{Error, Result};

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// What this thread records.
struct Current {
    device: *const Device,
    stream: *mut c_void,
    pool: Arc<Pool>,
    /// A call that can't be recorded.
    refused: Option<&'static str>,
}

impl Device {
    fn current<T>(&self, f: impl FnOnce(&mut Current) -> T) -> Option<T> {
        let mine = |current: &&mut Current| std::ptr::eq(current.device, self);
        CURRENT.with_borrow_mut(|current| current.as_mut().filter(mine).map(f))
    }

    /// The stream that this thread's work is recorded from, while it is.
    pub fn recording(&self) -> Option<*mut c_void> {
        self.current(|current| current.stream)
    }

    /// Where memory comes from meanwhile.
    pub fn recording_pool(&self) -> Option<Arc<Pool>> {
        self.current(|current| Arc::clone(&current.pool))
    }

    /// Asked before everything that would wait, that reads the host's memory, or whose result is kept. While this thread
    /// records it fails, and so does the recording, whatever becomes of this error.
    pub fn not_recording(&self, call: &'static str) -> Result<()> {
        let refused = self.current(|current| current.refused = Some(call));
        refused.map_or(Ok(()), |()| Err(cannot(call)))
    }
}

fn cannot(call: &'static str) -> Error {
    Error::Call { call, what: "it can't be part of a graph".into() }
}

/// A recording, ended when this is dropped.
pub(super) struct Recording<'a> {
    device: &'a Arc<Device>,
    stream: *mut c_void,
}

impl<'a> Recording<'a> {
    pub fn begin(device: &'a Arc<Device>) -> Result<Self> {
        let driver = &device.driver;
        device.not_recording("cuStreamBeginCapture")?;
        device.enter()?;
        let mut stream = null_mut();
        // SAFETY: the stream is written.
        let status = unsafe { (driver.stream_create)(&mut stream, STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", status)?;
        // From here on its end destroys the stream.
        let recording = Recording { device, stream };
        // SAFETY: the stream lives.
        let status = unsafe { (driver.stream_begin_capture)(stream, CAPTURE_RELAXED) };
        driver.check("cuStreamBeginCapture", status)?;
        let current = Current { device: Arc::as_ptr(device), stream, pool: Pool::new(device), refused: None };
        CURRENT.set(Some(current));
        Ok(recording)
    }

    /// The graph, if all of it could be recorded.
    pub fn end(self) -> Result<*mut c_void> {
        let driver = &self.device.driver;
        let refused = CURRENT.take().and_then(|current| current.refused);
        let graph = self.end_capture()?;
        if let Some(call) = refused {
            // SAFETY: the last use.
            unsafe { (driver.graph_destroy)(graph) };
            return Err(cannot(call));
        }
        Ok(graph)
    }

    fn end_capture(&self) -> Result<*mut c_void> {
        let driver = &self.device.driver;
        let mut graph = null_mut();
        // SAFETY: the graph is written, or null.
        let status = unsafe { (driver.stream_end_capture)(self.stream, &mut graph) };
        driver.check("cuStreamEndCapture", status)?;
        match graph.is_null() {
            true => Err(cannot("cuStreamEndCapture")),
            false => Ok(graph),
        }
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if CURRENT.take().is_some()
            && let Ok(graph) = self.end_capture()
        {
            // SAFETY: the last use.
            unsafe { (self.device.driver.graph_destroy)(graph) };
        }
        // SAFETY: the last use, and nothing is on it.
        unsafe { (self.device.driver.stream_destroy)(self.stream) };
    }
}

/// Memory that goes round within one recording, and back to the device when that and all its tensors are gone.
pub(crate) struct Pool {
    device: Arc<Device>,
    arena: Arena,
    /// Sizes of the device's blocks.
    taken: Mutex<HashMap<DevicePtr, usize>>,
}

impl Pool {
    fn new(device: &Arc<Device>) -> Arc<Pool> {
        let (arena, taken) = (Arena::default(), Mutex::default());
        Arc::new(Pool { device: Arc::clone(device), arena, taken })
    }

    /// Address and size of a block.
    pub fn take(&self, bytes: usize) -> Option<(DevicePtr, usize)> {
        self.arena.take_gently(self, bytes)
    }

    /// Takes it back.
    pub fn give(&self, at: DevicePtr, size: usize) {
        self.arena.give(at, size);
    }
}

impl Source for Pool {
    fn take(&self, bytes: usize) -> Option<DevicePtr> {
        // Freeing memory would wait, which a recording doesn't allow.
        let (at, size) = self.device.take_gently(bytes)?;
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(at, size);
        Some(at)
    }

    fn give(&self, at: DevicePtr) {
        let size = self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&at);
        if let Some(size) = size {
            self.device.give(at, size);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let taken = std::mem::take(self.taken.get_mut().unwrap_or_else(PoisonError::into_inner));
        taken.into_iter().for_each(|(at, size)| self.device.give(at, size));
    }
}
