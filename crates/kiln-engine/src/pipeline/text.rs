//! Prompts to text tokens, by the text encoder or from the cache.
//!
//! On a cache hit the encoder is not loaded. With the whole encoder on a GPU the cache is not read: encoding 512 tokens takes
//! 6 ms for klein 4B on an H200.

use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_nn::text_encoder::TextEncoder;
use kiln_nn::tokenizer::Tokens;
use kiln_nn::{Event, Observer, ResidencyPlan};
use kiln_ops::Backend;
use kiln_tensor::DType;

use super::options::LoadOptions;
use super::output::{DeferredWork, TEXT, check_finite};
use crate::error::{Error, MissingComponent, Result};
use crate::model::Model;
use crate::residency::WeightResidency;
use crate::text_cache::{Key, TextCache};

/// A text encoder that is loaded when a text is not in the cache.
pub(super) struct LazyTextEncoder<B: Backend> {
    model: Arc<Model>,
    dtype: DType,
    residency: Option<WeightResidency>,
    cache: Option<TextCache>,
    encoder: Mutex<Option<Arc<TextEncoder<B>>>>,
}

impl<B: Backend> LazyTextEncoder<B> {
    /// Loads the encoder at once if there is no cache, since every text needs it then.
    pub(super) fn new(
        b: &B,
        model: &Arc<Model>,
        options: &LoadOptions,
        observer: &mut dyn Observer<B>,
    ) -> Result<Self> {
        let (model, encoder) = (Arc::clone(model), Mutex::new(None));
        let LoadOptions { dtype, residency, text_cache: cache, .. } = options.clone();
        let text = LazyTextEncoder { model, dtype, residency, cache, encoder };
        if let (None, Some(component)) = (&text.cache, &text.model.text_encoder) {
            text.encoder(b, component.config.output_layers(), observer)?;
        }
        Ok(text)
    }

    /// Loads the encoder unless these states of all these texts are cached.
    pub(super) fn prepare<'a>(
        &self,
        b: &B,
        texts: impl Iterator<Item = &'a Tokens>,
        states: &[usize],
        observer: &mut dyn Observer<B>,
    ) -> Result<()> {
        let mut missing = false;
        for tokens in texts {
            missing |= match &self.cache {
                Some(cache) => !cache.contains(&self.key(b, cache, tokens, states)?),
                None => true,
            };
        }
        if missing { self.encoder(b, states, observer).map(drop) } else { Ok(()) }
    }

    /// Encodes a text to `[tokens, states · hidden]`. Also returns the work of checking and caching the result. `progress`
    /// is the prompt's index and the number of prompts.
    pub(super) fn encode(
        &self,
        b: &B,
        tokens: &Tokens,
        states: &[usize],
        progress: (usize, usize),
        observer: &mut dyn Observer<B>,
    ) -> Result<(B::Tensor, Option<DeferredWork>)> {
        let Some(cache) = self.cache.as_ref().filter(|_| !self.is_fast(b)) else {
            // Checked only if the image is not finite: the check would stall a GPU.
            let encoder = self.encoder(b, states, observer)?;
            return Ok((encoder.forward(b, tokens, states, progress, observer)?, None));
        };
        let key = self.key(b, cache, tokens, states)?;
        if let Some(text) = cache.get(&key) {
            return Ok((b.upload(&text, self.dtype)?, None));
        }
        let encoder = self.encoder(b, states, observer)?;
        let encoded = encoder.forward(b, tokens, states, progress, observer)?;
        let (cache, text) = (cache.clone(), b.download_async(&encoded)?);
        let put: DeferredWork = Box::new(move || {
            let text = text()?;
            check_finite(TEXT, &text)?;
            let result = cache.put(&key, &text);
            Ok(result.err().map(|error| format!("the encoded text is not cached: {error}")))
        });
        Ok((encoded, Some(put)))
    }

    /// Whether encoding is faster than reading the cache: with the whole encoder on a GPU.
    fn is_fast(&self, b: &B) -> bool {
        let loaded = || lock(&self.encoder).is_some();
        !b.reads_host_weights() && self.residency.is_none() && loaded()
    }

    fn key(&self, b: &B, cache: &TextCache, tokens: &Tokens, states: &[usize]) -> Result<Key> {
        let component = self.model.text_encoder.as_ref().ok_or_else(|| self.missing())?;
        let text_dim = states.len() * component.config.hidden_size;
        let encoder = component.content_key(&cache.hashes())?;
        Ok(Key::new(encoder, &b.numerics(), self.dtype, tokens, states, text_dim))
    }

    fn missing(&self) -> Error {
        self.model.missing_component(MissingComponent::TextEncoder)
    }

    /// Returns the encoder with the layers that these states need. Loads it on first use, and again if it has too few.
    fn encoder(
        &self,
        b: &B,
        states: &[usize],
        observer: &mut dyn Observer<B>,
    ) -> Result<Arc<TextEncoder<B>>> {
        let mut encoder = lock(&self.encoder);
        let needed = states.iter().copied().max().unwrap_or(0);
        if let Some(encoder) = encoder.as_ref().filter(|encoder| encoder.layers() >= needed) {
            return Ok(Arc::clone(encoder));
        }
        // Before the new one is loaded: two may not fit.
        *encoder = None;
        let component = self.model.text_encoder.as_ref().ok_or_else(|| self.missing())?;
        let config = component.config.clone().with_output_layers(states);
        observer.event(Event::Loading { component: "text encoder" })?;
        let plan = self
            .residency
            .as_ref()
            .map_or_else(ResidencyPlan::all_on_device, WeightResidency::text_encoder_plan);
        let vars = component.weights()?.root();
        let loaded = TextEncoder::load(b, &vars, &config, self.dtype, &plan)?;
        Ok(Arc::clone(encoder.insert(Arc::new(loaded))))
    }
}
