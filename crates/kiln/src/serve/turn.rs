//! Whose turn it is on the device: a training's, or image jobs'.

use std::sync::{Condvar, Mutex};

use kiln_base::{lock, wait};

/// The training thread takes the turn while it computes; image jobs wait until it is free.
///
/// Image jobs don't take it: a training takes it first and then looks for unfinished jobs, and gives it back if there are
/// any. So a job that was accepted before finds it free, and one that comes later makes the training give it back.
#[derive(Default)]
pub struct DeviceLock {
    taken: Mutex<bool>,
    freed: Condvar,
}

impl DeviceLock {
    /// Takes it for the training.
    pub fn take(&self) {
        *lock(&self.taken) = true;
    }

    /// Gives it back.
    pub fn give_back(&self) {
        *lock(&self.taken) = false;
        self.freed.notify_all();
    }

    /// Waits until no training computes.
    pub fn wait_until_free(&self) {
        let mut taken = lock(&self.taken);
        while *taken {
            taken = wait(&self.freed, taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::Duration;

    #[test]
    fn image_jobs_wait_for_the_step_of_a_training() {
        let (turn, generated) = (Arc::new(DeviceLock::default()), Arc::new(AtomicBool::new(false)));
        turn.wait_until_free();
        turn.take();
        let job = std::thread::spawn({
            let (turn, generated) = (Arc::clone(&turn), Arc::clone(&generated));
            move || {
                turn.wait_until_free();
                generated.store(true, SeqCst);
            }
        });
        std::thread::sleep(Duration::from_millis(10));
        assert!(!generated.load(SeqCst));
        turn.give_back();
        job.join().unwrap();
        assert!(generated.load(SeqCst));
    }
}
