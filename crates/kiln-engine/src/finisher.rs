//! A thread that waits for what the device makes, and hands it on, while the device is given more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Work for the thread.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// Pieces of work that may wait; whoever brings more waits as well, so that images don't pile up.
const WAITING: usize = 4;

/// Does one piece of work after the other.
pub(crate) struct Finisher {
    queue: Option<SyncSender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl Finisher {
    pub fn start() -> std::io::Result<Finisher> {
        let (queue, work) = sync_channel::<Work>(WAITING);
        let thread = std::thread::Builder::new().name("finisher".into()).spawn(move || {
            for work in work {
                // Whoever owns the work is told of a panic when it is dropped.
                let _ = catch_unwind(AssertUnwindSafe(work));
            }
        })?;
        Ok(Finisher { queue: Some(queue), thread: Some(thread) })
    }

    /// Adds a piece of work.
    pub fn push(&self, work: impl FnOnce() + Send + 'static) {
        if let Some(queue) = &self.queue {
            // The thread outlives the queue.
            let _ = queue.send(Box::new(work));
        }
    }

    /// Waits until all work so far is done.
    pub fn wait(&self) {
        let (done, wait) = sync_channel::<()>(1);
        self.push(move || drop(done));
        let _ = wait.recv();
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        self.queue = None;
        // Whoever is handed something may be the last one who uses this, and can't wait for itself.
        let others = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(others) {
            let _ = thread.join();
        }
    }
}
