//! Qwen3 (klein) and Mistral Small 3 (dev) as FLUX.2's text encoder: `[tokens] → [tokens, 3 · hidden]`.
//!
//! ```text
//! ids [tokens] ──embed_tokens──▶ [tokens, hidden] ──layers──▶ states after layers 9, 18, 27 (Qwen3) or 10, 20, 30 (Mistral) ──▶ [tokens, 3 · hidden]
//! ```
//! The states are taken before any final norm. Later layers, the final norm and the output head are not loaded.
//!
//! Easy to get wrong: padding is no real token, but its states matter, because the transformer attends to all positions.
//! Behind the text (Qwen3), a pad query sees the real tokens. Before it (Mistral), it sees none: its attention is 0, so that
//! all pads have one state, which passes through the MLPs only. It is computed once, as one more row, and repeated.
//! Positions count from the first pad. Qwen3 norms query and key heads before the rotary embedding, Mistral does not. The
//! rotary embedding rotates halves, except for weights whose rows llama.cpp has permuted, and each key head serves several
//! query heads.

mod config;
mod embedding;
mod layer;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_ops::{AttentionMask, Backend, RopeLayout, RopeTable};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Vars;

use crate::prefetch::Prefetcher;
use crate::tokenizer::Tokens;
use crate::{Error, Event, Observer, ResidencyPlan, Result};

pub use config::Config;
pub use embedding::Embedding;
pub use layer::Layer;

/// The text encoder's weights on a backend.
pub struct TextEncoder<B: Backend> {
    config: Config,
    dtype: DType,
    embed_tokens: Embedding,
    layers: Vec<Layer<B>>,
    rope_layout: RopeLayout,
    /// The table of the last text's positions, which are often the next one's.
    rope: Mutex<Option<CachedRope<B>>>,
    prefetcher: Prefetcher,
}

/// Positions and their rotary embedding.
type CachedRope<B> = (Range<usize>, Arc<RopeTable<<B as Backend>::Tensor>>);

impl<B: Backend> TextEncoder<B> {
    /// Loads the layers up to the last state of [`Config::output_layers`]; activations are `dtype`.
    pub fn load(b: &B, vars: &Vars<'_>, config: &Config, dtype: DType, plan: &ResidencyPlan) -> Result<Self> {
        let vars = if vars.contains("model.embed_tokens.weight") { vars.at("model") } else { vars.clone() };
        let (layers, count) = (vars.at("layers"), config.layers());
        Ok(TextEncoder {
            dtype,
            prefetcher: Prefetcher::new(b, (0..count).map(|i| layers.at(i)), false),
            embed_tokens: Embedding::load(&vars, [config.vocab_size, config.hidden_size])?,
            layers: (0..count).map(|i| Layer::load(b, &layers.at(i), plan, config)).collect::<Result<_>>()?,
            rope_layout: rope_layout(&vars),
            rope: Mutex::default(),
            config: config.clone(),
        })
    }

