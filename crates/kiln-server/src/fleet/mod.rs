//! Several machines on one queue: NATS JetStream behind the roles of a server (`jobs/roles.rs`) and
//! its `Files`.
//!
//! A *gateway* serves the APIs and generates nothing; a *worker* generates and serves no API. Neither keeps state: the
//! queue is a stream of tickets, a bucket of records and a store of files on NATS.
//!
//! | on NATS | holds |
//! |---|---|
//! | stream `KILN_JOBS`, subjects `kiln.jobs.MODEL` | tickets: at least one for each unfinished job; work-queue retention, explicit acks |
//! | bucket `KILN_STATE` | records, changed by compare-and-set: `job.ID`, `image.ID`, `mark.ID`, `plot.ID`, `input.HASH.CLIENT`, `session.HASH`, `node.ID`, `model.NAME`, `fleet.files`, `fleet.reconciler`; `fence` is written to learn the last revision |
//! | object store `KILN_FILES`, or an S3 bucket | inputs and images, named by the SHA-256 of their content |
//! | stream `KILN_DEAD` | dead letters: jobs that were given up |
//! | subjects `kiln.progress.ID`, `kiln.preview.ID`, `kiln.watch.ID`, `kiln.lora.preview` | messages that may be lost |
//!
//! # Records and tickets
//!
//! The record of a job is the truth about it; tickets only wake workers. A gateway creates the record, and nobody else
//! does; with that the job is accepted. Then it publishes a ticket. A ticket of model M lets a worker claim *one* queued
//! job of M, not a particular one: the fair queue chooses it from the records, so that clients are served fairly across
//! gateways.
//!
//! A worker claims a job by compare-and-set of its record: `running`, its own id, the ticket. It acknowledges progress at
//! every step, stores the images, writes the job's end to the record, again by compare-and-set and only if the claim is
//! still its own, and acknowledges the ticket last. A ticket is named by its sequence and the time at which it was
//! stored: a stream that is created anew numbers its tickets anew.
//!
//! *No job is done twice*: every change of a record names the revision that it was made from, and a job leaves `queued`
//! and `running` only by such a change. A worker that was suspended can't end its job after another one has taken it, and
//! claims none of which an earlier attempt has not ended there.
//!
//! *No job is lost*: a record is `queued`, `running` or final, and
//!
//! 1. a running job whose worker is gone becomes queued again: by a worker that receives its ticket once more, or else
//!    by the reconciler; so does one whose worker lives and does not have it, since the answer to its claim was lost: by
//!    that worker;
//! 2. for every model there are, sooner or later, as many tickets that workers can get as unfinished jobs. A worker
//!    removes a ticket only if its job has ended, or if no job of the model is queued, with all records known that were
//!    written before (it writes a record itself and waits until it sees that). Whatever else becomes of tickets, with
//!    a server that dies, a stream that is deleted or an acknowledgement that comes too late, the reconciler
//!    (`reconcile.rs`) publishes those that are missing.
//!
//! So a queued job stays queued only while no worker with its model is idle, or for as long as loading the model takes, if
//! others have it loaded. Surplus tickets do no harm: the worker that
//! gets one finds no queued job and removes it, and the reconciler removes those of models without unfinished jobs. A
//! ticket is published after its record, so none of a job that is still to come can be among them.
//!
//! *Every webhook is called*: the record holds the address until it was called. The gateway that accepted the job calls
//! it, or the oldest one if that is gone.
//!
//! The decisions are functions without side effects in `rules.rs`; `model.rs` explores every order of submissions, claims,
//! ends, crashes, freezes, lost and doubled tickets with them.

mod admin;
mod announce;
mod bucket;
mod capabilities;
mod catalogue;
mod changes;
mod claimer;
mod config;
mod connect;
mod error;
mod gateway;
mod gateway_health;
mod gateway_records;
mod health;
mod held;
mod housekeeping;
mod link;
mod lora_previews;
mod messages;
mod mirror;
#[cfg(test)]
mod model;
mod objects;
mod probe;
mod reconcile;
mod records;
mod recover;
mod replica;
mod rules;
mod tickets;
mod watching;
mod withdrawn;
mod worker;
mod worker_ledger;

pub use admin::{FleetJob, QueueAdmin};
pub use announce::{NodeModel, NodeRecord};
pub use config::{FleetConfig, S3Config};
pub use error::FleetError;
pub use gateway::open_gateway;
pub use rules::GiveUp;
pub use worker::{FleetWorker, open_worker};
