//! Qwen3 as FLUX.2's text encoder: `[tokens] → [tokens, 3 · hidden]`.
//!
//! ```text
//! ids [tokens] ──embed_tokens──▶ [tokens, hidden] ──27 layers──▶ states after layers 9, 18, 27 ──▶ [tokens, 3 · hidden]
//! ```
//! The states are taken before any final norm. Later layers, the final norm and the output head are not loaded.
//!
//! Easy to get wrong: the text is right-padded, and a pad query sees the real tokens only; its state still matters, because
//! the transformer attends to all positions. Queries and keys are normed per head before the rotary embedding, which
//! rotates halves (not neighbours), and each key head serves several query heads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_ops::{AttentionMask, AttentionSpec, Backend, RopeLayout, RopeTable};
use kiln_tensor::packed::{Format, PackedTensor};
use kiln_tensor::{DType, HostLinear, HostTensor};
use kiln_weights::{KnownTensors, Vars, WeightSource};
use serde::Deserialize;

use crate::prefetch::Prefetcher;
use crate::tokenizer::Tokens;
use crate::{Error, Event, Observer, ResidencyPlan, Result, config};

/// The numbers of layers after which the states are taken for the transformer.
pub const OUTPUT_LAYERS: [usize; 3] = [9, 18, 27];

/// `text_encoder/config.json`, in the flat style of the published models or with `rope_parameters`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Width of the model.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers in the checkpoint.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head; `hidden_size / num_attention_heads` when absent.
    pub head_dim: Option<usize>,
    /// Epsilon of every norm.
    pub rms_norm_eps: f32,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Base of the rotary frequencies.
    rope_theta: Option<f64>,
    /// The same, in newer files.
    rope_parameters: Option<RopeParameters>,
    /// Scaled rotary embeddings, which the published encoders don't use.
    rope_scaling: Option<serde_json::Value>,
    /// Only `qwen3` is supported.
    pub model_type: Option<String>,
    /// The MLP's activation; only SiLU is supported.
    hidden_act: Option<String>,
    /// The share of a head that rotates; only all of it is supported.
    partial_rotary_factor: Option<f64>,
    /// Sliding-window attention, which the published encoders don't use.
    #[serde(default)]
    use_sliding_window: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    partial_rotary_factor: Option<f64>,
}

impl Config {
    /// Infers the configuration from the tensors' names and shapes; the rest is in the file's metadata, or Qwen3's default.
    pub fn from_tensors(source: &WeightSource) -> Option<Config> {
        let side = |name: &str, axis: usize| source.entry(name)?.1.dims().get(axis).copied();
        let layer = |leaf: &str| format!("model.layers.0.{leaf}.weight");
        let head_dim = side(&layer("self_attn.q_norm"), 0)?;
        let heads = |leaf: &str| Some(side(&layer(leaf), 0)? / head_dim.max(1));
        let metadata = source.metadata();
        // What is not a number is a problem of the configuration.
        let number = |key: &str| metadata.get(key).map(|text| text.parse().unwrap_or(f64::NAN));
        let has = |i: &usize| source.contains(&format!("model.layers.{i}.input_layernorm.weight"));
        Some(Config {
            hidden_size: side("model.embed_tokens.weight", 1)?,
            intermediate_size: side(&layer("mlp.gate_proj"), 0)?,
            num_hidden_layers: (0..).take_while(has).count(),
            num_attention_heads: heads("self_attn.q_proj")?,
            num_key_value_heads: heads("self_attn.k_proj")?,
            head_dim: Some(head_dim),
            rms_norm_eps: number("rms_norm_eps").unwrap_or(1e-6) as f32,
            vocab_size: side("model.embed_tokens.weight", 0)?,
            rope_theta: number("rope_theta"),
            rope_parameters: None,
            rope_scaling: is_rope_scaled(metadata).then(|| "scaled".into()),
            partial_rotary_factor: None,
            model_type: Some(metadata.get("general.architecture").map_or("qwen3", String::as_str).into()),
            hidden_act: None,
            use_sliding_window: false,
        })
    }

    fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    fn rope_theta(&self) -> f64 {
        self.rope_theta.or_else(|| self.rope_parameters.as_ref()?.rope_theta).unwrap_or(1e6)
    }

    /// Width of a text token: three states side by side.
    pub fn text_dim(&self) -> usize {
        OUTPUT_LAYERS.len() * self.hidden_size
    }

    /// Number of elements of all linear layers that run, and of the largest.
    pub fn linear_elements(&self) -> [u64; 2] {
        let (hidden, mlp) = (self.hidden_size as u64, self.intermediate_size as u64);
        let heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim();
        let layers = OUTPUT_LAYERS[OUTPUT_LAYERS.len() - 1] as u64;
        [layers * hidden * (heads as u64 + 3 * mlp), 2 * hidden * mlp]
    }

    /// Lists all tensors. Those after the last state that is taken are not read.
    pub fn tensors(&self) -> KnownTensors {
        let last = OUTPUT_LAYERS[OUTPUT_LAYERS.len() - 1];
        let mut tensors = self.layer_tensors(0..last);
        tensors.add("model.embed_tokens.weight", [self.vocab_size, self.hidden_size]);
        let mut unread = self.layer_tensors(last..self.num_hidden_layers);
        unread.add("model.norm.weight", [self.hidden_size]);
        tensors.add_unread(unread);
        tensors
    }

    fn layer_tensors(&self, layers: Range<usize>) -> KnownTensors {
        let (dim, mlp, head) = (self.hidden_size, self.intermediate_size, self.head_dim());
        let [q_dim, kv_dim] = [self.num_attention_heads, self.num_key_value_heads].map(|heads| heads * head);
        let norms = [
            ("input_layernorm", dim),
            ("self_attn.q_norm", head),
            ("self_attn.k_norm", head),
            ("post_attention_layernorm", dim),
        ];
        let linears = [
            ("self_attn.q_proj", [q_dim, dim]),
            ("self_attn.k_proj", [kv_dim, dim]),
            ("self_attn.v_proj", [kv_dim, dim]),
            ("self_attn.o_proj", [dim, q_dim]),
            ("mlp.gate_proj", [mlp, dim]),
            ("mlp.up_proj", [mlp, dim]),
            ("mlp.down_proj", [dim, mlp]),
        ];
        let mut tensors = KnownTensors::default();
        for i in layers {
            norms.iter().for_each(|(n, dim)| tensors.add(format!("model.layers.{i}.{n}.weight"), [*dim]));
            linears.iter().for_each(|(n, size)| tensors.add_linear(&format!("model.layers.{i}.{n}"), *size));
        }
        tensors
    }

    /// Describes what is wrong with the configuration, if anything.
    pub fn problem(&self) -> Option<String> {
        if let Some(kind) = self.model_type.as_deref().filter(|kind| *kind != "qwen3") {
            return Some(format!("model_type is `{kind}`, expected `qwen3`"));
        }
        let widths = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim()),
        ];
        if let Some(problem) =
            config::implausible_size(&widths, &[("num_hidden_layers", self.num_hidden_layers)])
        {
            return Some(problem);
        }
        let parameters = self.rope_parameters.as_ref();
        let rope_type = parameters.and_then(|r| r.rope_type.as_deref());
        if self.rope_scaling.is_some() || rope_type.is_some_and(|kind| kind != "default") {
            return Some("scaled rotary embeddings are not supported".into());
        }
        let factors = [self.partial_rotary_factor, parameters.and_then(|r| r.partial_rotary_factor)];
        if let Some(factor) = factors.into_iter().flatten().find(|factor| *factor != 1.0) {
            return Some(format!("partial_rotary_factor is {factor}, expected 1"));
        }
        if let (Some(outer), Some(inner)) = (self.rope_theta, parameters.and_then(|r| r.rope_theta))
            && outer != inner
        {
            return Some(format!("rope_theta is {outer}, but {inner} in rope_parameters"));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Some(format!("rms_norm_eps must lie between 0 and 1, found {}", self.rms_norm_eps));
        }
        if self.use_sliding_window || self.hidden_act.as_deref().is_some_and(|f| f != "silu") {
            return Some("use_sliding_window and a hidden_act other than `silu` are not supported".into());
        }
        if !(self.rope_theta().is_finite() && self.rope_theta() > 0.0) {
            return Some(format!("rope_theta must be above 0, found {}", self.rope_theta()));
        }
        let last = OUTPUT_LAYERS[OUTPUT_LAYERS.len() - 1];
        if self.num_hidden_layers < last {
            return Some(format!(
                "num_hidden_layers is {}, but the state after layer {last} is needed",
                self.num_hidden_layers
            ));
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Some(format!("{heads} query heads can't share {kv_heads} key heads"));
        }
        (!self.head_dim().is_multiple_of(2)).then(|| format!("head_dim {} is not even", self.head_dim()))
    }
}

