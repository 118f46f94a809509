//! Several machines on one queue: NATS JetStream behind the traits `Ledger` and `Files` of a server.
//!
//! A *gateway* serves the APIs and generates nothing; a *worker* generates and serves no API. Neither keeps state: the
//! queue is a stream of tickets, a bucket of records and a store of files on NATS.
//!
//! | on NATS | holds |
//! |---|---|
//! | stream `KILN_JOBS`, subjects `kiln.jobs.MODEL` | tickets: one for each unfinished job; work-queue retention, explicit acks |
//! | bucket `KILN_STATE` | records, changed by compare-and-set: `job.ID`, `image.ID`, `mark.ID`, `plot.ID`, `input.HASH.CLIENT`, `session.HASH`, `node.ID`, `model.NAME`, `fleet.files` |
//! | object store `KILN_FILES`, or an S3 bucket | inputs and images, named by the SHA-256 of their content |
//! | stream `KILN_DEAD` | dead letters: jobs that killed two workers or failed three times |
//! | subjects `kiln.progress.ID`, `kiln.preview.ID`, `kiln.watch.ID`, `kiln.lora.preview` | messages that may be lost |
//!
//! # Tickets
//!
//! A ticket of model M is the right to run *one* queued job of M, not a particular one: the fair queue chooses a job
//! from the records, so that clients are served fairly across gateways. A ticket carries the whole record of its own
//! job, which is accepted once the stream has acknowledged the ticket; a worker that finds no record of the job creates
//! it from there.
//!
//! A worker claims a job with a ticket by compare-and-set of its record: `running`, its own id, the ticket's sequence.
//! It acknowledges progress at every step, stores the images, writes the job's end to the record, again by
//! compare-and-set and only if the claim is still its own, and acknowledges the ticket last.
//!
//! *No job is lost*: there are at least as many tickets of M as unfinished jobs of M, and every running job names its
//! own ticket. A submission adds the ticket before the record. The end of a job is in the record before its ticket is
//! acknowledged. Otherwise a ticket is removed only if no record is queued, with all records up to the bucket's last
//! one known, and if no running job names it: then each unfinished job has another ticket. A job that is returned is
//! `queued` again before its ticket is available again.
//!
//! *No job is done twice*: a redelivered ticket belongs to the job that names it: the worker takes that job over if its
//! worker is gone, and acknowledges the ticket if the job has ended. A worker that was suspended and believes that a
//! ticket is still its own can't end its job: the record names another worker. Nor can it claim another job with that
//! ticket: after a claim it reads all records up to its own, and returns the job if an earlier one names the ticket.
//! Images are named by job and number, so that one that was generated twice is stored once.

mod admin;
mod announce;
mod catalogue;
mod gateway;
mod housekeeping;
mod link;
mod lora_previews;
mod mirror;
mod objects;
mod records;
mod replica;
mod tickets;
mod worker;

use std::path::PathBuf;
use std::time::Duration;

pub use admin::{FleetJob, QueueAdmin};
pub use announce::{NodeModel, NodeRecord};
pub use gateway::open_gateway;
pub use link::FleetError;
pub use objects::S3Config;
pub use worker::{FleetWorker, open_worker};

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
            replicas: 1,
            s3: None,
            orphan_age: Duration::from_secs(24 * 3600),
            name: String::new(),
        }
    }
}
