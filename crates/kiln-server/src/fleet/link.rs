//! The connection to NATS: the subjects of a fleet, its streams, and blocking calls to them.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use async_nats::Client;
use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::{self, kv, stream};
use bytes::Bytes;
use kiln_base::{hex, lock};
use sha2::{Digest, Sha256};
use tokio::runtime::{Handle, Runtime};

use super::config::FleetConfig;
use super::connect::{PATIENCE, TIMEOUT, connect, patiently, restore_stream};
use super::error::{FleetError, Result, failed};
use super::health::Health;
use crate::jobs::job::Job;
use crate::jobs::random::random_bytes;

/// How long a process tries to reach the servers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// How long a call is retried.
    pub(super) total: Duration,
    /// How long one try may take.
    pub(super) each: Duration,
}

impl Patience {
    /// A worker waits: it has nothing else to do.
    pub(super) const WORKER: Patience = Patience { total: PATIENCE, each: TIMEOUT };
    /// A client of a gateway can send its request again, to another one.
    pub(super) const GATEWAY: Patience =
        Patience { total: Duration::from_millis(4200), each: Duration::from_millis(1500) };
}

/// A connection to the queue.
pub(super) struct Link {
    runtime: Option<Runtime>,
    pub(super) config: FleetConfig,
    /// The id of this process.
    pub(super) id: String,
    pub(super) client: Client,
    pub(super) jetstream: jetstream::Context,
    pub(super) state: kv::Store,
    pub(super) jobs: stream::Stream,
    pub(super) dead: stream::Stream,
    patience: Mutex<Patience>,
    pub(super) health: Health,
}

