//! Engines and sessions, observed through the sinks of their tasks, on the repository's tiny checkpoints.

mod caches;
mod not_finite;
mod recording_sink;
mod session;
mod steps;
mod tasks;
mod upscale;
