//! Models that could not be loaded on a worker: it does not announce them, and takes no jobs of them.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kiln_base::lock;

/// After this time a model is tried again: its files may be whole by now.
const RETRY: Duration = Duration::from_secs(60);

/// The models that were withdrawn: when, and why.
#[derive(Default)]
pub(super) struct Withdrawn(Mutex<HashMap<String, (Instant, String)>>);

impl Withdrawn {
    pub(super) fn insert(&self, model: &str, reason: &str) {
        tracing::error!(model, reason, "a model can't be loaded: its jobs are left to other workers");
        lock(&self.0).insert(model.to_owned(), (Instant::now(), reason.to_owned()));
    }

    /// The withdrawn models, each with the reason.
    pub(super) fn list(&self) -> Vec<(String, String)> {
        let mut withdrawn = lock(&self.0);
        withdrawn.retain(|_, (since, _)| since.elapsed() < RETRY);
        let mut list: Vec<_> =
            withdrawn.iter().map(|(model, (_, reason))| (model.clone(), reason.clone())).collect();
        list.sort();
        list
    }
}
