//! The text side of a pipeline: prompts to text tokens, encoded or remembered.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kiln_ops::Backend;
use kiln_tensor::DType;

use super::{Options, Placement, finite};
use crate::text_cache::Key;
use crate::text_encoder::{self, TextEncoder};
use crate::tokenizer::{PromptTokenizer, Tokens};
use crate::{Event, Observer, Part, Result, TextCache};

/// What messages call an encoded text.
pub(super) const RESULT: &str = "the text encoder's result";

/// The text encoder, loaded when a text is to be encoded that is not remembered.
pub(super) struct Texter<B: Backend> {
    part: Part<text_encoder::Config>,
    dtype: DType,
    placement: Option<Placement>,
    cache: Option<TextCache>,
    fingerprint: OnceLock<String>,
    encoder: Mutex<Option<Arc<TextEncoder<B>>>>,
}

impl<B: Backend> Texter<B> {
    /// With a cache nothing is loaded yet; without one the encoder is needed in any case, and is loaded now.
    pub(super) fn new(
        b: &B,
        part: &Part<text_encoder::Config>,
        &Options { dtype, placement, .. }: &Options,
        cache: Option<TextCache>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Self> {
        let (part, fingerprint, encoder) = (part.clone(), OnceLock::new(), Mutex::new(None));
        let texter = Texter { part, dtype, placement, cache, fingerprint, encoder };
        if texter.cache.is_none() {
            texter.encoder(b, observer)?;
        }
        Ok(texter)
    }

    /// Loads the encoder unless all of these texts are remembered.
    pub(super) fn prepare(&self, b: &B, texts: &[Tokens], observer: &mut dyn Observer<B>) -> Result<()> {
        if let Some(cache) = &self.cache {
            let mut missing = false;
            for tokens in texts {
                missing |= !cache.contains(&self.key(b, tokens)?);
            }
            if !missing {
                return Ok(());
            }
        }
        self.encoder(b, observer).map(drop)
    }

    /// Text tokens `[tokens, 3 · hidden]`. `place` is the prompt's number and how many there are, for progress only.
    pub(super) fn encode(
        &self,
        b: &B,
        tokens: &Tokens,
        place: (usize, usize),
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let Some(cache) = &self.cache else {
            // Whether it is finite is asked when the picture isn't: the question would keep a GPU waiting.
            return self.encoder(b, observer)?.forward(b, tokens, place, observer);
        };
        let key = self.key(b, tokens)?;
        if let Some(text) = cache.get(&key) {
            return Ok(b.upload(&text, self.dtype)?);
        }
        let encoded = self.encoder(b, observer)?.forward(b, tokens, place, observer)?;
        let text = b.download(&encoded)?;
        finite(RESULT, &text)?;
        if let Err(error) = cache.put(&key, &text) {
            observer.event(Event::Note(format!("the encoded text is not kept: {error}")))?;
        }
        Ok(encoded)
    }

    fn key(&self, b: &B, tokens: &Tokens) -> Result<Key> {
        let fingerprint = match self.fingerprint.get() {
            Some(fingerprint) => fingerprint,
            None => {
                let fingerprint = self.part.weights()?.fingerprint()?;
                self.fingerprint.get_or_init(|| fingerprint)
            }
        };
        Ok(Key::new(fingerprint, &b.numerics(), self.dtype, tokens, self.part.config.text_dim()))
    }

    fn encoder(&self, b: &B, observer: &mut dyn Observer<B>) -> Result<Arc<TextEncoder<B>>> {
        let mut encoder = self.encoder.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(encoder) = &*encoder {
            return Ok(Arc::clone(encoder));
        }
        observer.event(Event::Loading { part: "text encoder" })?;
        if let Some(Placement { weights, text_encoder, .. }) = self.placement {
            b.keep_weights(text_encoder, weights.text_encoder);
        }
        let weights = self.part.weights()?;
        let loaded = Arc::new(TextEncoder::load(b, &weights.root(), &self.part.config, self.dtype)?);
        *encoder = Some(Arc::clone(&loaded));
        Ok(loaded)
    }
}

/// The ids of each of `texts`.
pub(super) fn tokenize(tokenizer: &PromptTokenizer, texts: &[&str], max: usize) -> Result<Vec<Tokens>> {
    texts.iter().map(|text| tokenizer.encode(text, max)).collect()
}
