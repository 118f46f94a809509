//! Stream capture: work launched on a recording becomes a CUDA graph instead of being executed.
//! A recording has its own stream, so other work continues undisturbed, and its own memory pool, so nothing else ever
//! writes to the memory that replays write to. It retains the other memory that it reads.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::device::{Allocation, Device, PrimaryContext, PrivatePool, Stream};
use crate::error::{Error, Result};
use crate::sys::driver::CAPTURE_RELAXED;
use kiln_base::lock;

/// A recording in progress; abandoned if dropped before [`Recording::end`].
pub(crate) struct Recording {
    primary: Arc<PrimaryContext>,
    stream: Stream,
    pool: Arc<PrivatePool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ended: bool,
    /// A call that cannot be captured, if one was made.
    rejected: Option<&'static str>,
    /// Existing memory that the work reads, by address of the allocation.
    retained: HashMap<*const Allocation, Arc<Allocation>>,
}

// SAFETY: the pointers are only compared.
unsafe impl Send for State {}

/// A captured graph.
pub(crate) struct CapturedGraph {
    primary: Arc<PrimaryContext>,
    graph: *mut c_void,
    retained: Vec<Arc<Allocation>>,
    pool: Arc<PrivatePool>,
}

/// The memory of a graph: its own pool, and what it reads besides its inputs.
pub(crate) struct RetainedMemory {
    _pool: Arc<PrivatePool>,
    _read: Vec<Arc<Allocation>>,
}

fn not_capturable(call: &'static str) -> Error {
    Error::Call { call, what: "it cannot be captured in a CUDA graph".into() }
}

impl Recording {
    pub fn begin(device: &Device) -> Result<Arc<Recording>> {
        let primary = Arc::clone(&device.primary);
        let (stream, pool) = (Stream::new(&primary)?, PrivatePool::new(&device.memory));
        // SAFETY: the stream lives.
        let status = unsafe { (primary.driver.stream_begin_capture)(stream.raw(), CAPTURE_RELAXED) };
        primary.driver.check("cuStreamBeginCapture", status)?;
        Ok(Arc::new(Recording { primary, stream, pool, state: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The captured stream; an error after the recording has ended.
    pub fn stream(&self) -> Result<&Stream> {
        if self.state().ended { Err(not_capturable("cuStreamEndCapture")) } else { Ok(&self.stream) }
    }

    /// The pool for its memory.
    pub fn pool(&self) -> &Arc<PrivatePool> {
        &self.pool
    }

    /// Fails the recording because of a call that cannot be captured, and returns the error for it.
    pub fn reject(&self, call: &'static str) -> Error {
        self.state().rejected = Some(call);
        not_capturable(call)
    }

    /// Retains memory that was allocated outside the recording.
    pub fn retain(&self, read: &Arc<Allocation>) {
        self.state().retained.entry(Arc::as_ptr(read)).or_insert_with(|| Arc::clone(read));
    }

    /// Ends the capture and returns the graph, if everything could be captured.
    pub fn end(&self) -> Result<CapturedGraph> {
        let mut state = self.state();
        let mut recorded = self.end_capture(&mut state)?;
        if let Some(call) = state.rejected {
            return Err(not_capturable(call));
        }
        // Work outside the recording used its memory, whose content does not exist yet.
        if self.pool.is_shared() {
            return Err(not_capturable("cuStreamEndCapture"));
        }
        recorded.retained = std::mem::take(&mut state.retained).into_values().collect();
        Ok(recorded)
    }

    fn end_capture(&self, state: &mut State) -> Result<CapturedGraph> {
        let driver = &self.primary.driver;
        self.primary.make_current()?;
        state.ended = true;
        let mut graph = null_mut();
        // SAFETY: the graph is written, or null.
        let status = unsafe { (driver.stream_end_capture)(self.stream.raw(), &mut graph) };
        driver.check("cuStreamEndCapture", status)?;
        if graph.is_null() {
            return Err(not_capturable("cuStreamEndCapture"));
        }
        let (primary, pool) = (Arc::clone(&self.primary), Arc::clone(&self.pool));
        Ok(CapturedGraph { primary, graph, retained: Vec::new(), pool })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut state = self.state();
        if !state.ended {
            let _ = self.end_capture(&mut state);
        }
    }
}

impl CapturedGraph {
    /// Returns an executable graph, valid as long as its memory is retained.
    pub fn instantiate(&mut self) -> Result<(*mut c_void, RetainedMemory)> {
        let driver = &self.primary.driver;
        let mut executable = null_mut();
        // SAFETY: the graph lives; the executable is written and does not reference the graph.
        let status = unsafe { (driver.graph_instantiate)(&mut executable, self.graph, 0) };
        driver.check("cuGraphInstantiate", status)?;
        let retained =
            RetainedMemory { _pool: Arc::clone(&self.pool), _read: std::mem::take(&mut self.retained) };
        Ok((executable, retained))
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if self.primary.make_current().is_ok() {
            // SAFETY: the last use.
            unsafe { (self.primary.driver.graph_destroy)(self.graph) };
        }
    }
}
