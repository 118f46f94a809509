//! Rewriting prompts for the server's clients: one at a time with a model on this machine, a few with a service.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use kiln_engine::upsample::{self, PromptRewriter};
use kiln_engine::{InputResolver, Model, Request, Settings};
use kiln_server::{ErrorCode, JobError};

use super::devices::settings_of_first;
use super::errors::job_error;
use crate::args::{MachineArgs, UpsampleSource};
use crate::error::CliError;
use crate::upsample::{ChatService, Upsampling};

/// The number of prompts that a service rewrites at the same time.
const MAX_CONCURRENT: usize = 4;

/// What rewrites prompts, and with which settings.
#[derive(Default)]
pub struct PromptUpsampling {
    source: UpsampleSource,
    settings: Settings,
    /// The number of prompts that are being rewritten.
    running: AtomicUsize,
}

impl PromptUpsampling {
    /// Checks the address of a service or the files of a language model, so that a wrong one is an error at startup.
    pub fn new(source: &UpsampleSource, machine: &MachineArgs) -> Result<PromptUpsampling, CliError> {
        let source = source.clone();
        match (&source.upsample_url, &source.upsample_model) {
            (Some(url), _) => drop(ChatService::new(url, None)?),
            (None, Some(path)) => drop(PromptRewriter::open_file(path, false)?),
            (None, None) => {}
        }
        Ok(PromptUpsampling { source, settings: settings_of_first(machine)?, running: AtomicUsize::new(0) })
    }

    /// Whether the prompts of a model can be rewritten. Reads no weights.
    pub fn is_available(&self, model: &Model) -> bool {
        let own = || upsample::problem(model.text_encoder.as_ref()?).ok();
        self.source.upsample_url.is_some() || self.source.upsample_model.is_some() || own() == Some(None)
    }

    /// Rewrites the first prompt of a request, whose model `open` opens, unless `cancelled` returns true meanwhile.
    pub fn rewrite(
        &self,
        request: &Request,
        open: impl FnOnce() -> Result<Arc<Model>, JobError>,
        inputs: &dyn InputResolver,
        temperature: f32,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<String, JobError> {
        let is_local = self.source.upsample_url.is_none();
        // A language model takes all the memory that there is.
        let Some(_running) = Running::start(&self.running, if is_local { 1 } else { MAX_CONCURRENT }) else {
            return Err(JobError::new(ErrorCode::Busy, "another prompt is being rewritten; try again later"));
        };
        let mut request = request.clone();
        let model = open()?;
        let with_images = !request.references.is_empty();
        let (requests, go_on) = (std::slice::from_mut(&mut request), &mut || !cancelled());
        if is_local {
            let rewriter = PromptRewriter::open(&model, self.source.upsample_model.as_deref(), with_images);
            let rewritten = rewriter
                .and_then(|rewriter| rewriter.rewrite(requests, temperature, inputs, &self.settings, go_on));
            rewritten.map_err(|error| job_error(&error))?;
        } else {
            let upsampling = Upsampling::new(&self.source, &model, with_images);
            let rewritten = upsampling.and_then(|upsampling| {
                upsampling.rewrite(requests, temperature, inputs, &self.settings, go_on)
            });
            rewritten.map_err(|error| {
                if cancelled() {
                    return JobError::cancelled();
                }
                // The log has the address and the reason; they are not for clients.
                tracing::error!("{}", error.message);
                JobError::new(ErrorCode::UpsampleFailed, "the chat service did not rewrite the prompt")
            })?;
        }
        request
            .prompts
            .into_iter()
            .next()
            .ok_or_else(|| JobError::new(ErrorCode::UpsampleFailed, "no prompt"))
    }
}

/// One of the prompts that are being rewritten.
struct Running<'a>(&'a AtomicUsize);

impl<'a> Running<'a> {
    /// Counts one more; `None` if there are `max` already.
    fn start(count: &'a AtomicUsize, max: usize) -> Option<Running<'a>> {
        let more = |running| (running < max).then_some(running + 1);
        count.fetch_update(SeqCst, SeqCst, more).ok().map(|_| Running(count))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_again_when_a_prompt_is_done() {
        let count = AtomicUsize::new(0);
        let first = Running::start(&count, 2);
        let second = Running::start(&count, 2);
        assert!(first.is_some() && second.is_some() && Running::start(&count, 2).is_none());
        drop(first);
        assert!(Running::start(&count, 2).is_some());
    }
}
