//! The configuration of a fleet.

use std::path::PathBuf;
use std::time::Duration;

use super::rules::GiveUp;

/// How to reach the queue.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// The servers: `nats://HOST:PORT` or `tls://HOST:PORT`, with user and password or a token if they need one.
    pub servers: Vec<String>,
    /// Prefix of all names on the servers; lower-case letters, digits, `-` and `_`.
    pub prefix: String,
    /// File with credentials (a JWT and its seed), as `nsc` writes it.
    pub credentials: Option<PathBuf>,
    /// File with the seed of an NKey.
    pub nkey: Option<PathBuf>,
    /// Certificate authority of the servers, as a PEM file.
    pub authority: Option<PathBuf>,
    /// Client certificate and private key of this process, as PEM files.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// How long a worker may be silent before its job goes to another one.
    pub ack_wait: Duration,
    /// When a job is given up.
    pub give_up: GiveUp,
    /// Replicas of every stream and bucket, on a cluster of NATS servers.
    pub replicas: usize,
    /// A bucket for inputs and images, in place of the NATS servers; the same for the whole fleet.
    pub s3: Option<S3Config>,
    /// Files that no record names are deleted at this age.
    pub orphan_age: Duration,
    /// Name of this process in lists and logs.
    pub name: String,
}

impl FleetConfig {
    /// The default configuration with these servers.
    pub fn new(servers: Vec<String>) -> FleetConfig {
        FleetConfig {
            servers,
            prefix: "kiln".into(),
            credentials: None,
            nkey: None,
            authority: None,
            certificate: None,
            ack_wait: Duration::from_secs(30),
            give_up: GiveUp::default(),
            replicas: 1,
            s3: None,
            orphan_age: Duration::from_secs(24 * 3600),
            name: String::new(),
        }
    }
}

/// A bucket of an S3-compatible service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Config {
    /// `s3://BUCKET`, or `s3://BUCKET/PREFIX`.
    pub url: String,
    /// Settings under the names of the AWS tools' variables: `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`.
    pub settings: Vec<(String, String)>,
}

impl S3Config {
    /// A bucket with the settings from the environment.
    pub fn from_env(url: &str) -> S3Config {
        let is_setting = |(name, _): &(String, String)| name.starts_with("AWS_");
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        S3Config { url: url.to_owned(), settings: variables.filter(is_setting).collect() }
    }
}