/// Whether the metadata of a GGUF file asks for scaled rotary embeddings.
fn is_rope_scaled(metadata: &BTreeMap<String, String>) -> bool {
    metadata.iter().any(|(key, value)| {
        key.ends_with(".rope.scaling.type") && value != "none"
            || key.ends_with(".rope.scale_linear") && value.parse() != Ok(1.0)
    })
}

/// The text encoder's weights on a backend.
pub struct TextEncoder<B: Backend> {
    config: Config,
    dtype: DType,
    /// Stays on the host: a prompt needs only a few hundred rows.
    embed_tokens: PackedTensor,
    layers: Vec<Layer<B>>,
    /// The table of the last text's length, which is nearly always the next one's.
    rope: Mutex<Option<CachedRope<B>>>,
    prefetcher: Prefetcher,
}

/// A number of tokens and its rotary embedding.
type CachedRope<B> = (usize, Arc<RopeTable<<B as Backend>::Tensor>>);

struct Layer<B: Backend> {
    input_layernorm: B::Tensor,
    qkv: B::Weight,
    q_norm: B::Tensor,
    k_norm: B::Tensor,
    o_proj: B::Weight,
    post_attention_layernorm: B::Tensor,
    gate_up: B::Weight,
    down_proj: B::Weight,
}

impl<B: Backend> TextEncoder<B> {
    /// Loads the layers that are needed; activations are `dtype`.
    pub fn load(b: &B, vars: &Vars<'_>, config: &Config, dtype: DType, plan: &ResidencyPlan) -> Result<Self> {
        let vars = if vars.contains("model.embed_tokens.weight") { vars.at("model") } else { vars.clone() };
        let layers = vars.at("layers");
        let last = OUTPUT_LAYERS[OUTPUT_LAYERS.len() - 1];
        Ok(TextEncoder {
            dtype,
            prefetcher: Prefetcher::new(b, (0..last).map(|i| layers.at(i)), false),
            embed_tokens: vars.matrix("embed_tokens.weight", [config.vocab_size, config.hidden_size])?,
            layers: (0..last).map(|i| Layer::load(b, &layers.at(i), plan, config)).collect::<Result<_>>()?,
            rope: Mutex::default(),
            config: config.clone(),
        })
    }

    /// Encodes a prompt to `[tokens, 3 · hidden]`. `prompt` of `prompts` is for progress events only.
    pub fn forward(
        &self,
        b: &B,
        tokens: &Tokens,
        (prompt, prompts): (usize, usize),
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let rope = self.rope(b, tokens.ids.len())?;
        let mut x = b.upload(&self.embed(tokens)?, self.dtype)?;
        let mut states = Vec::with_capacity(OUTPUT_LAYERS.len());
        // Sent when the first kernel runs: `bench/start.py` measures the time until then.
        observer.event(Event::TextLayer { prompt, prompts, done: 0, total: self.layers.len() })?;
        for (i, layer) in self.layers.iter().enumerate() {
            self.prefetcher.prefetch_after(i);
            x = layer.forward(b, x, &self.config, tokens.real.end, &rope)?;
            if OUTPUT_LAYERS.contains(&(i + 1)) {
                states.push(x.clone());
            }
            observer.inspect(&format!("text.state{}", i + 1), &x)?;
            observer.event(Event::TextLayer { prompt, prompts, done: i + 1, total: self.layers.len() })?;
        }
        Ok(b.concat_columns(&states.iter().collect::<Vec<_>>())?)
    }

