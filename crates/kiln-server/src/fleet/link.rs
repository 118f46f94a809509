//! The connection to NATS: the streams, buckets and subjects of a fleet, and blocking calls to them.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::kv::{Entry, Operation, UpdateErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{self, LastRawMessageErrorKind, RetentionPolicy};
use async_nats::jetstream::{self, kv};
use async_nats::{Client, ConnectOptions, Event};
use bytes::Bytes;
use kiln_base::{hex, lock};
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio::runtime::Runtime;

use super::FleetConfig;
use super::health::{self, Health};
use super::records::JobRecord;
use crate::server::random_bytes;
use crate::store::StoreError;

/// Why a fleet can't be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FleetError(pub(crate) String);

impl From<FleetError> for StoreError {
    fn from(error: FleetError) -> StoreError {
        StoreError::Queue(error.0)
    }
}

pub(super) type Result<T> = std::result::Result<T, FleetError>;

pub(super) fn failed(what: &str) -> impl Fn(&dyn std::fmt::Display) -> FleetError + '_ {
    move |error| FleetError(format!("{what}: {error}"))
}

/// How long one try may take.
const TIMEOUT: Duration = Duration::from_secs(4);

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
    pub(super) const WORKER: Patience = Patience { total: Duration::from_secs(25), each: TIMEOUT };
    /// A client of a gateway can send its request again, to another one.
    pub(super) const GATEWAY: Patience =
        Patience { total: Duration::from_millis(4200), each: Duration::from_millis(1500) };
}

/// The header of a record that says what was done to it.
const KV_OPERATION: &str = "KV-Operation";
/// Repeated submissions within this time are one job, whatever became of the answers.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(600);
/// Dead letters are kept this long.
const DEAD_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// The outcome of a compare-and-set write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOutcome {
    /// It is stored as this revision.
    Revision(u64),
    /// The record has changed, or exists already.
    Conflict,
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
        // Not `block_on`: the caller may be a thread of another runtime.
        let (sender, opened) = std::sync::mpsc::sync_channel(1);
        let connecting = config.clone();
        runtime.spawn(async move {
            let _ = sender.send(patiently(|| connect(&connecting)).await);
        });
        let opened = opened.recv().unwrap_or_else(|_| Err(FleetError("the connection was closed".into())));
        let (client, jetstream, state, jobs, dead) = match opened {
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

    pub(super) fn handle(&self) -> tokio::runtime::Handle {
        // Taken only when the last reference is dropped.
        self.runtime.as_ref().map_or_else(tokio::runtime::Handle::current, |runtime| runtime.handle().clone())
    }

    /// Runs a future on the connection's runtime and blocks until it is done; callable from any thread that may block.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let result = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&result);
        let (sender, done) = std::sync::mpsc::sync_channel(1);
        // One type of task for all futures: tokio's code is compiled for each type.
        let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            *lock(&slot) = Some(future.await);
            let _ = sender.send(());
        });
        self.handle().spawn(task);
        let _ = done.recv();
        let result = lock(&result).take();
        result.ok_or_else(|| FleetError("the connection was closed".into()))
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
    pub(super) async fn publish_ticket(&self, job: &JobRecord, id: &str) -> Result<()> {
        let ticket = serde_json::to_vec(job).unwrap_or_default();
        let published = self.publish(&self.jobs, self.ticket_subject(&job.model), id, ticket.into()).await;
        self.health.set_tickets(published.as_ref().err().map(ToString::to_string));
        published
    }

    /// Publishes a dead letter.
    pub(super) async fn publish_dead(&self, job: &JobRecord) -> Result<()> {
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

    /// Reads a record; `None` if there never was one. Asks the leader: another server's copy may be an old one.
    pub(super) async fn entry(&self, key: &str) -> Result<Option<Record>> {
        let subject = format!("{}{key}", self.state.prefix);
        self.retry("reading a record", || async {
            match self.state.stream.get_last_raw_message_by_subject(&subject).await {
                Ok(message) => {
                    let operation = message.headers.get(KV_OPERATION).map(|operation| operation.as_str());
                    let is_present = !matches!(operation, Some("DEL" | "PURGE"));
                    Ok(Some(Record { revision: message.sequence, value: message.payload, is_present }))
                }
                Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
                Err(error) => Err(Failure::retry(error)),
            }
        })
        .await
    }

    /// Creates a record, also in place of one that was deleted.
    pub(super) async fn create(&self, key: &str, value: &impl Serialize) -> Result<WriteOutcome> {
        match self.update(key, value, 0).await? {
            WriteOutcome::Conflict => match self.entry(key).await? {
                Some(deleted) if !deleted.is_present => self.update(key, value, deleted.revision).await,
                _ => Ok(WriteOutcome::Conflict),
            },
            created => Ok(created),
        }
    }

    /// Changes a record that has this revision; 0 creates it.
    pub(super) async fn update(
        &self,
        key: &str,
        value: &impl Serialize,
        revision: u64,
    ) -> Result<WriteOutcome> {
        let value = json(value);
        let is_first = AtomicBool::new(true);
        self.retry("changing a record", || async {
            let is_first = is_first.swap(false, SeqCst);
            match self.state.update(key, value.clone(), revision).await {
                Ok(revision) => Ok(WriteOutcome::Revision(revision)),
                Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => {
                    // After a try whose answer was lost, the conflict may be with that one.
                    let stored =
                        if is_first { None } else { self.entry(key).await.map_err(Failure::retry)? };
                    Ok(match stored {
                        Some(stored) if stored.value == value => WriteOutcome::Revision(stored.revision),
                        _ => WriteOutcome::Conflict,
                    })
                }
                Err(error) => Err(Failure::retry(error)),
            }
        })
        .await
    }

    /// Writes something; every record with a lower revision was written before this call, or during it.
    pub(super) async fn fence(&self) -> Result<u64> {
        self.put(health::FENCE, &self.id).await
    }

    /// Writes a record, whatever its revision.
    pub(super) async fn put(&self, key: &str, value: &impl Serialize) -> Result<u64> {
        let value = json(value);
        self.retry("writing a record", || async {
            self.state.put(key, value.clone()).await.map_err(Failure::retry)
        })
        .await
    }

    /// Deletes a record; a delete marker stays.
    pub(super) async fn delete(&self, key: &str) -> Result<()> {
        self.retry("deleting a record", || async { self.state.delete(key).await.map_err(Failure::retry) })
            .await
    }

    /// The last revision of the bucket.
    pub(super) async fn last_revision(&self) -> Result<u64> {
        self.retry("reading the last revision", || async {
            let info = self.state.stream.get_info().await.map_err(Failure::retry)?;
            Ok(info.state.last_sequence)
        })
        .await
    }

    /// Whether the connection is open.
    pub(super) fn is_connected(&self) -> bool {
        self.client.connection_state() == async_nats::connection::State::Connected
    }

    /// From now on clients wait for this process.
    pub(super) fn set_gateway(&self) {
        *lock(&self.patience) = Patience::GATEWAY;
    }

    /// Whether clients wait for this process.
    pub(super) fn is_gateway(&self) -> bool {
        lock(&self.patience).total == Patience::GATEWAY.total
    }

    /// Tries until it works, as long as this process is patient.
    async fn retry<T, F>(&self, what: &str, mut attempt: impl FnMut() -> F) -> Result<T>
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

/// Creates a stream again, as it was, if it is gone.
pub(super) async fn restore_stream(jetstream: &jetstream::Context, stream: &stream::Stream) -> Result<()> {
    let mut config = stream.cached_info().config.clone();
    // What the server itself has added.
    config.metadata.retain(|name, _| !name.starts_with("_nats."));
    let (name, gone) = (config.name.clone(), |error: &dyn std::fmt::Display| {
        FleetError(format!("the stream `{}` is gone: {error}", stream.cached_info().config.name))
    });
    match jetstream.get_stream(&name).await {
        Ok(_) => return Ok(()),
        Err(error) if health::is_missing(&error) => {}
        Err(error) => return Err(gone(&error)),
    }
    jetstream.get_or_create_stream(config).await.map_err(|error| gone(&error))?;
    tracing::error!(stream = name, "a stream of the queue was gone; it was created again");
    Ok(())
}

/// A record as it is stored.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) revision: u64,
    pub(super) value: Bytes,
    /// Whether it is the record itself, not a marker of its deletion.
    pub(super) is_present: bool,
}

