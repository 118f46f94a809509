//! Whose turn it is on the device: a training's, or image jobs'.

use std::sync::{Condvar, Mutex};

use kiln_base::{lock, wait};

/// The training thread takes the turn while it computes; image jobs wait until it is free. Between its steps a training
/// keeps its memory, which a job can claim: then the training saves its state and ends.
///
/// Image jobs don't take it: a training takes it first and then looks for unfinished jobs, and gives it back if there are
/// any. So a job that was accepted before finds it free, and one that comes later makes the training give it back.
#[derive(Default)]
pub struct DeviceLock {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Whether the training computes.
    taken: bool,
    /// Whether the training holds memory.
    held: bool,
    /// Whether a job needs that memory.
    claimed: bool,
}

impl DeviceLock {
    /// Takes the turn for the training.
    pub fn take(&self) {
        lock(&self.state).taken = true;
    }

    /// Gives the turn back; the training keeps its memory.
    pub fn give_back(&self) {
        lock(&self.state).taken = false;
        self.changed.notify_all();
    }

    /// Tells that the training, whose turn it is, will hold memory until [`DeviceLock::release`].
    pub fn hold(&self) {
        lock(&self.state).held = true;
    }

    /// Gives turn and memory back.
    pub fn release(&self) {
        *lock(&self.state) = State::default();
        self.changed.notify_all();
    }

    /// Whether a job claims the training's memory.
    pub fn is_claimed(&self) -> bool {
        lock(&self.state).claimed
    }

    /// Waits until no training computes.
    pub fn wait_until_free(&self) {
        let mut state = lock(&self.state);
        while state.taken {
            state = wait(&self.changed, state);
        }
    }

    /// Claims the memory of a training, and waits until it is released.
    pub fn claim_memory(&self) {
        let mut state = lock(&self.state);
        while state.held {
            state.claimed = true;
            state = wait(&self.changed, state);
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

    #[test]
    fn a_claim_waits_until_the_training_has_ended() {
        let turn = Arc::new(DeviceLock::default());
        turn.claim_memory();
        assert!(!turn.is_claimed(), "nobody held it");
        turn.take();
        turn.hold();
        turn.give_back();
        let job = std::thread::spawn({
            let turn = Arc::clone(&turn);
            move || turn.claim_memory()
        });
        while !turn.is_claimed() {
            std::thread::yield_now();
        }
        turn.take();
        turn.give_back();
        assert!(!job.is_finished());
        turn.release();
        job.join().unwrap();
        assert!(!turn.is_claimed());
    }
}