    /// Looks up the prompt's rows of the embedding.
    fn embed(&self, tokens: &Tokens) -> Result<HostTensor> {
        let (rows, dim) = (self.config.vocab_size, self.config.hidden_size);
        if let Some(id) = tokens.ids.iter().find(|&&id| id as usize >= rows) {
            return Err(Error::Tokenizer(format!("token {id} is outside the embedding of {rows} rows")));
        }
        let shape = [tokens.ids.len(), dim];
        // bf16 rows are copied as they are: converting them to f32 and back would take longer than the copy to a GPU.
        if self.embed_tokens.format() == Format::BF16 && self.embed_tokens.scale().is_none() {
            let mut bytes = Vec::with_capacity(tokens.ids.len() * 2 * dim);
            for &id in &tokens.ids {
                bytes.extend_from_slice(&self.embed_tokens.bytes()[id as usize * 2 * dim..][..2 * dim]);
            }
            return Ok(HostTensor::new(DType::BF16, shape, bytes.into())?);
        }
        let mut values = vec![0f32; tokens.ids.len() * dim];
        for (&id, row) in tokens.ids.iter().zip(values.chunks_exact_mut(dim)) {
            self.embed_tokens.read(id as usize, 0, row);
        }
        Ok(HostTensor::from_f32(shape, values)?)
    }

    /// Returns the rotary table for a number of tokens, from the cache if it is the last one.
    fn rope(&self, b: &B, tokens: usize) -> Result<Arc<RopeTable<B::Tensor>>> {
        let mut cached = lock(&self.rope);
        if let Some((_, table)) = cached.as_ref().filter(|(count, _)| *count == tokens) {
            return Ok(Arc::clone(table));
        }
        let table = Arc::new(self.new_rope(b, tokens)?);
        *cached = Some((tokens, Arc::clone(&table)));
        Ok(table)
    }

    /// Computes the rotary table; angles are f32, as in transformers.
    fn new_rope(&self, b: &B, tokens: usize) -> Result<RopeTable<B::Tensor>> {
        let dim = self.config.head_dim();
        let frequency = |i: usize| 1.0 / self.config.rope_theta().powf((2 * i) as f64 / dim as f64) as f32;
        let frequencies: Vec<f32> = (0..dim / 2).map(frequency).collect();
        let angle = |p: usize| frequencies.iter().map(move |f| f64::from(p as f32 * f));
        let angles: Vec<f64> = (0..tokens).flat_map(angle).collect();
        let upload = |f: fn(f64) -> f64| {
            let values = angles.iter().map(|&a| f(a) as f32).collect();
            Ok::<_, Error>(b.upload(&HostTensor::from_f32([tokens, dim / 2], values)?, DType::F32)?)
        };
        Ok(RopeTable { cos: upload(f64::cos)?, sin: upload(f64::sin)?, pairs: RopeLayout::HalfSplit })
    }
}

