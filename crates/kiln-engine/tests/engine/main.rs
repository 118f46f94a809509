//! Engines and sessions with the sinks of their tasks, on the repository's tiny checkpoints.

mod listener;
mod session;
mod tasks;