    /// Number of loaded layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Encodes a prompt to `[tokens, states · hidden]`, with the states after these of the loaded layers. `prompt` of
    /// `prompts` is for progress events only.
    pub fn forward(
        &self,
        b: &B,
        tokens: &Tokens,
        states: &[usize],
        (prompt, prompts): (usize, usize),
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let (left, rows) = (tokens.real.start, tokens.ids.len() - tokens.real.start);
        let rope = self.rope(b, left..tokens.ids.len())?;
        // All that attends, then a row for the padding on the left.
        let ids = [&tokens.ids[left..], &tokens.ids[..left.min(1)]].concat();
        let mut x = b.upload(&self.embed_tokens.rows(&ids)?, self.dtype)?;
        let total = states.iter().copied().max().unwrap_or(0);
        if total > self.layers.len() {
            let loaded = self.layers.len();
            return Err(Error::request(format!(
                "the state after layer {total} is needed, {loaded} layers are loaded"
            )));
        }
        let mut taken = vec![x.clone(); states.len()];
        // Sent when the first kernel runs: `bench/start.py` measures the time until then.
        observer.event(Event::TextLayer { prompt, prompts, done: 0, total })?;
        for (i, layer) in self.layers[..total].iter().enumerate() {
            self.prefetcher.prefetch_after(i);
            let attending = if left > 0 { b.slice_rows(&x, 0..rows)? } else { x.clone() };
            let [q, k, v] = layer.qkv(b, &attending, &rope)?;
            let mask = AttentionMask::Causal { valid: tokens.real.len() };
            let mut h = layer.attend(b, &attending, &q, [&[&k], &[&v]], mask)?;
            if left > 0 {
                h = b.concat_rows(&[&h, &b.slice_rows(&x, rows..rows + 1)?])?;
            }
            x = layer.mlp(b, &h)?;
            for (taken, _) in taken.iter_mut().zip(states).filter(|(_, state)| **state == i + 1) {
                *taken = x.clone();
            }
            observer.inspect(&format!("text.state{}", i + 1), &x)?;
            observer.event(Event::TextLayer { prompt, prompts, done: i + 1, total })?;
        }
        let text = b.concat_columns(&taken.iter().collect::<Vec<_>>())?;
        if left == 0 {
            return Ok(text);
        }
        let padding = repeat_row(b, &b.slice_rows(&text, rows..rows + 1)?, left)?;
        Ok(b.concat_rows(&[&padding, &b.slice_rows(&text, 0..rows)?])?)
    }

    /// Returns the rotary table of these positions, from the cache if they are the last ones.
    fn rope(&self, b: &B, positions: Range<usize>) -> Result<Arc<RopeTable<B::Tensor>>> {
        let mut cached = lock(&self.rope);
        if let Some((_, table)) = cached.as_ref().filter(|(cached, _)| *cached == positions) {
            return Ok(Arc::clone(table));
        }
        let table = Arc::new(rope_table(b, &self.config, self.rope_layout, positions.clone())?);
        *cached = Some((positions, Arc::clone(&table)));
        Ok(table)
    }
}

/// Which elements of a head rotate together: neighbours if llama.cpp permuted the rows of queries and keys.
pub fn rope_layout(vars: &Vars<'_>) -> RopeLayout {
    if vars.source().has_interleaved_rotary() { RopeLayout::Interleaved } else { RopeLayout::HalfSplit }
}

/// Computes the rotary table of these positions; angles are f32, as in transformers.
pub fn rope_table<B: Backend>(
    b: &B,
    config: &Config,
    pairs: RopeLayout,
    positions: Range<usize>,
) -> Result<RopeTable<B::Tensor>> {
    let (dim, tokens) = (config.head_dim(), positions.len());
    let frequency = |i: usize| 1.0 / config.rope_theta().powf((2 * i) as f64 / dim as f64) as f32;
    let frequencies: Vec<f32> = (0..dim / 2).map(frequency).collect();
    let angle = |p: usize| frequencies.iter().map(move |f| f64::from(p as f32 * f));
    let angles: Vec<f64> = positions.flat_map(angle).collect();
    let upload = |f: fn(f64) -> f64| {
        let values = angles.iter().map(|&a| f(a) as f32).collect();
        Ok::<_, Error>(b.upload(&HostTensor::from_f32([tokens, dim / 2], values)?, DType::F32)?)
    };
    Ok(RopeTable { cos: upload(f64::cos)?, sin: upload(f64::sin)?, pairs })
}

/// `count` copies of a row, on the device and in few operations: what is there is doubled.
fn repeat_row<B: Backend>(b: &B, row: &B::Tensor, count: usize) -> Result<B::Tensor> {
    let (mut rows, mut copies) = (row.clone(), 1);
    while copies < count {
        let more = copies.min(count - copies);
        rows = b.concat_rows(&[&rows, &b.slice_rows(&rows, 0..more)?])?;
        copies += more;
    }
    Ok(rows)
}
