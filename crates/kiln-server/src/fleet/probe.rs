//! Whether the queue can be used: found out by writing to it, as `/readyz` says it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kiln_base::lock;

use super::bucket::FENCE;
use super::connect::is_missing;
use super::error::{FleetError, Result};
use super::link::Link;

/// How long a result is used again.
const RECENT: Duration = Duration::from_secs(1);
/// How long a ticket that could not be published counts: the reconciler tries again more often than this.
const TICKETS_RECENT: Duration = Duration::from_secs(10);
/// How long the write may take, and then the question why it failed.
const TIMEOUT: Duration = Duration::from_millis(2000);
const REASON_TIMEOUT: Duration = Duration::from_millis(1000);

impl Link {
    /// Checks that records and tickets can be written, within three seconds; blocks.
    pub(super) fn check(&self) -> Result<()> {
        // Locked during the check: who comes meanwhile gets its result.
        let mut checked = lock(&self.health.checked);
        let recent = checked.as_ref().filter(|(at, _)| at.elapsed() < RECENT);
        let problem = match recent {
            Some((_, problem)) => problem.clone(),
            None => {
                let problem = self.wait(self.probe()).err();
                *checked = Some((Instant::now(), problem.clone()));
                problem
            }
        };
        let tickets = lock(&self.health.tickets).clone().filter(|(at, _)| at.elapsed() < TICKETS_RECENT);
        let problem = problem.or_else(|| tickets.map(|(_, problem)| problem));
        problem.map_or(Ok(()), |problem| Err(FleetError(problem)))
    }

    /// Writes a record; an error says why that is not possible.
    async fn probe(&self) -> std::result::Result<(), String> {
        if !self.is_connected() {
            return Err("no NATS server can be reached".into());
        }
        let id = Bytes::from(format!("\"{}\"", self.id));
        let error = match tokio::time::timeout(TIMEOUT, self.state.put(FENCE, id)).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "timed out".into(),
        };
        let stream = self.jetstream.get_stream(&self.state.stream_name);
        match tokio::time::timeout(REASON_TIMEOUT, stream).await {
            Ok(Ok(_)) => Err(format!(
                "NATS stores nothing ({error}): if its disk is or was full, free space and restart nats-server"
            )),
            Ok(Err(reason)) if is_missing(&reason) => Err(format!(
                "the bucket of records `{}` is gone: restore it, or restart a process of the fleet to begin anew",
                self.state.name
            )),
            _ => Err(format!("JetStream does not answer ({error})")),
        }
    }

    /// Runs a transfer, but not longer than the queue can be written: a client waits for it.
    pub(super) async fn while_writable<T>(&self, transfer: impl Future<Output = Result<T>>) -> Result<T> {
        let watching = async {
            loop {
                tokio::time::sleep(RECENT).await;
                if let Err(problem) = self.probe().await {
                    return Err(FleetError(problem));
                }
            }
        };
        tokio::select! {
            done = transfer => done,
            problem = watching => problem,
        }
    }
}
