//! Server-sent events: streams the progress of a job or a training.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::timeout;

use super::response;
use crate::jobs::Jobs;

/// Interval of comments on a quiet stream; proxies close connections that look dead.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Formats an event.
pub(crate) fn event(name: &str, data: &impl Serialize) -> Bytes {
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n").into()
}

/// Formats an event with an id, which a client that connects again sends as `Last-Event-ID`.
pub(crate) fn event_with_id(name: &str, id: impl std::fmt::Display, data: &impl Serialize) -> Bytes {
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\nid: {id}\ndata: {data}\n\n").into()
}

/// Tells the client how many milliseconds to wait before it connects again.
pub(crate) const RETRY: &[u8] = b"retry: 2000\n\n";

/// Turns snapshots into events.
pub(crate) trait EventSource: Send + 'static {
    /// What is streamed: the state of a job or a training.
    type Snapshot: Clone + Send + Sync + 'static;

    /// Returns the events for a new snapshot, and whether they are the last ones. `closing`: the server is stopping.
    fn events(&mut self, snapshot: &Self::Snapshot, closing: bool) -> (Vec<Bytes>, bool);
}

struct EventStream<T: EventSource> {
    watch: watch::Receiver<T::Snapshot>,
    closing: watch::Receiver<bool>,
    /// Away while it makes events.
    source: Option<T>,
    ready: VecDeque<Bytes>,
    ended: bool,
    first: bool,
}

/// Streams events until the last one. A slow reader skips snapshots; nothing piles up.
pub(crate) fn stream_events<T: EventSource>(
    jobs: &Jobs,
    watch: watch::Receiver<T::Snapshot>,
    source: T,
) -> Response {
    let closing = jobs.closing.subscribe();
    let source = Some(source);
    let state = EventStream { watch, closing, source, ready: VecDeque::new(), ended: false, first: true };
    let events = stream::unfold(state, |mut state| async move {
        let event = next(&mut state).await?;
        Some((Ok::<_, Infallible>(event), state))
    });
    let mut response = response(StatusCode::OK, "text/event-stream", Bytes::new());
    *response.body_mut() = Body::from_stream(events);
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn next<T: EventSource>(state: &mut EventStream<T>) -> Option<Bytes> {
    loop {
        if let Some(event) = state.ready.pop_front() {
            return Some(event);
        }
        if state.ended {
            return None;
        }
        if !std::mem::take(&mut state.first) {
            let change = async {
                tokio::select! {
                    changed = state.watch.changed() => changed.is_ok(),
                    _ = state.closing.changed() => true,
                }
            };
            match timeout(HEARTBEAT, change).await {
                Ok(true) => {}
                // What is streamed was dropped: its last snapshot is the end.
                Ok(false) => state.ended = true,
                Err(_) => return Some(Bytes::from_static(b":\n\n")),
            }
        }
        let snapshot = state.watch.borrow_and_update().clone();
        let closing = *state.closing.borrow_and_update();
        // Encoding a preview takes long enough to keep other requests waiting.
        let mut source = state.source.take()?;
        let make = move || {
            let made = source.events(&snapshot, closing);
            (source, made)
        };
        let (source, (events, last)) = tokio::task::spawn_blocking(make).await.ok()?;
        state.source = Some(source);
        state.ready.extend(events);
        state.ended |= last;
    }
}
