//! The configuration of a text encoder: from its `config.json`, or from the names and shapes of its tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use kiln_family::{Family, TextEncoder, flux2, published, text_encoders};
use kiln_weights::{KnownTensors, WeightSource};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::config;

/// `text_encoder/config.json`, in the flat style of the published models or with `rope_parameters`. Of a model that also
/// sees images, the language model's `text_config`.
#[derive(Clone, Debug, Deserialize)]
#[serde(remote = "Self")]
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
    rope_scaling: Option<Value>,
    /// `qwen3`, `mistral` or `mistral3`; `qwen3` when absent.
    pub model_type: Option<String>,
    /// The MLP's activation; only SiLU is supported.
    hidden_act: Option<String>,
    /// The share of a head that rotates; only all of it is supported.
    partial_rotary_factor: Option<f64>,
    /// Sliding-window attention, which the published encoders don't use.
    #[serde(default)]
    use_sliding_window: bool,
    /// The width of Mistral's sliding window.
    sliding_window: Option<usize>,
    /// Which states make up a text token, as diffusers' argument of this name; the usual ones when absent.
    text_encoder_out_layers: Option<Vec<usize>>,
}

#[derive(Clone, Debug, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    partial_rotary_factor: Option<f64>,
}

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut file = Value::deserialize(deserializer)?;
        if let Some(mut text) = file.get_mut("text_config").map(Value::take).filter(Value::is_object) {
            if let (None, Some(outer)) = (text.get("model_type"), file.get("model_type")) {
                text["model_type"] = outer.clone();
            }
            file = text;
        }
        Config::deserialize(file).map_err(D::Error::custom)
    }
}

impl Config {
    /// Infers the configuration from the tensors' names and shapes; the rest is in the file's metadata, or the text
    /// encoder's default.
    pub fn from_tensors(source: &WeightSource) -> Option<Config> {
        let side = |name: &str, axis: usize| source.entry(name)?.1.dims().get(axis).copied();
        let layer = |leaf: &str| format!("model.layers.0.{leaf}.weight");
        let has_norms = source.contains(&layer("self_attn.q_norm"));
        let usual = text_encoders().find(|encoder| encoder.has_qk_norms == has_norms)?;
        let head_dim = source.head_dim()?;
        let heads = |leaf: &str| Some(side(&layer(leaf), 0)? / head_dim.max(1));
        let metadata = source.metadata();
        // What is not a number is a problem of the configuration.
        let number = |key: &str| metadata.get(key).map(|text| text.parse().unwrap_or(f64::NAN));
        let has = |i: &usize| source.contains(&format!("model.layers.{i}.input_layernorm.weight"));
        let architecture = metadata.get("general.architecture").map(String::as_str);
        let other = architecture.filter(|architecture| !usual.architectures.contains(architecture));
        let model_type = other.unwrap_or(usual.model_types[0]);
        Some(Config {
            hidden_size: side("model.embed_tokens.weight", 1)?,
            intermediate_size: side(&layer("mlp.gate_proj"), 0)?,
            num_hidden_layers: (0..).take_while(has).count(),
            num_attention_heads: heads("self_attn.q_proj")?,
            num_key_value_heads: heads("self_attn.k_proj")?,
            head_dim: Some(head_dim),
            rms_norm_eps: number("rms_norm_eps").unwrap_or(usual.rms_norm_eps) as f32,
            vocab_size: side("model.embed_tokens.weight", 0)?,
            rope_theta: number("rope_theta").or(Some(usual.rope_theta)),
            rope_parameters: None,
            rope_scaling: is_rope_scaled(metadata).then(|| "scaled".into()),
            partial_rotary_factor: rotated_share(metadata, head_dim),
            model_type: Some(model_type.into()),
            hidden_act: None,
            use_sliding_window: false,
            sliding_window: None,
            text_encoder_out_layers: None,
        })
    }

    /// Which language model it is.
    pub fn encoder(&self) -> &'static TextEncoder {
        self.model_type.as_deref().and_then(TextEncoder::of_type).unwrap_or(&flux2::QWEN3)
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Base of the rotary frequencies.
    pub fn rope_theta(&self) -> f64 {
        let stated = self.rope_theta.or_else(|| self.rope_parameters.as_ref()?.rope_theta);
        stated.unwrap_or_else(|| self.encoder().rope_theta)
    }

    /// The numbers of layers after which the states are taken for the transformer; 0 is the embedding.
    pub fn output_layers(&self) -> &[usize] {
        self.text_encoder_out_layers.as_deref().unwrap_or(self.encoder().layers)
    }

    /// Takes the states after these layers instead.
    pub fn with_output_layers(mut self, layers: &[usize]) -> Config {
        self.text_encoder_out_layers = Some(layers.to_vec());
        self
    }

