//! Server-sent events: what a job's watchers get while it goes on.

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

use super::answer;
use crate::Server;
use crate::live::Snapshot;

/// A comment is sent so often when there is nothing to tell: connections that look dead are closed on the way.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// One event.
pub(crate) fn event(name: &str, data: &impl Serialize) -> Bytes {
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n").into()
}

/// What is told of each change: events, and whether they are the last ones.
pub(crate) trait Teller: Send + 'static {
    fn tell(&mut self, snapshot: &Snapshot, closing: bool) -> (Vec<Bytes>, bool);
}

struct State<T> {
    watch: watch::Receiver<Snapshot>,
    closing: watch::Receiver<bool>,
    teller: T,
    ready: VecDeque<Bytes>,
    over: bool,
    first: bool,
}

/// Tells of a job until it ends. A reader that is slow misses what came between; nothing piles up.
pub(crate) fn follow<T: Teller>(server: &Server, watch: watch::Receiver<Snapshot>, teller: T) -> Response {
    let closing = server.closing.subscribe();
    let state = State { watch, closing, teller, ready: VecDeque::new(), over: false, first: true };
    let events = stream::unfold(state, |mut state| async move {
        let event = next(&mut state).await?;
        Some((Ok::<_, Infallible>(event), state))
    });
    let mut response = answer(StatusCode::OK, "text/event-stream", Bytes::new());
    *response.body_mut() = Body::from_stream(events);
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn next<T: Teller>(state: &mut State<T>) -> Option<Bytes> {
    loop {
        if let Some(event) = state.ready.pop_front() {
            return Some(event);
        }
        if state.over {
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
                // The job is forgotten: the last we saw is the end.
                Ok(false) => state.over = true,
                Err(_) => return Some(Bytes::from_static(b":\n\n")),
            }
        }
        let snapshot = state.watch.borrow_and_update().clone();
        let closing = *state.closing.borrow_and_update();
        let (events, last) = state.teller.tell(&snapshot, closing);
        state.ready.extend(events);
        state.over |= last;
    }
}
