//! Server-sent events of a job: progress, previews, images and the end. A client that connects again gets what it missed.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use kiln_engine::Progress;
use kiln_image::Encoding;
use serde::{Deserialize, Serialize};

use super::error::ApiError;
use super::image_view::ImageView;
use super::job_view::JobView;
use super::sse::{EventSource, RETRY, event_with_id, stream_events};
use super::{Caller, Path, Query, response};
use crate::jobs::Jobs;
use crate::jobs::live::{JobSnapshot, LiveJob, Preview, PreviewGuard};

/// The parameters of a job's event stream.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub(crate) struct EventParams {
    /// Whether to send `preview` events; false by default.
    previews: Option<bool>,
}

/// Streams server-sent events until the job ends: `progress`, `image`, on request `preview`, and finally `end`.
///
/// With the header `Last-Event-ID` the stream continues after that event; after `end` the response is 204.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/jobs/{id}/events", tag = "jobs", params(("id" = String, Path), EventParams), responses(
    (status = 200, description = "Events", content_type = "text/event-stream"),
    (status = 204, description = "The client has seen the end"),
)))]
pub(crate) async fn events(
    State(jobs): State<Jobs>,
    caller: Caller,
    Path(id): Path<String>,
    Query(params): Query<EventParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()).and_then(EventId::parse);
    if last.as_ref().is_some_and(|last| last.ended) {
        return Ok(response(StatusCode::NO_CONTENT, "text/event-stream", Bytes::new()));
    }
    let Some(live) = jobs.live(&id).filter(|live| caller.sees(&live.client)) else {
        let view = JobView::load(&jobs, id, caller).await?;
        return Ok(ended(&view, last));
    };
    let preview_guard = (params.previews == Some(true)).then(|| live.watch_previews());
    let watch = live.watch();
    let id = last.unwrap_or_default();
    let source = JobEvents { jobs: jobs.clone(), live, preview_guard, last_preview: 0, started: false, id };
    Ok(stream_events(&jobs, watch, source))
}

/// The events of a job that has ended: the images that the client missed, if it knows of any, and the end.
fn ended(view: &JobView, last: Option<EventId>) -> Response {
    let seen = last.as_ref().map_or(usize::MAX, |last| last.images);
    let mut id = last.unwrap_or_default();
    let mut events = RETRY.to_vec();
    for image in view.images.iter().skip(seen) {
        events.extend(event_with_id("image", id.next_image(), image));
    }
    events.extend(event_with_id("end", id.end(), view));
    let mut response = response(StatusCode::OK, "text/event-stream", events.into());
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The id of an event: the number of images sent so far and a sequence number, `2-17`; of the last one `2-end`.
#[derive(Clone, Debug, Default)]
struct EventId {
    images: usize,
    sequence: u64,
    ended: bool,
}

impl EventId {
    fn parse(text: &str) -> Option<EventId> {
        let (images, sequence) = text.split_once('-')?;
        let ended = sequence == "end";
        let sequence = if ended { 0 } else { sequence.parse().ok()? };
        Some(EventId { images: images.parse().ok()?, sequence, ended })
    }

    fn next(&mut self) -> String {
        self.sequence = self.sequence.wrapping_add(1);
        format!("{}-{}", self.images, self.sequence)
    }

    fn next_image(&mut self) -> String {
        self.images += 1;
        self.next()
    }

    fn end(&self) -> String {
        format!("{}-end", self.images)
    }
}

/// The events of a job, for one client.
struct JobEvents {
    jobs: Jobs,
    live: Arc<LiveJob>,
    preview_guard: Option<PreviewGuard>,
    /// Number of the last preview sent.
    last_preview: u32,
    /// Whether anything was sent on this connection.
    started: bool,
    /// The last event sent, on this connection or an earlier one.
    id: EventId,
}

/// An intermediate image.
#[derive(Serialize)]
struct PreviewEvent {
    number: u32,
    step: u32,
    /// A small JPEG as a data URL.
    image: String,
}

impl JobEvents {
    fn preview(&mut self, preview: &Preview, progress: &Progress) -> Option<Bytes> {
        self.last_preview = preview.number;
        let encoding = Encoding { quality: Some(80), ..kiln_image::Format::Jpeg.into() };
        let bytes = self.jobs.encode_preview(&preview.image, encoding, &self.live.request).ok()?;
        let image = format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(bytes));
        let data = PreviewEvent { number: progress.image, step: progress.step, image };
        Some(event_with_id("preview", self.id.next(), &data))
    }
}

impl EventSource for JobEvents {
    type Snapshot = JobSnapshot;

    fn events(&mut self, snapshot: &JobSnapshot, closing: bool) -> (Vec<Bytes>, bool) {
        let view = JobView::from_live(&self.jobs, &self.live, snapshot);
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.started, true) {
            events.push(Bytes::from_static(RETRY));
        }
        // A job that runs again after a panic starts from its first image.
        self.id.images = self.id.images.min(snapshot.images.len());
        for image in snapshot.images.iter().skip(self.id.images) {
            events.push(event_with_id("image", self.id.next_image(), &ImageView::from(image.row.clone())));
        }
        let ended = snapshot.state.is_final();
        if ended || (closing && snapshot.error.is_some()) {
            // A job that waits for the next start goes on there: its client must connect again.
            let id = if ended { self.id.end() } else { self.id.next() };
            events.push(event_with_id("end", id, &view));
            return (events, true);
        }
        events.push(event_with_id("progress", self.id.next(), &view));
        let preview = snapshot.preview.as_deref();
        let new = preview.filter(|p| self.preview_guard.is_some() && p.number != self.last_preview);
        events.extend(new.and_then(|preview| self.preview(preview, &snapshot.progress)));
        (events, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_was_written() {
        let mut id = EventId::default();
        assert_eq!((id.next(), id.next_image(), id.end()), ("0-1".into(), "1-2".into(), "1-end".into()));
        let read = EventId::parse("3-17").unwrap();
        assert_eq!((read.images, read.sequence, read.ended), (3, 17, false));
        assert!(EventId::parse("3-end").unwrap().ended);
        for wrong in ["", "3", "-", "a-1", "1-a"] {
            assert!(EventId::parse(wrong).is_none(), "{wrong}");
        }
    }
}
