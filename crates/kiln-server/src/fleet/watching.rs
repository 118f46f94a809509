//! What passes between watchers of a job at a gateway and its worker: progress and previews, and what they ask for.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt;
use kiln_engine::Progress;

use super::changes::cancel;
use super::link::Link;
use super::messages::ProgressMessage;
use crate::Server;
use crate::jobs::live::{LiveJob, Preview, WatchRequest};

/// Shows what workers report about running jobs.
pub(super) fn follow(server: &Server, link: &Arc<Link>) {
    for kind in ["progress", "preview"] {
        let (client, subject, server) = (link.client.clone(), link.subject(kind, "*"), server.downgrade());
        link.handle().spawn(async move {
            let Ok(mut messages) = client.subscribe(subject).await else { return };
            while let Some(message) = messages.next().await {
                let Some(server) = server.upgrade() else { return };
                let id = message.subject.rsplit('.').next().unwrap_or_default();
                let Some(live) = server.jobs().live(id) else { continue };
                match kind {
                    "progress" => show_progress(&live, &message.payload),
                    _ => show_preview(&server, &live, &message),
                }
            }
        });
    }
}

/// Tells a job's worker what its watchers ask for: previews, or a stop at the next one.
pub(super) fn connect(live: &LiveJob, link: &Arc<Link>) {
    let (id, link) = (live.id.clone(), Arc::downgrade(link));
    live.set_remote(move |watch_request| {
        let Some(link) = link.upgrade() else { return };
        let id = id.clone();
        link.handle().clone().spawn(async move {
            match watch_request {
                WatchRequest::Previews => {
                    drop(link.client.publish(link.subject("watch", &id), Bytes::new()).await)
                }
                WatchRequest::StopAtPreview => drop(cancel(&link, &id, true).await),
            }
        });
    });
}

fn show_progress(live: &LiveJob, payload: &[u8]) {
    let Ok(message) = serde_json::from_slice::<ProgressMessage>(payload) else { return };
    let fraction = message.progress.fraction;
    let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { 0.0 };
    let progress = Progress { fraction, ..message.progress };
    if live.state().is_final() {
        return;
    }
    live.change(|s| {
        (s.progress, s.time_left, s.notes) = (progress, message.time_left, message.notes);
    });
}

fn show_preview(server: &Server, live: &LiveJob, message: &async_nats::Message) {
    /// Most bytes of a preview, which has an eighth of the image's width and height.
    const MAX: usize = 4 << 20;
    if server.config.check.is_some() || message.payload.len() > MAX || live.state().is_final() {
        return;
    }
    let number = message.headers.as_ref().and_then(|headers| headers.get("number"));
    let number = number.and_then(|number| number.as_str().parse().ok()).unwrap_or(1);
    // Before it is decoded: a small file may unpack to a large image.
    let small = kiln_image::decoding_bytes("preview", &message.payload).is_ok_and(|bytes| bytes < 64 << 20);
    if small && let Ok(image) = kiln_image::from_bytes("preview", &message.payload) {
        live.change(|s| s.preview = Some(Arc::new(Preview { number, image })));
    }
}
