//! Prompts to text tokens, by the text encoder or from the cache.
//!
//! On a cache hit the encoder is not loaded. With the whole encoder on a GPU the cache is not read: encoding 512 tokens takes
//! 6 ms for klein 4B on an H200.

use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_model::text_encoder::TextEncoder;
use kiln_model::tokenizer::Tokens;
use kiln_model::{Event, Observer, ResidencyPlan};
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
        if text.cache.is_none() && text.model.text_encoder.is_some() {
            text.encoder(b, observer)?;
        }
        Ok(text)
    }

    /// Loads the encoder unless all of these texts are cached.
    pub(super) fn prepare<'a>(
        &self,
        b: &B,
        texts: impl Iterator<Item = &'a Tokens>,
        observer: &mut dyn Observer<B>,
    ) -> Result<()> {
        let mut missing = false;
        for tokens in texts {
            missing |= match &self.cache {
                Some(cache) => !cache.contains(&self.key(b, tokens)?),
                None => true,
            };
        }
        if missing { self.encoder(b, observer).map(drop) } else { Ok(()) }
    }

    /// Encodes a text to `[tokens, 3 · hidden]`. Also returns the work of checking and caching the result. `progress` is
    /// the prompt's index and the number of prompts.
    pub(super) fn encode(
        &self,
        b: &B,
        tokens: &Tokens,
        progress: (usize, usize),
        observer: &mut dyn Observer<B>,
    ) -> Result<(B::Tensor, Option<DeferredWork>)> {
        let Some(cache) = self.cache.as_ref().filter(|_| !self.is_fast(b)) else {
            // Checked only if the image is not finite: the check would stall a GPU.
            return Ok((self.encoder(b, observer)?.forward(b, tokens, progress, observer)?, None));
        };
        let key = self.key(b, tokens)?;
        if let Some(text) = cache.get(&key) {
            return Ok((b.upload(&text, self.dtype)?, None));
        }
        let encoded = self.encoder(b, observer)?.forward(b, tokens, progress, observer)?;
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

    fn key(&self, b: &B, tokens: &Tokens) -> Result<Key> {
        let component = self.model.text_encoder.as_ref().ok_or_else(|| self.missing())?;
        let text_dim = component.config.text_dim();
        Ok(Key::new(component.fingerprint()?, &b.numerics(), self.dtype, tokens, text_dim))
    }

    fn missing(&self) -> Error {
        self.model.missing_component(MissingComponent::TextEncoder)
    }

    /// Returns the encoder; loads it on first use.
    fn encoder(&self, b: &B, observer: &mut dyn Observer<B>) -> Result<Arc<TextEncoder<B>>> {
        let mut encoder = lock(&self.encoder);
        if let Some(encoder) = &*encoder {
            return Ok(Arc::clone(encoder));
        }
        let component = self.model.text_encoder.as_ref().ok_or_else(|| self.missing())?;
        observer.event(Event::Loading { component: "text encoder" })?;
        let plan = self
            .residency
            .as_ref()
            .map_or_else(ResidencyPlan::all_on_device, WeightResidency::text_encoder_plan);
        let vars = component.weights()?.root();
        let loaded = TextEncoder::load(b, &vars, &component.config, self.dtype, &plan)?;
        Ok(Arc::clone(encoder.insert(Arc::new(loaded))))
    }
}
