//! Rewriting prompts for the server's clients, one at a time.

use std::path::Path;
use std::sync::Mutex;

use kiln_engine::Settings;
use kiln_engine::upsample::PromptRewriter;
use kiln_server::{JobError, JobInputs};

use super::catalogue::ModelCatalogue;
use super::generator::{JobInputResolver, job_error};
use crate::args::{ServeArgs, UpsampleSource};
use crate::error::CliError;
use crate::upsample::{ChatService, Upsampling};

/// What rewrites prompts, and with which settings.
#[derive(Default)]
pub struct PromptUpsampling {
    source: UpsampleSource,
    settings: Settings,
    /// Held while a prompt is rewritten: the language model takes all the memory that there is.
    running: Mutex<()>,
}

impl PromptUpsampling {
    /// Checks the address of a service, so that a wrong one is an error at startup.
    pub fn new(args: &ServeArgs) -> Result<PromptUpsampling, CliError> {
        let source = args.upsample.clone();
        source.upsample_url.as_deref().map(|url| ChatService::new(url, None)).transpose()?;
        Ok(PromptUpsampling { source, settings: args.machine.settings()?, running: Mutex::new(()) })
    }

    /// Rewrites the first prompt of a request.
    pub fn rewrite(
        &self,
        models: &ModelCatalogue,
        job: &JobInputs<'_>,
        temperature: f32,
    ) -> Result<String, JobError> {
        let Ok(_running) = self.running.try_lock() else {
            return Err(JobError::server("busy", "another prompt is being rewritten; try again later"));
        };
        let mut request = job.request().clone();
        let model = models.open(request.model.as_deref().and_then(Path::to_str))?;
        let inputs = JobInputResolver { job, models, default_vae: None };
        let with_images = !request.references.is_empty();
        if self.source.upsample_url.is_none() {
            let rewriter = PromptRewriter::open(&model, self.source.upsample_model.as_deref(), with_images);
            let rewritten = rewriter.and_then(|rewriter| {
                rewriter.rewrite(&mut request, temperature, &inputs, &self.settings, &mut |_, _| true)
            });
            rewritten.map_err(|error| job_error(&error))?;
        } else {
            let upsampling = Upsampling::new(&self.source, &model, with_images);
            let rewritten = upsampling.and_then(|upsampling| {
                upsampling.rewrite(&mut request, temperature, &inputs, &self.settings, &mut |_, _| true)
            });
            rewritten.map_err(|error| {
                // The log has the address and the reason; they are not for clients.
                tracing::error!("{}", error.message);
                JobError::server("upsample_failed", "the chat service did not rewrite the prompt")
            })?;
        }
        request.prompts.into_iter().next().ok_or_else(|| JobError::server("upsample_failed", "no prompt"))
    }
}
