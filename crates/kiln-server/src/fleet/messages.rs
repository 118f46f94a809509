//! Messages about running jobs that may be lost: progress and previews.

use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;
use kiln_base::lock;
use kiln_engine::Progress;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::link::Link;

/// What a worker reports about a running job.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ProgressMessage {
    #[serde(flatten)]
    pub(super) progress: Progress,
    pub(super) time_left: Option<f32>,
    pub(super) notes: Vec<String>,
}

/// A message: its subject, a number, and its content.
pub(super) struct Outgoing {
    pub(super) subject: String,
    pub(super) number: u32,
    pub(super) payload: Bytes,
}

/// Messages that wait to be sent. Of each subject only the latest waits: a slow connection piles nothing up.
#[derive(Default)]
pub(super) struct Outbox {
    waiting: Mutex<Vec<Outgoing>>,
    filled: Notify,
}

impl Outbox {
    /// Sends a message soon. Doesn't wait.
    pub(super) fn send(&self, message: Outgoing) {
        let mut waiting = lock(&self.waiting);
        match waiting.iter_mut().find(|earlier| earlier.subject == message.subject) {
            Some(earlier) => *earlier = message,
            None => waiting.push(message),
        }
        self.filled.notify_one();
    }

    /// Waits for messages.
    async fn take(&self) -> Vec<Outgoing> {
        loop {
            let taken = std::mem::take(&mut *lock(&self.waiting));
            if !taken.is_empty() {
                return taken;
            }
            self.filled.notified().await;
        }
    }
}

/// Publishes messages until the link is dropped.
pub(super) async fn publish(link: Weak<Link>, outbox: Arc<Outbox>) {
    loop {
        for Outgoing { subject, number, payload } in outbox.take().await {
            let Some(link) = link.upgrade() else { return };
            let mut headers = async_nats::HeaderMap::new();
            headers.insert("number", number.to_string());
            let _ = link.client.publish_with_headers(subject, headers, payload).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn of_each_subject_only_the_latest_message_waits() {
        let outbox = Outbox::default();
        for number in 1..=1000 {
            for subject in ["progress.a", "preview.a", "preview.b"] {
                outbox.send(Outgoing { subject: subject.into(), number, payload: Bytes::new() });
            }
        }
        let sent: Vec<_> = outbox.take().await.into_iter().map(|m| (m.subject, m.number)).collect();
        assert_eq!(sent, ["progress.a", "preview.a", "preview.b"].map(|s| (s.to_owned(), 1000)));
    }
}
