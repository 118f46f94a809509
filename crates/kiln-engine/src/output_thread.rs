//! A thread that waits for the device's results and passes them on, while the device is given more work.
//!
//! A GPU starts on the next request while the last image is encoded and saved. On an H200, an image of klein 4B takes
//! 10 ms more through the engine than the sum of its phases; a server with several requests hides half of that.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

type Work = Box<dyn FnOnce() + Send>;

/// Queue length. A full queue blocks the producer, so that finished images don't pile up.
const QUEUE: usize = 4;

/// A thread that runs closures in order.
pub(crate) struct OutputThread {
    queue: Option<SyncSender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl OutputThread {
    pub fn start() -> std::io::Result<OutputThread> {
        let (queue, work) = sync_channel::<Work>(QUEUE);
        let thread = std::thread::Builder::new().name("output".into()).spawn(move || {
            for work in work {
                // A panic is reported by the owner of the work, when the work is dropped.
                let _ = catch_unwind(AssertUnwindSafe(work));
            }
        })?;
        Ok(OutputThread { queue: Some(queue), thread: Some(thread) })
    }

    /// Queues a closure.
    pub fn push(&self, work: impl FnOnce() + Send + 'static) {
        if let Some(queue) = &self.queue {
            // Sending can't fail: the thread outlives the queue.
            let _ = queue.send(Box::new(work));
        }
    }

    /// Waits until everything queued so far has run.
    pub fn wait(&self) {
        let (done, wait) = sync_channel::<()>(1);
        self.push(move || drop(done));
        let _ = wait.recv();
    }
}

impl Drop for OutputThread {
    fn drop(&mut self) {
        self.queue = None;
        // A sink may drop the last owner on this very thread, which can't join itself.
        let is_other = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(is_other) {
            let _ = thread.join();
        }
    }
}
