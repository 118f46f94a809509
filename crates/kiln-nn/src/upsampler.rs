//! Prompt upsampling: a language model rewrites a prompt to a more detailed one, for an edit with the images before its eyes.
//!
//! ```text
//! prompt ──conversation──▶ ids ──embeddings──▶ ┐
//! images ──vision tower──▶ embeddings ─────────┴─▶ language model, token by token ──▶ new prompt
//! ```
//! The rewritten prompt is then encoded like a typed one.

use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Vars;

use crate::language_model::{LanguageModel, Sampler, Sampling};
use crate::tokenizer::{Conversation, PromptTokenizer};
use crate::vision::{self, Patches, VisionTower};
use crate::{Error, ResidencyPlan, Result, text_encoder};

/// Largest number of tokens of a rewritten prompt.
pub const MAX_NEW_TOKENS: usize = 512;

/// A language model that rewrites prompts, on a backend.
pub struct Upsampler<B: Backend> {
    model: LanguageModel<B>,
    vision: Option<VisionTower<B>>,
}

impl<B: Backend> Upsampler<B> {
    /// Loads the whole language model and, with its configuration, the vision tower; activations are `dtype`.
    pub fn load(
        b: &B,
        vars: &Vars<'_>,
        config: &text_encoder::Config,
        vision: Option<&vision::Config>,
        dtype: DType,
        plan: &ResidencyPlan,
    ) -> Result<Self> {
        let tower = |vision| VisionTower::load(b, vars, vision, config.hidden_size, dtype, plan);
        Ok(Upsampler {
            vision: vision.map(tower).transpose()?,
            model: LanguageModel::load(b, vars, config, dtype, plan)?,
        })
    }

    /// Rewrites a prompt, for an edit of these images. `progress` gets the number of tokens so far, after each one and while
    /// the conversation is read; its error stops the run.
    pub fn rewrite(
        &self,
        b: &B,
        tokenizer: &PromptTokenizer,
        prompt: &str,
        images: Option<&Patches>,
        sampling: Sampling,
        progress: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<String> {
        let conversation = tokenizer.conversation(prompt, images.map(Patches::token_grid))?;
        let ids = self.answer(b, &conversation, images, sampling, MAX_NEW_TOKENS, progress)?;
        Ok(tokenizer.answer(&ids))
    }

    /// The tokens that continue a conversation, without the end: at most `max_tokens`.
    pub fn answer(
        &self,
        b: &B,
        conversation: &Conversation,
        images: Option<&Patches>,
        sampling: Sampling,
        max_tokens: usize,
        progress: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<u32>> {
        let (mut sampler, mut ids) = (Sampler::new(sampling), Vec::new());
        let embeddings = self.embed(b, conversation, images)?;
        let (mut text, mut logits) = self.model.start(b, &embeddings, &mut || progress(0))?;
        while ids.len() < max_tokens {
            let id = sampler.choose(&logits);
            if id == conversation.end {
                break;
            }
            ids.push(id);
            progress(ids.len())?;
            if ids.len() < max_tokens {
                logits = self.model.next(b, &mut text, id)?;
            }
        }
        Ok(ids)
    }

    /// The embeddings of a conversation, in which those of the images take the places of their tokens.
    pub fn embed(&self, b: &B, conversation: &Conversation, images: Option<&Patches>) -> Result<HostTensor> {
        let text = self.model.embed(&conversation.ids)?;
        let Some(patches) = images else { return Ok(text) };
        let missing = || Error::request("this language model was loaded without its vision tower");
        let seen = b.download(&self.vision.as_ref().ok_or_else(missing)?.forward(b, patches)?)?;
        let dim = text.shape().last();
        let (mut values, seen) = (text.to_f32()?.into_owned(), seen.to_f32()?);
        let places = conversation.ids.iter().zip(values.chunks_exact_mut(dim));
        let places: Vec<_> = places.filter(|(id, _)| **id == conversation.image).collect();
        if places.len() * dim != seen.len() {
            let (places, images) = (places.len(), seen.len() / dim);
            return Err(Error::request(format!("{images} image tokens don't fit {places} places")));
        }
        for ((_, place), row) in places.into_iter().zip(seen.chunks_exact(dim)) {
            place.copy_from_slice(row);
        }
        Ok(HostTensor::from_f32([conversation.ids.len(), dim], values)?)
    }

    /// The language model.
    pub fn language_model(&self) -> &LanguageModel<B> {
        &self.model
    }
}