/// Whether an entry is the record itself, not a marker of its deletion.
pub(super) fn is_present(entry: &Entry) -> bool {
    entry.operation == Operation::Put
}

fn json(value: &impl Serialize) -> Bytes {
    // Records hold only strings, numbers and lists.
    serde_json::to_vec(value).unwrap_or_default().into()
}

/// A failure that may be temporary.
struct Failure(String);

impl Failure {
    fn retry(error: impl std::fmt::Display) -> Failure {
        Failure(error.to_string())
    }
}

/// Tries again for a while if a cluster has no leader at the moment.
pub(super) async fn patiently<T, F>(mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    const TEMPORARY: [&str; 4] = ["temporarily unavailable", "timed out", "deadline", "no suitable peers"];
    let started = Instant::now();
    loop {
        match attempt().await {
            Err(FleetError(error))
                if started.elapsed() < Patience::WORKER.total
                    && !error.starts_with("can't reach")
                    && TEMPORARY.iter().any(|words| error.contains(words)) =>
            {
                tracing::warn!(error, "the queue is not ready; trying again");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            done => return done,
        }
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

type Opened = (Client, jetstream::Context, kv::Store, stream::Stream, stream::Stream);

async fn connect(config: &FleetConfig) -> Result<Opened> {
    let mut options = ConnectOptions::new()
        .name(format!("kiln {}", config.name))
        .connection_timeout(TIMEOUT)
        .request_timeout(Some(TIMEOUT))
        .ping_interval(Duration::from_secs(5))
        .max_reconnects(None)
        .reconnect_delay_callback(|attempts| Duration::from_millis((20 * attempts as u64).min(500)))
        .event_callback(|event| async move {
            match event {
                Event::Connected => tracing::info!("connected to the queue"),
                Event::Disconnected => tracing::warn!("lost the connection to the queue"),
                other => tracing::warn!("queue: {other}"),
            }
        });
    if let Some(file) = &config.credentials {
        options = options
            .credentials_file(file)
            .await
            .map_err(|error| failed("can't read the credentials")(&error))?;
    }
    if let Some(file) = &config.nkey {
        let seed = tokio::fs::read_to_string(file).await;
        let seed = seed.map_err(|error| failed("can't read the NKey")(&error))?;
        options = options.nkey(seed.trim().to_owned());
    }
    if let Some(file) = &config.authority {
        options = options.add_root_certificates(file.clone()).require_tls(true);
    }
    if let Some((certificate, key)) = &config.certificate {
        options = options.add_client_certificate(certificate.clone(), key.clone()).require_tls(true);
    }
    // In an address: `user:password@` or `token@`.
    let logins =
        config.servers.iter().filter_map(|server| Some(server.split_once("://")?.1.rsplit_once('@')?.0));
    options = match logins.map(|login| login.split_once(':').ok_or(login)).next() {
        Some(Ok((user, password))) => options.user_and_password(user.into(), password.into()),
        Some(Err(token)) => options.token(token.into()),
        None => options,
    };
    let addresses: Vec<String> = config.servers.iter().map(|server| redacted(server)).collect();
    let servers = config.servers.join(",");
    let client = tokio::time::timeout(2 * TIMEOUT, options.connect(addresses))
        .await
        .map_err(|_| FleetError(format!("can't reach the queue at {}: timed out", redacted(&servers))))?
        .map_err(|error| FleetError(format!("can't reach the queue at {}: {error}", redacted(&servers))))?;
    check_version(&client.server_info().version)?;
    let jetstream = jetstream::new(client.clone());
    let name = config.prefix.to_uppercase();
    let missing = failed("the server at the queue's address refuses JetStream (start nats-server with -js)");
    let jobs = jetstream
        .get_or_create_stream(stream::Config {
            name: format!("{name}_JOBS"),
            description: Some("Tickets of Kiln's jobs".into()),
            subjects: vec![format!("{}.jobs.>", config.prefix)],
            retention: RetentionPolicy::WorkQueue,
            duplicate_window: DUPLICATE_WINDOW,
            max_message_size: MAX_RECORD,
            num_replicas: config.replicas,
            ..stream::Config::default()
        })
        .await
        .map_err(|error| missing(&error))?;
    let dead = jetstream
        .get_or_create_stream(stream::Config {
            name: format!("{name}_DEAD"),
            description: Some("Jobs that were given up".into()),
            subjects: vec![format!("{}.dead.>", config.prefix)],
            max_age: DEAD_AGE,
            max_message_size: MAX_RECORD,
            num_replicas: config.replicas,
            ..stream::Config::default()
        })
        .await
        .map_err(|error| missing(&error))?;
    let bucket = format!("{name}_STATE");
    let state = match jetstream.get_key_value(&bucket).await {
        Ok(state) => state,
        Err(_) => jetstream
            .create_key_value(kv::Config {
                bucket,
                description: "Kiln's jobs, images and workers".into(),
                history: 1,
                max_value_size: MAX_RECORD,
                num_replicas: config.replicas,
                ..kv::Config::default()
            })
            .await
            .map_err(|error| missing(&error))?,
    };
    Ok((client, jetstream, state, jobs, dead))
}

/// Largest record in bytes: enough for a request of ten prompts, or a long recipe.
const MAX_RECORD: i32 = 768 << 10;

/// Refuses servers before 2.10: their answers lack fields that the client library needs, which looks like no JetStream.
fn check_version(version: &str) -> Result<()> {
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) if (major, minor) < (2, 10) => {
            Err(FleetError(format!("the queue's nats-server is version {version}; 2.10 or newer is needed")))
        }
        _ => Ok(()),
    }
}

/// Addresses without passwords.
fn redacted(servers: &str) -> String {
    let one = |server: &str| match (server.split_once("://"), server.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        _ => server.to_owned(),
    };
    servers.split(',').map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_tokens_that_differ() {
        assert_eq!(token("klein-4b"), "klein-4b");
        let odd = ["a.b", "a b", "a>b", "", "a*b"].map(token);
        assert!(odd.iter().all(|token| !token.is_empty() && !token.contains(['.', ' ', '>', '*'])));
        assert_eq!(odd.iter().collect::<std::collections::HashSet<_>>().len(), odd.len());
    }

    #[test]
    fn servers_before_2_10_are_refused_by_version() {
        for old in ["2.9.10", "2.9.25", "1.4.1", "2.0.0-beta"] {
            assert!(check_version(old).unwrap_err().to_string().contains(old));
        }
        for new in ["2.10.0", "2.12.1", "3.0.0", "2.11.0-RC.1", "", "custom"] {
            assert!(check_version(new).is_ok(), "{new}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(redacted("nats://a:b@host:1,tls://other"), "nats://host:1, tls://other");
    }
}
