//! Webhooks: the server calls an address that a job names when the job has ended.
//!
//! Calls are signed as [Standard Webhooks](https://www.standardwebhooks.com) describes: `webhook-id`,
//! `webhook-timestamp`, and in `webhook-signature` the HMAC-SHA256 of `ID.TIMESTAMP.BODY`. An address is in the database
//! until it was called, so a call survives a restart; the id stays the same when a call is repeated. Clients choose the
//! address, so private ones are refused (see [`address`]), and redirects are not followed.

mod address;
mod signature;

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_base::lock;
use serde_json::{Map, Value};

use crate::http::api::job_view::JobView;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::intake::Intake;
use crate::jobs::store::now;

/// Waiting times before a call is repeated; after the last one the server gives up.
const RETRIES: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(600),
    Duration::from_secs(3600),
];
/// How long a call may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Calls at one time, of all clients.
const MAX_CALLS: usize = 16;
/// Maximum length of an address.
const MAX_URL: usize = 2048;

/// The configuration of webhooks.
#[derive(Clone)]
pub struct WebhookConfig {
    secret: Vec<u8>,
    allow_private: bool,
}

impl std::fmt::Debug for WebhookConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebhookConfig").field("allow_private", &self.allow_private).finish_non_exhaustive()
    }
}

impl WebhookConfig {
    /// A configuration with this secret: text, or `whsec_` and base64. With `allow_private`, addresses inside the
    /// server's own network may be called. Returns an error for a secret that is too short.
    pub fn new(secret: &str, allow_private: bool) -> Result<WebhookConfig, String> {
        const MIN: usize = 16;
        let secret = match secret.strip_prefix("whsec_") {
            Some(base64) => {
                BASE64_STANDARD.decode(base64).map_err(|error| format!("invalid base64: {error}"))?
            }
            None => secret.as_bytes().to_vec(),
        };
        if secret.len() < MIN {
            return Err(format!("expected at least {MIN} bytes, found {}", secret.len()));
        }
        Ok(WebhookConfig { secret, allow_private })
    }
}

/// The webhooks of jobs, and the thread that starts their calls; started with the first call.
pub(crate) struct Webhooks {
    config: Option<WebhookConfig>,
    intake: Intake,
    thread: Mutex<Option<Sender<Message>>>,
    /// The jobs whose calls are not finished: whoever asks again for one is not heard.
    pending: Mutex<HashSet<String>>,
}

impl Webhooks {
    pub(crate) fn new(config: Option<WebhookConfig>, intake: &Intake) -> Webhooks {
        Webhooks { config, intake: intake.clone(), thread: Mutex::default(), pending: Mutex::default() }
    }

    /// Calls the webhook of an ended job, if it has one. Doesn't wait.
    pub(crate) fn call(self: &Arc<Self>, job: &str) {
        if self.config.is_none() || !lock(&self.pending).insert(job.to_owned()) {
            return;
        }
        let mut calls = lock(&self.thread);
        let ended = || Message::Ended(job.to_owned());
        if calls.as_ref().is_some_and(|calls| calls.send(ended()).is_ok()) {
            return;
        }
        let (sender, receiver) = channel();
        let _ = sender.send(ended());
        let (webhooks, results) = (Arc::downgrade(self), sender.clone());
        let thread = std::thread::Builder::new().name("webhooks".into());
        match thread.spawn(move || run(&webhooks, &receiver, &results)) {
            Ok(_) => *calls = Some(sender),
            Err(error) => tracing::error!(%error, "failed to start the webhooks' thread"),
        }
    }

    /// Takes the webhook out of a job's fields and checks it.
    pub(crate) fn of_fields(&self, fields: &mut Map<String, Value>) -> Result<Option<String>, JobError> {
        let invalid = |message: String| JobError::new(ErrorCode::InvalidValue, message).param("webhook");
        let url = match fields.remove("webhook") {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(url)) => url,
            Some(_) => return Err(invalid("webhook must be a URL".into())),
        };
        let Some(config) = &self.config else {
            let message = "this server has no webhooks: they need --webhook-secret";
            return Err(JobError::new(ErrorCode::NotSupported, message).param("webhook"));
        };
        if url.len() > MAX_URL {
            return Err(invalid(format!("webhook is longer than {MAX_URL} bytes")));
        }
        address::check(&url, config.allow_private).map_err(|reason| invalid(format!("webhook: {reason}")))?;
        Ok(Some(url))
    }
}

/// A call that is due at some time.
struct Pending {
    job: String,
    /// Who submitted the job.
    client: String,
    failures: usize,
    due: Instant,
}

