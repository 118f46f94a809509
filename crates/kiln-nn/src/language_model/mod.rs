//! A text encoder's model as what it was trained to be: a language model that continues a text.
//!
//! ```text
//! embeddings [tokens, hidden] ──all layers──▶ last row ──norm──▶ lm_head ──▶ logits [vocabulary] ──sampler──▶ next token
//!                              ▲ keys and values of earlier tokens                                    │
//!                              └────────────────────────── its embedding ◀────────────────────────────┘
//! ```
//! The layers are those of the [text encoder](crate::text_encoder), but all of them, followed by the final norm and the
//! output head. Files that hold only what encoding a prompt needs lack these.
//!
//! Easy to get wrong: positions count from the first real token here, while the padded prompts of the text encoder count
//! from the first pad.

mod kv_cache;
mod sampler;

use kiln_ops::{AttentionMask, Backend, RopeLayout, Tensor as _};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{Vars, WeightSource};

use crate::prefetch::Prefetcher;
use crate::text_encoder::{Config, Embedding, Layer, rope_layout, rope_table};
use crate::{Error, ResidencyPlan, Result};

use kv_cache::KvCache;
pub use sampler::{Sampler, Sampling, probabilities};

const NORM: &str = "norm.weight";
const HEAD: &str = "lm_head.weight";

/// Describes why a text encoder's weights can't continue a text, if so. Reads nothing but names.
pub fn problem(weights: &WeightSource, config: &Config) -> Option<String> {
    const NEEDED: &str = "rewriting a prompt takes all layers, the final norm and the output head";
    let count = config.num_hidden_layers;
    let last = format!("model.layers.{}.mlp.down_proj.weight", count.saturating_sub(1));
    let mut names = [HEAD, "model.norm.weight", last.as_str()].into_iter();
    if let Some(missing) = names.find(|name| !weights.contains(name)) {
        return Some(format!("it has no `{missing}`; {NEEDED}"));
    }
    let encoding = config.output_layers().iter().max().copied().unwrap_or(0);
    (count <= encoding).then(|| format!("it has only the {count} layers that encode a prompt; {NEEDED}"))
}

/// A language model's weights on a backend.
pub struct LanguageModel<B: Backend> {
    config: Config,
    dtype: DType,
    embed_tokens: Embedding,
    layers: Vec<Layer<B>>,
    norm: B::Tensor,
    lm_head: B::Weight,
    rope_layout: RopeLayout,
    prefetcher: Prefetcher,
}

/// A text that is being continued: its keys and values in every layer.
pub struct Continuation<B: Backend> {
    caches: Vec<KvCache<B>>,
    tokens: usize,
}

impl<B: Backend> LanguageModel<B> {
    /// Loads all layers and the head; activations are `dtype`.
    pub fn load(b: &B, vars: &Vars<'_>, config: &Config, dtype: DType, plan: &ResidencyPlan) -> Result<Self> {
        let (model, dim) = (vars.at("model"), config.hidden_size);
        let (layers, count) = (model.at("layers"), config.num_hidden_layers);
        let head = vars.linear("lm_head", config.vocab_size, dim)?;
        Ok(LanguageModel {
            dtype,
            prefetcher: Prefetcher::new(b, (0..count).map(|i| layers.at(i)), true),
            embed_tokens: Embedding::load(&model, [config.vocab_size, dim])?,
            layers: (0..count).map(|i| Layer::load(b, &layers.at(i), plan, config)).collect::<Result<_>>()?,
            norm: b.upload(&model.tensor(NORM, [dim])?, DType::F32)?,
            lm_head: plan.load(b, head)?,
            rope_layout: rope_layout(&model),
            config: config.clone(),
        })
    }

    /// Looks up the embeddings of tokens, `[tokens, hidden]`.
    pub fn embed(&self, ids: &[u32]) -> Result<HostTensor> {
        self.embed_tokens.rows(ids)
    }

    /// Reads a text, given as the embeddings of its tokens. Returns it and the logits of the token that follows. A long text
    /// takes long: `proceed` is asked before each layer, and its error stops the run.
    pub fn start(
        &self,
        b: &B,
        embeddings: &HostTensor,
        proceed: &mut dyn FnMut() -> Result<()>,
    ) -> Result<(Continuation<B>, Vec<f32>)> {
        let caches = self.layers.iter().map(|_| KvCache::default()).collect();
        let mut text = Continuation { caches, tokens: 0 };
        let logits = self.forward(b, &mut text, embeddings, proceed)?;
        Ok((text, logits))
    }

    /// Appends a token. Returns the logits of the one that follows.
    pub fn next(&self, b: &B, text: &mut Continuation<B>, id: u32) -> Result<Vec<f32>> {
        self.forward(b, text, &self.embed(&[id])?, &mut || Ok(()))
    }

    /// Appends tokens. Only the first call on a text may have several.
    fn forward(
        &self,
        b: &B,
        text: &mut Continuation<B>,
        embeddings: &HostTensor,
        proceed: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<f32>> {
        let count = embeddings.shape().dims()[0];
        let positions = text.tokens..text.tokens + count;
        let rope = rope_table(b, &self.config, self.rope_layout, positions.clone())?;
        let mut x = b.upload(embeddings, self.dtype)?;
        let last = self.layers.len() - 1;
        for (i, (layer, cache)) in self.layers.iter().zip(&mut text.caches).enumerate() {
            proceed()?;
            self.prefetcher.prefetch_after(i);
            let [mut q, k, v] = layer.qkv(b, &x, &rope)?;
            let [k, v] = cache.append(b, [k, v])?;
            // One token sees all keys that are there. Of the last layer only the last token's state is needed.
            let mut mask = AttentionMask::Causal { valid: count };
            if i == last && count > 1 {
                (x, q) = (b.slice_rows(&x, count - 1..count)?, b.slice_rows(&q, count - 1..count)?);
            }
            if x.shape().dims()[0] == 1 {
                mask = AttentionMask::None;
            }
            x = layer.attend(b, &x, &q, [&[&k], &[&v]], mask)?;
            x = layer.mlp(b, &x)?;
        }
        text.tokens = positions.end;
        let x = b.rms_norm(&x, &self.norm, self.config.rms_norm_eps)?;
        let logits = b.download(&b.linear(&x, &self.lm_head)?)?;
        if !logits.is_finite() {
            return Err(Error::NotFinite { what: "the prediction of the next token".into() });
        }
        Ok(logits.to_f32()?.into_owned())
    }
}