    /// Number of layers that run: up to the last state that is taken.
    pub fn layers(&self) -> usize {
        self.output_layers().iter().copied().max().unwrap_or(0)
    }

    /// Width of a text token: the states side by side.
    pub fn text_dim(&self) -> usize {
        self.output_layers().len() * self.hidden_size
    }

    /// Number of elements of all linear layers that run, and of the largest.
    pub fn linear_elements(&self) -> [u64; 2] {
        let (hidden, mlp) = (self.hidden_size as u64, self.intermediate_size as u64);
        let heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim();
        [self.layers() as u64 * hidden * (heads as u64 + 3 * mlp), 2 * hidden * mlp]
    }

    /// Lists all tensors. Those after the last state that is taken are not read.
    pub fn tensors(&self) -> KnownTensors {
        let last = self.layers();
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
        let mut norms = vec![("input_layernorm", dim), ("post_attention_layernorm", dim)];
        if self.encoder().has_qk_norms {
            norms.extend([("self_attn.q_norm", head), ("self_attn.k_norm", head)]);
        }
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
        if let Some(kind) = self.model_type.as_deref().filter(|kind| TextEncoder::of_type(kind).is_none()) {
            let known = published().flat_map(Family::text_encoders);
            let known: Vec<_> = known.filter_map(|encoder| encoder.model_types.last()).collect();
            let known = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ");
            return Some(format!("model_type is `{kind}`, expected {known}"));
        }
        let widths = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim()),
            ("vocab_size", self.vocab_size),
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
            let gguf = "in a GGUF file, rope.dimension_count by the width of a head";
            return Some(format!("partial_rotary_factor is {factor}, expected 1 ({gguf})"));
        }
        if let (Some(outer), Some(inner)) = (self.rope_theta, parameters.and_then(|r| r.rope_theta))
            && outer != inner
        {
            return Some(format!("rope_theta is {outer}, but {inner} in rope_parameters"));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Some(format!("rms_norm_eps must lie between 0 and 1, found {}", self.rms_norm_eps));
        }
        let window = !self.encoder().states_unused_window && self.sliding_window.is_some();
        if self.use_sliding_window || window || self.hidden_act.as_deref().is_some_and(|f| f != "silu") {
            return Some("a sliding window and a hidden_act other than `silu` are not supported".into());
        }
        if !(self.rope_theta().is_finite() && self.rope_theta() > 0.0) {
            return Some(format!("rope_theta must be above 0, found {}", self.rope_theta()));
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Some(format!("{heads} query heads can't share {kv_heads} key heads"));
        }
        if !self.head_dim().is_multiple_of(2) {
            return Some(format!("head_dim {} is not even", self.head_dim()));
        }
        self.output_layers_problem(self.output_layers())
    }

    /// Describes why the states after these layers can't be taken, if so.
    pub fn output_layers_problem(&self, layers: &[usize]) -> Option<String> {
        if layers.is_empty() {
            return Some("no layer is named whose state is taken".into());
        }
        let beyond = layers.iter().max().filter(|layer| **layer > self.num_hidden_layers)?;
        let layers = self.num_hidden_layers;
        let why = if self.encoder().has_qk_norms {
            ""
        } else {
            &format!(": it has no q_norm and k_norm, so it is taken for a {}, not a Qwen3", self.encoder())
        };
        Some(format!("num_hidden_layers is {layers}, but the state after layer {beyond} is needed{why}"))
    }
}

/// Whether the metadata of a GGUF file asks for scaled rotary embeddings. As in llama.cpp, a factor without a type scales
/// linearly, and the type `none` means that a factor is not used.
fn is_rope_scaled(metadata: &BTreeMap<String, String>) -> bool {
    let get =
        |name: &str| metadata.iter().find(|(key, _)| key.ends_with(name)).map(|(_, value)| value.as_str());
    let factor = get(".rope.scaling.factor").or_else(|| get(".rope.scale_linear"));
    match get(".rope.scaling.type").unwrap_or("linear") {
        "none" => false,
        // A factor of 0 is one that is not set.
        "linear" => factor.is_some_and(|factor| !matches!(factor.parse(), Ok(0.0 | 1.0))),
        _ => true,
    }
}

