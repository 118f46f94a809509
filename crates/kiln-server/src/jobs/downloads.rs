//! Downloads of models, one at a time, with progress.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use serde::Serialize;

use crate::jobs::Jobs;
use crate::jobs::error::{ErrorCode, JobError};

/// The state of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub(crate) enum DownloadState {
    /// In progress.
    Running,
    /// Complete: requests can name the model.
    Done,
    /// Ended with an error.
    Failed,
    /// Cancelled; the next download of the model resumes it.
    Cancelled,
}

/// A download of a model.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct Download {
    /// The model's name.
    model: String,
    /// `running`, `done`, `failed` or `cancelled`.
    status: DownloadState,
    /// Bytes that are there.
    bytes: u64,
    /// Total bytes; 0 until known.
    total: u64,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip)]
    cancelled: bool,
}

/// The downloads since the start of the server, by model.
#[derive(Default)]
pub(crate) struct Downloads(Mutex<BTreeMap<String, Download>>);

impl Downloads {
    pub(crate) fn all(&self) -> Vec<Download> {
        lock(&self.0).values().cloned().collect()
    }

    /// Adds a download; fails with the name of the model that is being downloaded.
    fn begin(&self, model: &str) -> Result<(), String> {
        let mut all = lock(&self.0);
        if let Some(running) = all.values().find(|download| download.status == DownloadState::Running) {
            return Err(running.model.clone());
        }
        let status = DownloadState::Running;
        let download =
            Download { model: model.into(), status, bytes: 0, total: 0, error: None, cancelled: false };
        all.insert(model.into(), download);
        Ok(())
    }

    /// Records progress; returns whether to continue.
    fn progress(&self, model: &str, bytes: u64, total: u64) -> bool {
        lock(&self.0).get_mut(model).is_some_and(|download| {
            (download.bytes, download.total) = (bytes, total);
            !download.cancelled
        })
    }

    fn end(&self, model: &str, result: Result<(), JobError>) {
        if let Some(download) = lock(&self.0).get_mut(model) {
            (download.status, download.error) = match result {
                Ok(()) => (DownloadState::Done, None),
                Err(error) if error.is_cancelled() => (DownloadState::Cancelled, None),
                Err(error) => (DownloadState::Failed, Some(error.message)),
            };
        }
    }

    /// Asks a running download to stop; returns whether there is one.
    pub(crate) fn cancel(&self, model: &str) -> bool {
        let mut all = lock(&self.0);
        let running = all.get_mut(model).filter(|download| download.status == DownloadState::Running);
        running.map(|download| download.cancelled = true).is_some()
    }

    /// Starts to download a model on a thread of its own; fails with the name of one that is being downloaded.
    pub(crate) fn start(self: &Arc<Self>, jobs: &Jobs, model: &str) -> Result<(), String> {
        self.begin(model)?;
        tracing::info!(model, "download started");
        let (downloads, jobs, name) = (Arc::clone(self), jobs.clone(), model.to_owned());
        let run = move || {
            let result =
                jobs.catalogue.download(&name, &mut |bytes, total| downloads.progress(&name, bytes, total));
            let error = result.as_ref().err().map(|error| error.message.clone());
            tracing::info!(model = name, error, "download ended");
            downloads.end(&name, result);
        };
        if let Err(error) = std::thread::Builder::new().name("download".into()).spawn(run) {
            self.end(model, Err(JobError::new(ErrorCode::DownloadFailed, error.to_string())));
        }
        Ok(())
    }
}
