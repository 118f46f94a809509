//! Waits for work on another thread, so that Ctrl-C cancels it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use kiln_base::lock;
use kiln_engine::{Error, Event, Explain, GeneratedImage, Result, Sink};
use pyo3::prelude::*;

use crate::errors;
use crate::shutdown::{Running, is_ending};

const SIGNALS: Duration = Duration::from_millis(30);

/// A sink that only cancels.
struct CancelSink<'a>(&'a AtomicBool);

impl Sink for CancelSink<'_> {
    fn cancelled(&self) -> bool {
        self.0.load(SeqCst) || is_ending()
    }

    fn event(&self, _: &Event) {}

    fn image(&self, _: GeneratedImage) -> Result<()> {
        Ok(())
    }

    fn ended(&self, _: Result<()>) {}
}

/// Runs `work` on another thread and waits for it without holding the interpreter. A signal cancels its sink.
pub(crate) fn run<T: Send, E: Explain + Send>(
    py: Python<'_>,
    work: impl FnOnce(&dyn Sink) -> Result<T, E> + Send,
) -> PyResult<T> {
    let cancel = AtomicBool::new(false);
    let (sender, result) = channel();
    let result = Mutex::new(result);
    let running = Running::new();
    let outcome = std::thread::scope(|scope| {
        let cancel = &cancel;
        scope.spawn(move || {
            let _ = sender.send(work(&CancelSink(cancel)));
            drop(running);
        });
        let mut signal = None;
        loop {
            match py.detach(|| lock(&result).recv_timeout(SIGNALS)) {
                Ok(outcome) => break signal.map_or(Ok(outcome), Err),
                Err(RecvTimeoutError::Disconnected) => {
                    let lost = Error::Panicked("a thread of the engine panicked".into());
                    break Err(errors::explained(py, &lost));
                }
                Err(RecvTimeoutError::Timeout) if signal.is_none() => {
                    signal = py.check_signals().err();
                    cancel.store(signal.is_some(), SeqCst);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    });
    outcome?.map_err(|error| errors::explained(py, &error))
}
