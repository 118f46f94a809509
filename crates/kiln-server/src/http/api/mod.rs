//! The HTTP APIs: routes, request parsing and responses.

pub(crate) mod a1111;
mod attached;
pub(crate) mod body;
pub(crate) mod caller;
mod conditional;
mod downloads;
pub(crate) mod error;
mod extract;
pub(crate) mod fields;
mod file;
mod gallery;
pub(crate) mod image_view;
mod images;
mod inputs;
mod job_events;
pub(crate) mod job_view;
mod jobs;
mod loras;
mod marks;
mod multipart;
mod openai;
#[cfg(feature = "schema")]
mod openapi;
pub(crate) mod origin;
mod plots;
mod prompts;
mod queue;
mod recipes;
mod response;
pub(crate) mod router;
mod sse;
mod status;
mod training_events;
mod trainings;

pub(crate) use attached::{reply, run_blocking, submit_attached, wait_until_ended};
pub(crate) use caller::Peer;
pub(crate) use extract::{Path, Query, checked_limit};
pub(crate) use file::bytes_response;
pub(crate) use response::{cached_while_valid, immutable, json, response, with_location};
#[cfg(feature = "schema")]
pub use router::openapi;
pub use router::router;

pub(crate) use crate::jobs::caller::Caller;