/// The share of a head of this width that rotates, if the metadata of a GGUF file says so.
fn rotated_share(metadata: &BTreeMap<String, String>, head_dim: usize) -> Option<f64> {
    let (_, count) = metadata.iter().find(|(key, _)| key.ends_with(".rope.dimension_count"))?;
    // What is not a number is a problem of the configuration.
    Some(count.parse().unwrap_or(f64::NAN) / head_dim as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(change: Value) -> Config {
        let mut config = json!({
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 36, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 100, "rope_theta": 1e6,
        });
        for (key, value) in change.as_object().unwrap() {
            config[key] = value.clone();
        }
        serde_json::from_value(config).unwrap()
    }

    fn problem(change: Value) -> Option<String> {
        parse(change).problem()
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
            (json!({ "vocab_size": 0 }), "vocab_size is 0"),
            (json!({ "vocab_size": 1u64 << 40 }), "vocab_size is 1099511627776, expected at most"),
        ] {
            let found = problem(wrong).unwrap();
            assert!(found.contains(word), "{found}");
        }
    }

    #[test]
    fn the_model_type_decides_the_encoder_and_its_states() {
        let qwen3 = parse(json!({ "model_type": "qwen3", "sliding_window": 4096 }));
        assert_eq!((qwen3.encoder(), qwen3.problem()), (&flux2::QWEN3, None));
        assert_eq!((qwen3.output_layers(), qwen3.layers(), qwen3.text_dim()), (&[9, 18, 27][..], 27, 192));
        let mistral = parse(json!({ "model_type": "mistral" }));
        assert_eq!((mistral.encoder(), mistral.problem()), (&flux2::MISTRAL, None));
        assert_eq!((mistral.output_layers(), mistral.layers()), (&[10, 20, 30][..], 30));
        assert!(problem(json!({ "model_type": "gemma" })).unwrap().contains("model_type is `gemma`"));
        let window = problem(json!({ "model_type": "mistral", "sliding_window": 4096 }));
        assert!(window.unwrap().contains("sliding window"));
    }

    #[test]
    fn the_language_model_of_a_model_that_sees_is_nested() {
        let text = json!({
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 40, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "vocab_size": 100,
        });
        let file =
            json!({ "model_type": "mistral3", "text_config": text, "vision_config": { "hidden_size": 8 } });
        let config: Config = serde_json::from_value(file).unwrap();
        assert_eq!((config.hidden_size, config.encoder()), (64, &flux2::MISTRAL));
        assert_eq!(config.rope_theta(), 1e9);
        let file = json!({ "model_type": "mistral3", "text_config": { "hidden_size": 64 } });
        let error = serde_json::from_value::<Config>(file).unwrap_err().to_string();
        assert!(error.contains("missing field `intermediate_size`"), "{error}");
    }

    #[test]
    fn states_beyond_the_last_layer_are_a_problem() {
        let config = parse(json!({ "text_encoder_out_layers": [0, 36] }));
        assert_eq!((config.problem(), config.layers(), config.text_dim()), (None, 36, 128));
        let found = config.with_output_layers(&[9, 40]).problem().unwrap();
        assert!(found.contains("num_hidden_layers is 36, but the state after layer 40"), "{found}");
        assert!(problem(json!({ "num_hidden_layers": 20 })).unwrap().contains("layer 27"));
    }

    #[test]
    fn gguf_metadata_tells_of_scaled_rotary_embeddings() {
        let scaled = |key: &str, value: &str| is_rope_scaled(&BTreeMap::from([(key.into(), value.into())]));
        assert!(scaled("qwen3.rope.scaling.type", "yarn") && scaled("qwen3.rope.scale_linear", "4"));
        assert!(!scaled("qwen3.rope.scaling.type", "none") && !scaled("qwen3.rope.scale_linear", "1.0"));
        assert!(!scaled("qwen3.rope.freq_base", "10000"));
        assert!(scaled("qwen3.rope.scaling.factor", "4") && scaled("qwen3.rope.scaling.factor", "x"));
        assert!(!scaled("qwen3.rope.scaling.factor", "1") && !scaled("qwen3.rope.scaling.factor", "0"));
        let both = |kind: &str, factor: &str| {
            let pairs = [("llama.rope.scaling.type", kind), ("llama.rope.scaling.factor", factor)];
            is_rope_scaled(&pairs.map(|(key, value)| (key.into(), value.into())).into())
        };
        assert!(both("linear", "2") && both("yarn", "1") && !both("none", "4") && !both("linear", "1"));
    }

    #[test]
    fn gguf_metadata_tells_how_much_of_a_head_rotates() {
        let share = |value: &str| {
            rotated_share(&BTreeMap::from([("qwen3.rope.dimension_count".into(), value.into())]), 16)
        };
        assert_eq!((share("16"), share("8")), (Some(1.0), Some(0.5)));
        assert!(share("x").unwrap().is_nan());
        assert_eq!(rotated_share(&BTreeMap::new(), 16), None);
        let config = Config { partial_rotary_factor: share("8"), ..parse(json!({})) };
        assert!(config.problem().unwrap().contains("partial_rotary_factor is 0.5"));
    }
}