impl<B: Backend> Layer<B> {
    fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        let (dim, mlp, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim());
        let (q_dim, kv_dim) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let norm = |name: &str, dim: usize| Ok::<_, Error>(b.upload(&vars.tensor(name, [dim])?, DType::F32)?);
        let qkv = [("self_attn.q_proj", q_dim), ("self_attn.k_proj", kv_dim), ("self_attn.v_proj", kv_dim)];
        let gate_up = [("mlp.gate_proj", mlp), ("mlp.up_proj", mlp)];
        let weight = |layer: HostLinear| {
            let residency = plan.next(layer.bytes());
            b.load_weight(layer, residency)
        };
        Ok(Layer {
            input_layernorm: norm("input_layernorm.weight", dim)?,
            qkv: weight(vars.linear_stack(&qkv, dim)?)?,
            q_norm: norm("self_attn.q_norm.weight", head_dim)?,
            k_norm: norm("self_attn.k_norm.weight", head_dim)?,
            o_proj: weight(vars.linear("self_attn.o_proj", dim, q_dim)?)?,
            post_attention_layernorm: norm("post_attention_layernorm.weight", dim)?,
            gate_up: weight(vars.linear_stack(&gate_up, dim)?)?,
            down_proj: weight(vars.linear("mlp.down_proj", dim, mlp)?)?,
        })
    }

    /// `x`: `[tokens, hidden]`, the first `real` rows are not padding.
    fn forward(
        &self,
        b: &B,
        x: B::Tensor,
        config: &Config,
        real: usize,
        rope: &RopeTable<B::Tensor>,
    ) -> Result<B::Tensor> {
        let eps = config.rms_norm_eps;
        let (heads, kv_heads, head_dim) =
            (config.num_attention_heads, config.num_key_value_heads, config.head_dim());
        let h = b.rms_norm(&x, &self.input_layernorm, eps)?;
        let [q, k, v] = b.linear_split(&h, &self.qkv, [heads, kv_heads, kv_heads].map(|n| n * head_dim))?;
        let [q, k] = b.qk_norm_rope([&q, &k], Some([&self.q_norm, &self.k_norm]), rope, eps)?;
        let spec = AttentionSpec { heads, kv_heads, mask: AttentionMask::Causal { valid: real } };
        let attended = b.attention(&[&q], &[&k], &[&v], &spec)?;
        let x = b.linear_gated_add(&[&attended], &self.o_proj, None, &x)?;
        let h = b.rms_norm(&x, &self.post_attention_layernorm, eps)?;
        let h = b.linear(&h, &self.gate_up)?;
        Ok(b.swiglu_gated_add(None, &h, &self.down_proj, None, &x)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn problem(change: serde_json::Value) -> Option<String> {
        let mut config = json!({
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 36, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 100, "rope_theta": 1e6,
        });
        for (key, value) in change.as_object().unwrap() {
            config[key] = value.clone();
        }
        serde_json::from_value::<Config>(config).unwrap().problem()
    }

    #[test]
    fn only_whole_unscaled_rotary_embeddings_are_supported() {
        assert_eq!(problem(json!({})), None);
        assert_eq!(problem(json!({ "partial_rotary_factor": 1.0, "rope_scaling": null })), None);
        assert_eq!(
            problem(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 } })),
            None
        );
        for (wrong, word) in [
            (json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor is 0.5"),
            (
                json!({ "rope_parameters": { "partial_rotary_factor": 0.25 } }),
                "partial_rotary_factor is 0.25",
            ),
            (json!({ "rope_scaling": { "type": "yarn" } }), "scaled rotary"),
            (json!({ "rope_parameters": { "rope_type": "yarn" } }), "scaled rotary"),
            (json!({ "rope_parameters": { "rope_theta": 1e4 } }), "rope_theta is 1000000, but 10000"),
        ] {
            let found = problem(wrong).unwrap();
            assert!(found.contains(word), "{found}");
        }
    }

    #[test]
    fn gguf_metadata_tells_of_scaled_rotary_embeddings() {
        let scaled = |key: &str, value: &str| is_rope_scaled(&BTreeMap::from([(key.into(), value.into())]));
        assert!(scaled("qwen3.rope.scaling.type", "yarn") && scaled("qwen3.rope.scale_linear", "4"));
        assert!(!scaled("qwen3.rope.scaling.type", "none") && !scaled("qwen3.rope.scale_linear", "1.0"));
        assert!(!scaled("qwen3.rope.freq_base", "10000"));
    }
}
