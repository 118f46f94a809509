//! What is known about the queue: whether records and tickets can be written.

use std::sync::Mutex;
use std::time::Instant;

use kiln_base::lock;

/// What is known about the queue.
#[derive(Default)]
pub(super) struct Health {
    /// The last check, and what was wrong.
    pub(super) checked: Mutex<Option<(Instant, Option<String>)>>,
    /// When and why the last ticket could not be published.
    pub(super) tickets: Mutex<Option<(Instant, String)>>,
}

impl Health {
    /// Remembers whether the last ticket could be published.
    pub(super) fn set_tickets(&self, error: Option<String>) {
        *lock(&self.tickets) = error.map(|error| (Instant::now(), error));
    }
}
