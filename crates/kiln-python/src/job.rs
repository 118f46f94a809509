//! A job: a request that runs on a thread of its own, and the messages that come from it.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_engine::{Plan, Session, StepReply, Task};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::Array;
use crate::errors::{self, Kind};
use crate::inputs::tensor_from;
use crate::output::Image;
use crate::shutdown::Running;
use crate::sink::{JobSink, Message, Reply, Subscriptions};

/// How often to check for Python's signals.
const SIGNALS: Duration = Duration::from_millis(30);

/// A running request. Dropping it cancels it.
#[pyclass(frozen, module = "kiln._kiln")]
pub(crate) struct Job {
    cancel: Arc<AtomicBool>,
    messages: Mutex<Receiver<Message>>,
    /// The answer that the current step waits for.
    reply: Mutex<Option<Reply>>,
    ended: AtomicBool,
    plan: Arc<Plan>,
}

impl Job {
    /// Starts a job.
    pub fn start(session: Arc<Session>, plan: Plan, wanted: Subscriptions) -> std::io::Result<Job> {
        let (sender, messages) = channel();
        let cancel = Arc::new(AtomicBool::new(false));
        let sink = Arc::new(JobSink::new(sender, Arc::clone(&cancel), &plan, wanted));
        let plan = Arc::new(plan);
        let task = Task { plan: Arc::clone(&plan), sink };
        let running = Running::new();
        std::thread::Builder::new().name("kiln job".into()).spawn(move || {
            session.generate(&[task]);
            session.finish();
            drop(running);
        })?;
        let (messages, reply) = (Mutex::new(messages), Mutex::new(None));
        Ok(Job { cancel, messages, reply, ended: AtomicBool::new(false), plan })
    }

    /// Waits for a message without holding the interpreter. `None` after the timeout.
    fn receive(&self, py: Python<'_>, timeout: Duration) -> Option<Message> {
        py.detach(|| match lock(&self.messages).recv_timeout(timeout) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                let lost = kiln_engine::Error::Panicked("a thread of the engine panicked".into());
                Some(Message::Ended(Err(lost)))
            }
        })
    }

    /// Cancels the job and waits for its end, about a step.
    fn stop(&self, py: Python<'_>) {
        self.cancel();
        while !self.ended.load(SeqCst) {
            // Dropping the reply of a step ends the wait for it.
            let message = self.receive(py, Duration::from_secs(1));
            if let Some(Message::Ended(_)) = message {
                self.ended.store(true, SeqCst);
            }
        }
    }

    fn convert<'py>(&self, py: Python<'py>, message: Message) -> PyResult<Option<Bound<'py, PyAny>>> {
        let fields = PyDict::new(py);
        let kind = match message {
            Message::Progress(progress) => {
                fields.set_item("phase", progress.phase.name())?;
                fields.set_item("image", progress.image)?;
                fields.set_item("images", progress.images)?;
                fields.set_item("step", progress.step)?;
                fields.set_item("steps", progress.steps)?;
                fields.set_item("fraction", progress.fraction)?;
                "progress"
            }
            Message::Note(text) => {
                fields.set_item("text", text)?;
                "note"
            }
            Message::Preview(image) => {
                fields.set_item("pixels", Array::of_pixels(image))?;
                "preview"
            }
            Message::StepEnd(step, reply) => {
                *lock(&self.reply) = Some(reply);
                let latents: kiln_engine::Result<Vec<Array>> =
                    step.latents.iter().map(Array::of_tensor).collect();
                fields.set_item("step", step.step)?;
                fields.set_item("steps", step.steps)?;
                fields.set_item("sigma", step.sigma)?;
                fields.set_item("image", step.image)?;
                fields.set_item("latents", latents.map_err(|error| errors::explained(py, &error))?)?;
                "step"
            }
            Message::Image(image) => {
                fields.set_item("image", Image::new(py, *image)?)?;
                "image"
            }
            Message::Ended(result) => {
                self.ended.store(true, SeqCst);
                return result.map(|()| None).map_err(|error| errors::explained(py, &error));
            }
        };
        Ok(Some((kind, fields).into_pyobject(py)?.into_any()))
    }
}

#[pymethods]
impl Job {
    /// Waits for what happens next: `(kind, fields)`; `None` at the end, or after `timeout` seconds.
    ///
    /// Raises the job's error. Ctrl-C cancels the job.
    #[pyo3(signature = (timeout=None))]
    fn next<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let limit =
            timeout.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
        let start = Instant::now();
        while !self.ended.load(SeqCst) {
            let left = limit.map_or(SIGNALS, |limit| limit.saturating_sub(start.elapsed()).min(SIGNALS));
            if let Some(message) = self.receive(py, left) {
                return self.convert(py, message);
            }
            if let Err(error) = py.check_signals() {
                self.stop(py);
                return Err(error);
            }
            if limit.is_some_and(|limit| start.elapsed() >= limit) {
                break;
            }
        }
        Ok(None)
    }

    /// Answers a step: latents to continue with, one `(shape, dtype, bytes)` for each image, and whether to skip the
    /// remaining steps.
    #[pyo3(signature = (latents=None, stop=false))]
    fn reply(&self, py: Python<'_>, latents: Option<Vec<Bound<'_, PyAny>>>, stop: bool) -> PyResult<()> {
        let latents =
            latents.map(|all| all.iter().map(tensor_from).collect::<PyResult<Vec<_>>>()).transpose()?;
        let Some(reply) = lock(&self.reply).take() else {
            return Err(errors::exception(py, Kind::Other, "no step waits for an answer".into(), None));
        };
        let _ = reply.send(StepReply { latents, stop });
        Ok(())
    }

    /// What was asked for, with all defaults filled in.
    #[getter]
    fn plan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        describe(py, &self.plan)
    }

    /// Whether it has ended.
    #[getter]
    fn ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    /// Cancels it; it ends within a step.
    fn cancel(&self) {
        self.cancel.store(true, SeqCst);
        lock(&self.reply).take();
    }

    /// Cancels it and waits for its end.
    fn close(&self, py: Python<'_>) {
        self.stop(py);
    }
}

/// The sizes, steps and notes of a plan.
pub(crate) fn describe<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("width", plan.width)?;
    fields.set_item("height", plan.height)?;
    let [rows, columns] = plan.model.grid([plan.width, plan.height]);
    fields.set_item("latent", (plan.model.transformer.config.in_channels, rows, columns))?;
    fields.set_item("images", plan.images)?;
    fields.set_item("steps", plan.steps - plan.first_step)?;
    fields.set_item("sigmas", plan.schedule.sigmas()[plan.first_step..].to_vec())?;
    fields.set_item("guidance", plan.guidance)?;
    fields.set_item("notes", plan.notes.clone())?;
    Ok(fields)
}

impl Drop for Job {
    fn drop(&mut self) {
        self.cancel();
    }
}
