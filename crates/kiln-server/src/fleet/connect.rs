//! Connecting to NATS: how to log in, the streams and the bucket of a fleet, and patience with servers that don't answer.

use std::time::{Duration, Instant};

use async_nats::jetstream::context::{GetStreamError, GetStreamErrorKind};
use async_nats::jetstream::stream::{self, RetentionPolicy};
use async_nats::jetstream::{self, ErrorCode, kv};
use async_nats::{Client, ConnectOptions, Event};

use super::config::FleetConfig;
use super::error::{FleetError, Result, failed};

/// How long one try may take.
pub(super) const TIMEOUT: Duration = Duration::from_secs(4);
/// How long a worker retries a call, and anybody the first connection.
pub(super) const PATIENCE: Duration = Duration::from_secs(25);
/// Repeated submissions within this time are one job, whatever became of the answers.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(600);
/// Dead letters are kept this long.
const DEAD_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

pub(super) type Opened = (Client, jetstream::Context, kv::Store, stream::Stream, stream::Stream);

/// Connects, and creates what is missing on the servers.
pub(super) async fn connect(config: &FleetConfig) -> Result<Opened> {
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
pub(super) const MAX_RECORD: i32 = 768 << 10;

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
                if started.elapsed() < PATIENCE
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
        Err(error) if is_missing(&error) => {}
        Err(error) => return Err(gone(&error)),
    }
    jetstream.get_or_create_stream(config).await.map_err(|error| gone(&error))?;
    tracing::error!(stream = name, "a stream of the queue was gone; it was created again");
    Ok(())
}

/// Whether a stream does not exist.
pub(super) fn is_missing(error: &GetStreamError) -> bool {
    matches!(error.kind(), GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

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