impl Drop for Link {
    fn drop(&mut self) {
        // This may run on a task of the runtime itself, which must not wait for its own end.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Link {
    /// Connects, and creates what is missing on the servers.
    pub(super) fn open(config: FleetConfig) -> Result<Arc<Link>> {
        let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
        if config.prefix.is_empty() || !config.prefix.chars().all(valid) {
            return Err(FleetError(format!(
                "the prefix `{}` must consist of lower-case letters, digits, - and _",
                config.prefix
            )));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("nats")
            .enable_all()
            .build()
            .map_err(|error| FleetError(format!("can't start threads: {error}")))?;
        let (client, jetstream, state, jobs, dead) =
            match block_on(runtime.handle(), patiently(|| connect(&config))) {
                Ok(opened) => opened,
                Err(error) => {
                    // The caller may be a thread that must not wait for the end of the runtime.
                    runtime.shutdown_background();
                    return Err(error);
                }
            };
        let id = hex(random_bytes::<8>());
        Ok(Arc::new(Link {
            runtime: Some(runtime),
            config,
            id,
            client,
            jetstream,
            state,
            jobs,
            dead,
            patience: Mutex::new(Patience::WORKER),
            health: Health::default(),
        }))
    }

    pub(super) fn handle(&self) -> Handle {
        // Taken only when the last reference is dropped.
        self.runtime.as_ref().map_or_else(Handle::current, |runtime| runtime.handle().clone())
    }

    /// Blocks until a call to the servers is done; from any thread that may block.
    pub(super) fn wait<T>(&self, call: impl Future<Output = T>) -> T {
        block_on(&self.handle(), call)
    }

    /// The subject `PREFIX.KIND.ID`.
    pub(super) fn subject(&self, kind: &str, id: &str) -> String {
        format!("{}.{kind}.{id}", self.config.prefix)
    }

    /// The subject of a model's tickets.
    pub(super) fn ticket_subject(&self, model: &str) -> String {
        self.subject("jobs", &token(model))
    }

    /// The consumer of a model's tickets.
    pub(super) async fn consumer(&self, model: &str) -> Result<PullConsumer> {
        let name = token(model);
        let config = pull::Config {
            durable_name: Some(name.clone()),
            filter_subject: self.ticket_subject(model),
            ack_policy: AckPolicy::Explicit,
            ack_wait: self.config.ack_wait,
            max_deliver: -1,
            max_ack_pending: 10_000,
            ..pull::Config::default()
        };
        self.jobs.create_consumer(config).await.map_err(|error| failed("creating a consumer")(&error))
    }

    /// Publishes the ticket of a job, or another one for it; `id` makes the stream drop repetitions. If the stream is gone
    /// it is created again: the reconciler publishes what was on it.
    pub(super) async fn publish_ticket(&self, job: &Job, id: &str) -> Result<()> {
        let ticket = serde_json::to_vec(job).unwrap_or_default();
        let published =
            self.publish(&self.jobs, self.ticket_subject(&job.fleet.model), id, ticket.into()).await;
        self.health.set_tickets(published.as_ref().err().map(ToString::to_string));
        published
    }

    /// Publishes a dead letter.
    pub(super) async fn publish_dead(&self, job: &Job) -> Result<()> {
        let id = format!("{}-{}", job.id, job.attempts);
        let letter = serde_json::to_vec(job).unwrap_or_default();
        self.publish(&self.dead, self.subject("dead", &job.id), &id, letter.into()).await
    }

    /// Publishes a message to a stream, and retries until it is acknowledged; the stream drops duplicates of an id.
    async fn publish(
        &self,
        stream: &stream::Stream,
        subject: String,
        id: &str,
        payload: Bytes,
    ) -> Result<()> {
        self.retry("publishing a message", || async {
            let message = PublishMessage::build().message_id(id).payload(payload.clone());
            let sent = self.jetstream.send_publish(subject.clone(), message).await;
            let error = match sent {
                Ok(ack) => match ack.await {
                    Ok(_) => return Ok(()),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if error.kind() == PublishErrorKind::StreamNotFound {
                self.restore_stream(stream).await.map_err(Failure::retry)?;
            }
            Err(Failure::retry(error))
        })
        .await
    }

    /// Creates a stream again, as it was, if it is gone.
    pub(super) async fn restore_stream(&self, stream: &stream::Stream) -> Result<()> {
        restore_stream(&self.jetstream, stream).await
    }

    /// Whether the connection is open.
    pub(super) fn is_connected(&self) -> bool {
        self.client.connection_state() == async_nats::connection::State::Connected
    }

    /// From now on clients wait for this process.
    pub(super) fn hurry(&self) {
        *lock(&self.patience) = Patience::GATEWAY;
    }

    /// Whether clients wait for this process.
    pub(super) fn is_hurried(&self) -> bool {
        lock(&self.patience).total == Patience::GATEWAY.total
    }

    /// Tries until it works, as long as this process is patient.
    pub(super) async fn retry<T, F>(&self, what: &str, mut attempt: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = std::result::Result<T, Failure>>,
    {
        let (started, patience) = (Instant::now(), *lock(&self.patience));
        let mut pause = Duration::from_millis(20);
        loop {
            let error = match tokio::time::timeout(patience.each, attempt()).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(Failure(error))) => error,
                Err(_) => "timed out".into(),
            };
            if started.elapsed() + pause >= patience.total {
                return Err(FleetError(format!("{what}: {error}")));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }
}

/// Polls a future on this thread, inside a runtime that has the connections and timers. Unlike tokio's, for threads of
/// another runtime, too.
fn block_on<T>(runtime: &Handle, future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let _entered = runtime.enter();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    // On a task of another runtime: what is left of its time is not this future's, which would wait for a task that waits.
    let (mut future, mut context) = (pin!(tokio::task::unconstrained(future)), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(done) => return done,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// A failure that may be temporary.
pub(super) struct Failure(String);

impl Failure {
    pub(super) fn retry(error: impl std::fmt::Display) -> Failure {
        Failure(error.to_string())
    }
}

/// A name as a token of a subject: unchanged if valid, else with other characters replaced and a hash added.
pub(super) fn token(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if !name.is_empty() && name.len() <= 64 && name.chars().all(plain) {
        return name.to_owned();
    }
    let kept: String = name.chars().take(32).map(|c| if plain(c) { c } else { '_' }).collect();
    format!("{kept}-{}", &hex(Sha256::digest(name))[..12])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_from_a_task_of_another_runtime_ends_however_many_answers_it_awaits() {
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let own = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let of_link = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
            own.block_on(async {
                let answers = tokio::sync::Semaphore::new(1);
                block_on(of_link.handle(), async {
                    for _ in 0..1000 {
                        drop(answers.acquire().await.unwrap());
                    }
                });
            });
            of_link.shutdown_background();
            ended.send(()).unwrap();
        });
        end.recv_timeout(Duration::from_secs(20)).expect("it waits for the task that waits for it");
    }

    #[test]
    fn names_become_tokens_that_differ() {
        assert_eq!(token("klein-4b"), "klein-4b");
        let odd = ["a.b", "a b", "a>b", "", "a*b"].map(token);
        assert!(odd.iter().all(|token| !token.is_empty() && !token.contains(['.', ' ', '>', '*'])));
        assert_eq!(odd.iter().collect::<std::collections::HashSet<_>>().len(), odd.len());
    }
}
