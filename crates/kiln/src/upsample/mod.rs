//! Prompt upsampling: by a Mistral on this machine, or by a chat service.

mod chat;
#[cfg(test)]
mod hostile;

use kiln_engine::upsample::PromptRewriter;
use kiln_engine::{InputResolver, Model, Request, Settings};

use crate::args::UpsampleSource;
use crate::error::CliError;
pub use chat::ChatService;

/// What rewrites prompts.
pub enum Upsampling {
    /// A language model on this machine.
    Local(Box<PromptRewriter>),
    /// A service.
    Service(ChatService),
}

impl Upsampling {
    /// Checks what the options name, or else the text encoder of `model`. Reads no weights. `with_images`: requests have
    /// reference images.
    pub fn new(source: &UpsampleSource, model: &Model, with_images: bool) -> Result<Upsampling, CliError> {
        let named = source.upsample_model.as_deref();
        match &source.upsample_url {
            Some(url) => {
                let name = named.map(|name| name.display().to_string());
                Ok(Upsampling::Service(ChatService::new(url, name)?))
            }
            None => Ok(Upsampling::Local(Box::new(PromptRewriter::open(model, named, with_images)?))),
        }
    }

    /// Rewrites the prompts of requests, which become their original prompts. `go_on` is asked again and again, and stops
    /// the run by returning `false`.
    pub fn rewrite(
        &self,
        requests: &mut [Request],
        temperature: f32,
        inputs: &dyn InputResolver,
        settings: &Settings,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), CliError> {
        match self {
            Upsampling::Local(rewriter) => {
                Ok(rewriter.rewrite(requests, temperature, inputs, settings, go_on)?)
            }
            Upsampling::Service(service) => requests
                .iter_mut()
                .try_for_each(|request| service.rewrite(request, temperature, inputs, go_on)),
        }
    }
}
