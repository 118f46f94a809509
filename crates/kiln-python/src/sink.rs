//! The engine's side of a job: passes what happens to the thread that waits in Python.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_engine::{
    Error, Event, GeneratedImage, Plan, Progress, ProgressTracker, Result, Sink, StepEnd, StepReply,
};
use kiln_image::RgbImage;
use kiln_tensor::HostTensor;

use crate::shutdown::is_ending;

/// The answer to [`Message::StepEnd`]; none if the job is cancelled.
pub(crate) type Reply = SyncSender<StepReply<HostTensor>>;

/// What happens in a job.
pub(crate) enum Message {
    Progress(Progress),
    Note(String),
    Preview(RgbImage),
    StepEnd(StepEnd<HostTensor>, Reply),
    Image(Box<GeneratedImage>),
    Ended(Result<()>),
}

/// Which messages Python wants.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Subscriptions {
    pub progress: bool,
    pub previews: bool,
    pub steps: bool,
}

/// The sink of a job.
pub(crate) struct JobSink {
    messages: Mutex<Sender<Message>>,
    cancel: Arc<AtomicBool>,
    wanted: Subscriptions,
    tracker: Mutex<ProgressTracker>,
}

impl JobSink {
    pub fn new(
        messages: Sender<Message>,
        cancel: Arc<AtomicBool>,
        plan: &Plan,
        wanted: Subscriptions,
    ) -> JobSink {
        let tracker = Mutex::new(ProgressTracker::new(plan));
        JobSink { messages: Mutex::new(messages), cancel, wanted, tracker }
    }

    /// Passes a message on. A job that was dropped needs none.
    fn send(&self, message: Message) {
        let _ = lock(&self.messages).send(message);
    }
}

impl Sink for JobSink {
    fn cancelled(&self) -> bool {
        self.cancel.load(SeqCst) || is_ending()
    }

    fn event(&self, event: &Event) {
        if !self.wanted.progress {
            return;
        }
        if let Event::Note(text) = event {
            self.send(Message::Note(text.clone()));
        }
        if let Some(progress) = lock(&self.tracker).update(event) {
            self.send(Message::Progress(progress));
        }
    }

    fn wants_preview(&self) -> bool {
        self.wanted.previews
    }

    fn preview(&self, image: RgbImage) {
        self.send(Message::Preview(image));
    }

    fn wants_step_end(&self) -> bool {
        self.wanted.steps
    }

    fn step_end(&self, step: StepEnd<HostTensor>) -> Result<StepReply<HostTensor>> {
        let (reply, answer) = sync_channel(1);
        self.send(Message::StepEnd(step, reply));
        answer.recv().map_err(|_| Error::CANCELLED)
    }

    fn image(&self, image: GeneratedImage) -> Result<()> {
        self.send(Message::Image(Box::new(image)));
        Ok(())
    }

    fn ended(&self, result: Result<()>) {
        self.send(Message::Ended(result));
    }
}
