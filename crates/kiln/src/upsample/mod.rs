//! Prompt upsampling: by a Mistral on this machine, or by a chat service.

mod chat;

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

    /// Rewrites the prompts of a request, which become its original prompts. `progress` gets the index of the prompt and
    /// the number of its tokens, and stops the run by returning `false`.
    pub fn rewrite(
        &self,
        request: &mut Request,
        temperature: f32,
        inputs: &dyn InputResolver,
        settings: &Settings,
        progress: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<(), CliError> {
        match self {
            Upsampling::Local(rewriter) => {
                Ok(rewriter.rewrite(request, temperature, inputs, settings, progress)?)
            }
            Upsampling::Service(service) => {
                let images = request.references.iter().map(|file| Ok(inputs.image(&file.path)?.image));
                let images = images.collect::<Result<Vec<_>, CliError>>()?;
                let seed = request.seed.first().copied().unwrap_or(0);
                let mut rewritten = Vec::with_capacity(request.prompts.len());
                for (i, prompt) in request.prompts.iter().enumerate() {
                    if !progress(i, 0) {
                        return Err(CliError::cancelled());
                    }
                    rewritten.push(service.rewrite(
                        prompt,
                        &images,
                        temperature,
                        seed.wrapping_add(i as u64),
                    )?);
                }
                request.original_prompts = std::mem::replace(&mut request.prompts, rewritten);
                Ok(())
            }
        }
    }
}
