//! The configuration of the vision tower: the `vision_config` of a text encoder's `config.json`, or what its tensors tell.

use kiln_weights::WeightSource;
use serde::Deserialize;
use serde_json::Value;

use crate::config;

/// Epsilon of every norm.
pub const EPS: f32 = 1e-5;

/// Side of a square of patches that the projector merges to one token.
pub const MERGED_PATCHES: usize = 2;

/// The `vision_config` of a `config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Width of the tower.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of heads.
    pub num_attention_heads: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Base of the rotary frequencies.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Longest side of an image in pixels.
    #[serde(default = "default_side")]
    pub image_size: usize,
}

fn default_theta() -> f64 {
    1e4
}

fn default_side() -> usize {
    1540
}

/// The tensor by which a vision tower is recognized.
const ANCHOR: &str = "vision_tower.patch_conv.weight";

/// Width of a head, unless a configuration says otherwise.
const HEAD_DIM: usize = 64;

impl Config {
    /// Reads the configuration of the tower in these weights, with the text encoder's `config.json` if there is one. The
    /// error says what is missing or wrong.
    pub fn read(weights: &WeightSource, json: Option<&str>) -> Result<Config, String> {
        let Some((_, kernel)) = weights.entry(ANCHOR) else {
            return Err(format!(
                "it has no vision tower (no tensor `{ANCHOR}`), which reads the images of an edit"
            ));
        };
        let json = json.and_then(|text| serde_json::from_str::<Value>(text).ok());
        let stated = json.and_then(|mut file| file.get_mut("vision_config").map(Value::take));
        let config = match stated {
            Some(stated) => {
                serde_json::from_value(stated).map_err(|error| format!("vision_config: {error}"))?
            }
            None => Config::from_tensors(weights, kernel.dims()).ok_or("its vision tower is not complete")?,
        };
        config.problem().map_or(Ok(config), Err)
    }

    fn from_tensors(weights: &WeightSource, kernel: &[usize]) -> Option<Config> {
        let &[hidden_size, _, patch_size, _] = kernel else { return None };
        let mlp = "vision_tower.transformer.layers.0.feed_forward.gate_proj.weight";
        let has = |i: &usize| {
            weights.contains(&format!("vision_tower.transformer.layers.{i}.attention_norm.weight"))
        };
        Some(Config {
            hidden_size,
            intermediate_size: *weights.entry(mlp)?.1.dims().first()?,
            num_hidden_layers: (0..).take_while(has).count(),
            num_attention_heads: (hidden_size / HEAD_DIM).max(1),
            patch_size,
            rope_theta: default_theta(),
            image_size: default_side(),
        })
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads.max(1)
    }

    /// Side in pixels of the square that becomes one token.
    pub fn token_side(&self) -> usize {
        MERGED_PATCHES * self.patch_size
    }

    fn problem(&self) -> Option<String> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("patch_size", self.patch_size),
            ("image_size", self.image_size),
        ];
        if let Some(problem) =
            config::implausible_size(&sizes, &[("num_hidden_layers", self.num_hidden_layers)])
        {
            return Some(format!("vision_config: {problem}"));
        }
        let dim = self.head_dim();
        (dim * self.num_attention_heads != self.hidden_size || !dim.is_multiple_of(4)).then(|| {
            let (heads, width) = (self.num_attention_heads, self.hidden_size);
            format!("vision_config: {heads} heads can't share a width of {width}")
        })
    }
}
