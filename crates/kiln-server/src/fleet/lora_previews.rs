//! Previews of LoRAs, which are files of the workers: a gateway asks, and the first worker that has the LoRA answers.

use std::time::Duration;

use futures_util::StreamExt;

use super::link::Link;
use crate::http::api::image_view::shrink;
use crate::jobs::WeakJobs;

/// How long a gateway waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Longest name, in bytes.
const MAX_NAME: usize = 1024;

/// Asks the workers for the preview of a LoRA; blocks.
pub(super) fn ask(link: &Link, name: &str) -> Option<Vec<u8>> {
    let asking = link.client.request(link.subject("lora", "preview"), name.to_owned().into());
    let answer = link.wait(async { tokio::time::timeout(TIMEOUT, asking).await });
    Some(answer.ok()?.ok()?.payload.into())
}

/// Answers the requests of gateways until the server is gone. A worker without the LoRA does not answer.
pub(super) async fn answer(client: async_nats::Client, subject: String, jobs: WeakJobs) {
    let Ok(mut questions) = client.subscribe(subject).await else { return };
    while let Some(question) = questions.next().await {
        let Some(jobs) = jobs.upgrade() else { return };
        let Some(reply) = question.reply.filter(|_| question.payload.len() <= MAX_NAME) else { continue };
        let preview = tokio::task::spawn_blocking(move || {
            let name = std::str::from_utf8(&question.payload).ok()?;
            // Small enough for a message.
            shrink(&jobs, name, &jobs.catalogue.lora_preview(name)?, None).ok()
        });
        if let Ok(Some(preview)) = preview.await {
            let _ = client.publish(reply, preview.into()).await;
        }
    }
}
