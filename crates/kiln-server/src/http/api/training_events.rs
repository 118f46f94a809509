//! Server-sent events of a training: its state with the loss curve, then every step, and the end.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;

use super::Path;
use super::error::ApiError;
use super::sse::{EventSource, RETRY, event, stream_events};
use super::trainings::{Allowed, TrainingView};
use crate::jobs::Jobs;
use crate::jobs::trainings::{Training, TrainingSnapshot, Trainings};

/// Streams server-sent events until the training ends: `state` with the whole loss curve, `progress` with the losses since
/// the last event, and `end`.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/trainings/{id}/events", tag = "trainings", params(("id" = String, Path)), responses((status = 200, description = "Events", content_type = "text/event-stream"))))]
pub(crate) async fn events(
    State(jobs): State<Jobs>,
    allowed: Allowed,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let training = allowed.find(&id)?;
    let watch = training.watch();
    let source =
        TrainingEvents { trainings: allowed.trainings, training, started: false, step: 0, samples: 0 };
    Ok(stream_events(&jobs, watch, source))
}

/// The events of a training, for one client.
struct TrainingEvents {
    trainings: Arc<Trainings>,
    training: Arc<Training>,
    /// Whether anything was sent.
    started: bool,
    /// The last step whose loss was sent.
    step: u64,
    /// Sets of samples that were sent.
    samples: u32,
}

impl EventSource for TrainingEvents {
    type Snapshot = TrainingSnapshot;

    fn events(&mut self, snapshot: &TrainingSnapshot, closing: bool) -> (Vec<Bytes>, bool) {
        let (trainings, training) = (&self.trainings, &self.training);
        let view = TrainingView::new(trainings, training, snapshot);
        let is_last = !snapshot.state.is_active() || closing;
        if is_last {
            return (vec![event("end", &view.with_files(trainings, training))], true);
        }
        // A resumed training starts from its checkpoint again.
        self.step = self.step.min(snapshot.step);
        let losses = training.losses_after(self.step);
        self.step = losses.last().map_or(self.step, |point| point.0);
        if !std::mem::replace(&mut self.started, true) {
            self.samples = snapshot.samples;
            let view = view.with_files(trainings, training);
            return (vec![Bytes::from_static(RETRY), event("state", &view)], false);
        }
        let view = view.with_losses(&losses);
        // Files are read only when there are new ones.
        if snapshot.samples != self.samples {
            self.samples = snapshot.samples;
            let view = view.with_samples(trainings, training);
            return (vec![event("progress", &view)], false);
        }
        (vec![event("progress", &view)], false)
    }
}