/// What the thread that starts calls hears of.
enum Message {
    /// A job has ended.
    Ended(String),
    /// A call of this client has ended; it is due again if it failed.
    Called(String, Option<Pending>),
}

/// Starts calls until the server is gone: one at a time for a client, so that an address that doesn't answer keeps only
/// the calls of its own client waiting.
fn run(webhooks: &Weak<Webhooks>, messages: &Receiver<Message>, sender: &Sender<Message>) {
    let (mut pending, mut calling) = (Vec::<Pending>::new(), HashSet::new());
    loop {
        let waiting = pending.iter().filter(|call| !calling.contains(&call.client));
        let next = waiting.map(|call| call.due).min().filter(|_| calling.len() < MAX_CALLS);
        // Look up now and then whether the server is still there.
        let wait = next.map_or(TIMEOUT, |due| due.saturating_duration_since(Instant::now()).min(TIMEOUT));
        let message = messages.recv_timeout(wait);
        let Some(webhooks) = webhooks.upgrade() else { return };
        match message {
            Ok(Message::Ended(job)) => {
                let client = webhooks.intake.store.client_of(&job).ok().flatten().unwrap_or_default();
                pending.push(Pending { job, client, failures: 0, due: Instant::now() });
            }
            Ok(Message::Called(client, again)) => {
                calling.remove(&client);
                pending.extend(again);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let may_start = |call: &mut Pending| {
            call.due <= Instant::now() && calling.len() < MAX_CALLS && calling.insert(call.client.clone())
        };
        let due: Vec<Pending> = pending.extract_if(.., may_start).collect();
        for call in due {
            start(&webhooks, call, sender.clone());
        }
    }
}

/// Tries a call on a thread of its own.
fn start(webhooks: &Arc<Webhooks>, call: Pending, sender: Sender<Message>) {
    let (calls, client, job) = (Arc::clone(webhooks), call.client.clone(), call.job.clone());
    let calling = move || {
        let again = attempt(&calls, call);
        drop(calls);
        let _ = sender.send(Message::Called(client, again));
    };
    if let Err(error) = std::thread::Builder::new().name("webhook".into()).spawn(calling) {
        lock(&webhooks.pending).remove(&job);
        tracing::error!(%error, "failed to start a thread for a webhook; it is called at the next start");
    }
}

/// Tries a call; returns it if it must be repeated.
fn attempt(webhooks: &Webhooks, call: Pending) -> Option<Pending> {
    let Pending { job, client, failures, .. } = call;
    match deliver(webhooks, &job) {
        Ok(false) => {
            lock(&webhooks.pending).remove(&job);
            return None;
        }
        Ok(true) => tracing::info!(job, "webhook called"),
        Err(reason) => match RETRIES.get(failures) {
            Some(wait) => {
                tracing::warn!(job, reason, "webhook failed; trying again");
                return Some(Pending { job, client, failures: failures + 1, due: Instant::now() + *wait });
            }
            None => tracing::error!(job, reason, "webhook failed; giving up"),
        },
    }
    match webhooks.intake.keeping.remove_webhook(&job) {
        Ok(()) => drop(lock(&webhooks.pending).remove(&job)),
        // It stays pending: it must not be called again for this.
        Err(error) => tracing::error!(job, %error, "failed to record that a webhook was called"),
    }
    None
}

/// Calls the webhook of a job; returns whether it has one.
fn deliver(webhooks: &Webhooks, job: &str) -> Result<bool, String> {
    let (Some(config), jobs) = (&webhooks.config, webhooks.intake.jobs()) else { return Ok(false) };
    let Some(url) = jobs.store.webhook(job).map_err(|error| error.to_string())? else { return Ok(false) };
    let view = JobView::stored(jobs, job).map_err(|error| error.body().detail)?;
    let body = serde_json::json!({ "type": "job.ended", "timestamp": now(), "data": view }).to_string();
    let (id, timestamp) = (format!("msg_{job}"), (now() / 1000).to_string());
    let signature = signature::sign(&config.secret, &id, &timestamp, &body);
    let agent = address::agent(config.allow_private, TIMEOUT);
    let call = agent
        .post(&url)
        .header("content-type", "application/json")
        .header("user-agent", concat!("Kiln/", env!("CARGO_PKG_VERSION")))
        .header("webhook-id", &id)
        .header("webhook-timestamp", &timestamp)
        .header("webhook-signature", &signature);
    let response = call.send(body).map_err(|error| error.to_string())?;
    let status = response.status();
    if status.is_success() { Ok(true) } else { Err(format!("the address answered {status}")) }
}
