//! A recording in progress: what is launched on it is written down and not done.
//!
//! It has a stream of its own, so that other work goes on as if nothing was; and its memory comes from a pool of its own, so
//! that what it writes to is written to by nobody else, however late it is replayed. What it reads beside, it keeps.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::device::{Allocation, Device, Pool, Primary, Stream};
use crate::error::{Error, Result};
use crate::sys::driver::CAPTURE_RELAXED;
use kiln_base::lock;

/// A recording; what is not ended is given up when this is dropped.
pub(crate) struct Recording {
    primary: Arc<Primary>,
    stream: Stream,
    pool: Arc<Pool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    over: bool,
    /// What can't be recorded and was asked for.
    refused: Option<&'static str>,
    /// What is read and was made before, by address of its owner.
    kept: HashMap<*const Allocation, Arc<Allocation>>,
}

// SAFETY: the pointers are only compared.
unsafe impl Send for State {}

/// Work that was recorded.
pub(crate) struct Recorded {
    primary: Arc<Primary>,
    graph: *mut c_void,
    kept: Vec<Arc<Allocation>>,
    pool: Arc<Pool>,
}

/// The memory of recorded work: its own, and what it reads beside its inputs.
pub(crate) struct Kept {
    _pool: Arc<Pool>,
    _read: Vec<Arc<Allocation>>,
}

fn cannot(call: &'static str) -> Error {
    Error::Call { call, what: "it can't be part of a graph".into() }
}

impl Recording {
    pub fn begin(device: &Device) -> Result<Arc<Recording>> {
        let primary = Arc::clone(&device.primary);
        let (stream, pool) = (Stream::new(&primary)?, Pool::new(&device.memory));
        // SAFETY: the stream lives.
        let status = unsafe { (primary.driver.stream_begin_capture)(stream.raw(), CAPTURE_RELAXED) };
        primary.driver.check("cuStreamBeginCapture", status)?;
        Ok(Arc::new(Recording { primary, stream, pool, state: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Where its work goes, until it ends.
    pub fn stream(&self) -> Result<&Stream> {
        match self.state().over {
            true => Err(cannot("cuStreamEndCapture")),
            false => Ok(&self.stream),
        }
    }

    /// Where its memory comes from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Something was asked for that can't be recorded: the recording fails, whatever becomes of this error.
    pub fn refuse(&self, call: &'static str) -> Error {
        self.state().refused = Some(call);
        cannot(call)
    }

    /// It reads what others made.
    pub fn keep(&self, read: &Arc<Allocation>) {
        self.state().kept.entry(Arc::as_ptr(read)).or_insert_with(|| Arc::clone(read));
    }

    /// What was recorded, if all of it could be.
    pub fn end(&self) -> Result<Recorded> {
        let mut state = self.state();
        let mut recorded = self.end_capture(&mut state)?;
        if let Some(call) = state.refused {
            return Err(cannot(call));
        }
        // Work that was asked for elsewhere read or wrote its memory, which now holds nothing.
        if self.pool.is_shared() {
            return Err(cannot("cuStreamEndCapture"));
        }
        recorded.kept = std::mem::take(&mut state.kept).into_values().collect();
        Ok(recorded)
    }

    fn end_capture(&self, state: &mut State) -> Result<Recorded> {
        let driver = &self.primary.driver;
        self.primary.enter()?;
        state.over = true;
        let mut graph = null_mut();
        // SAFETY: the graph is written, or null.
        let status = unsafe { (driver.stream_end_capture)(self.stream.raw(), &mut graph) };
        driver.check("cuStreamEndCapture", status)?;
        match graph.is_null() {
            true => Err(cannot("cuStreamEndCapture")),
            false => Ok(Recorded {
                primary: Arc::clone(&self.primary),
                graph,
                kept: Vec::new(),
                pool: Arc::clone(&self.pool),
            }),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut state = self.state();
        if !state.over {
            let _ = self.end_capture(&mut state);
        }
    }
}

impl Recorded {
    /// In a form that can be launched, as long as its memory is kept.
    pub fn instantiate(&mut self) -> Result<(*mut c_void, Kept)> {
        let driver = &self.primary.driver;
        let mut executable = null_mut();
        // SAFETY: the graph lives, and the executable, which keeps nothing of it, is written.
        let status = unsafe { (driver.graph_instantiate)(&mut executable, self.graph, 0) };
        driver.check("cuGraphInstantiate", status)?;
        let kept = Kept { _pool: Arc::clone(&self.pool), _read: std::mem::take(&mut self.kept) };
        Ok((executable, kept))
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.primary.enter().is_ok() {
            // SAFETY: the last use.
            unsafe { (self.primary.driver.graph_destroy)(self.graph) };
        }
    }
}
