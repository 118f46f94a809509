//! The text side of a pipeline: prompts to text tokens, encoded or remembered.

use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_model::text_encoder::TextEncoder;
use kiln_model::tokenizer::Tokens;
use kiln_model::{Event, Observer, ResidencyPlan};
use kiln_ops::Backend;
use kiln_tensor::DType;

use super::options::LoadOptions;
use super::unfinished::{Afterwards, TEXT, finite};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::placement::Placement;
use crate::text_cache::{Key, TextCache};

/// The text encoder, loaded when a text is to be encoded that is not remembered.
pub(super) struct LazyTextEncoder<B: Backend> {
    model: Arc<Model>,
    dtype: DType,
    placement: Option<Placement>,
    cache: Option<TextCache>,
    encoder: Mutex<Option<Arc<TextEncoder<B>>>>,
}

impl<B: Backend> LazyTextEncoder<B> {
    /// With a cache nothing is loaded yet; without one the encoder is needed in any case, and is loaded now.
    pub(super) fn new(
        b: &B,
        model: &Arc<Model>,
        options: &LoadOptions,
        observer: &mut dyn Observer<B>,
    ) -> Result<Self> {
        let (model, encoder) = (Arc::clone(model), Mutex::new(None));
        let LoadOptions { dtype, placement, text_cache: cache, .. } = options.clone();
        let text = LazyTextEncoder { model, dtype, placement, cache, encoder };
        if text.cache.is_none() && text.model.text_encoder.is_some() {
            text.encoder(b, observer)?;
        }
        Ok(text)
    }

    /// Loads the encoder unless all of these texts are remembered.
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

    /// Text tokens `[tokens, 3 · hidden]`, and what is to be done with them afterwards. `place` is the prompt's number and how
    /// many there are, for progress only.
    pub(super) fn encode(
        &self,
        b: &B,
        tokens: &Tokens,
        place: (usize, usize),
        observer: &mut dyn Observer<B>,
    ) -> Result<(B::Tensor, Option<Afterwards>)> {
        let Some(cache) = self.cache.as_ref().filter(|_| !self.is_quick(b)) else {
            // Whether it is finite is asked when the image isn't: the question would keep a GPU waiting.
            return Ok((self.encoder(b, observer)?.forward(b, tokens, place, observer)?, None));
        };
        let key = self.key(b, tokens)?;
        if let Some(text) = cache.get(&key) {
            return Ok((b.upload(&text, self.dtype)?, None));
        }
        let encoded = self.encoder(b, observer)?.forward(b, tokens, place, observer)?;
        let (cache, text) = (cache.clone(), b.download_later(&encoded)?);
        let keep: Afterwards = Box::new(move || {
            let text = text()?;
            finite(TEXT, &text)?;
            let kept = cache.put(&key, &text);
            Ok(kept.err().map(|error| format!("the encoded text is not kept: {error}")))
        });
        Ok((encoded, Some(keep)))
    }

    /// Whether encoding a text takes less time than reading it from the cache: with the encoder on a GPU.
    fn is_quick(&self, b: &B) -> bool {
        let loaded = || lock(&self.encoder).is_some();
        !b.reads_host_weights() && self.placement.is_none() && loaded()
    }

    fn key(&self, b: &B, tokens: &Tokens) -> Result<Key> {
        let part = self.model.text_encoder.as_ref().ok_or_else(|| self.missing())?;
        Ok(Key::new(part.fingerprint()?, &b.numerics(), self.dtype, tokens, part.config.text_dim()))
    }

    fn missing(&self) -> Error {
        self.model.missing_part(crate::error::MissingPart::TextEncoder)
    }

    fn encoder(&self, b: &B, observer: &mut dyn Observer<B>) -> Result<Arc<TextEncoder<B>>> {
        let mut encoder = lock(&self.encoder);
        if let Some(encoder) = &*encoder {
            return Ok(Arc::clone(encoder));
        }
        let part = self.model.text_encoder.as_ref().ok_or_else(|| self.missing())?;
        observer.event(Event::Loading { part: "text encoder" })?;
        let plan = self.placement.as_ref().map_or_else(ResidencyPlan::whole, Placement::text_encoder_plan);
        let loaded = TextEncoder::load(b, &part.weights()?.root(), &part.config, self.dtype, &plan)?;
        Ok(Arc::clone(encoder.insert(Arc::new(loaded))))
    }
}
