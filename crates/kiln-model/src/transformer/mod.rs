//! The FLUX.2 transformer: `velocity = transformer(text, image, references, sigma)`.
//!
//! ```text
//! text  [t, joint_dim] ──context_embedder──▶ [t, dim] ─┐                       (double blocks: two streams,
//! image [n, 128]       ──x_embedder───────▶ [n, dim] ─┴▶ double × L ──▶ joined ──▶ single × M ──▶ image rows
//!                                                                                 ──norm_out, proj_out──▶ [n, 128]
//! ```
//! Text comes first in every joined sequence, padding included: nothing is masked. One set of modulations, made from
//! the noise level, serves all double blocks (a set a stream), another all single blocks.
//!
//! References ride along in one of three ways ([`References`]): beside the image in every step; in the KV model once,
//! in the first step, between text and image, seeing only themselves and modulated as for t = 0, while their keys and
//! values are kept; and from then on as those kept keys and values.
//!
//! Several pictures go through as rows of one tensor: linear layers, norms and modulations don't ask whose a row is. Only
//! attention and the rotary embedding do (`attention.rs`, `call.rs`), so a picture comes out as it does alone.
//!
//! Easy to get wrong: `norm_out` gives (scale, shift) but the block modulations (shift, scale, gate); the SwiGLU gate
//! is the first half; keys are kept after the rotary embedding.

mod attention;
mod call;
mod double;
mod embed;
mod layers;
mod linear;
mod rope;
mod single;

use kiln_ops::{Backend, Groups, RopeTable, Run, Tensor as _};
use kiln_tensor::DType;
use kiln_weights::{Vars, WeightSource};
use serde::Deserialize;

use crate::ahead::Ahead;
use crate::{Event, Observer, ResidencyPlan, Result, config};
use attention::{Attention, join};
pub use call::{Answer, Call, Item, KvCache, Layout, References};
use call::{Inputs, Rows};
use double::DoubleBlock;
use embed::{Levels, ModulationSource, TimeEmbedding};
use linear::Linear;
pub use rope::Position;
use single::SingleBlock;

/// `transformer/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Latent channels of one token.
    pub in_channels: usize,
    /// Channels of the velocity; the input's when absent.
    pub out_channels: Option<usize>,
    /// Double blocks.
    pub num_layers: usize,
    /// Single blocks.
    pub num_single_layers: usize,
    /// Width of one head.
    pub attention_head_dim: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// Width of a text token: three hidden states side by side.
    pub joint_attention_dim: usize,
    /// Channels of the sinusoidal time embedding.
    #[serde(default = "default_time_channels")]
    pub timestep_guidance_channels: usize,
    /// Width of the MLP over the model's width.
    #[serde(default = "default_mlp_ratio")]
    pub mlp_ratio: f64,
    /// How many elements of a head each position axis (t, h, w, l) turns.
    #[serde(default = "default_axes")]
    pub axes_dims_rope: Vec<usize>,
    /// Base of the rotary frequencies.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Epsilon of every norm.
    #[serde(default = "default_eps")]
    pub eps: f32,
    /// Whether guidance is an input (FLUX.2 dev).
    #[serde(default)]
    pub guidance_embeds: bool,
    /// Latent patch; FLUX.2 patchifies outside of the transformer.
    #[serde(default = "default_patch")]
    pub patch_size: usize,
}

fn default_time_channels() -> usize {
    256
}
fn default_mlp_ratio() -> f64 {
    3.0
}
fn default_axes() -> Vec<usize> {
    vec![32; 4]
}
fn default_theta() -> f64 {
    2000.0
}
fn default_eps() -> f32 {
    1e-6
}
fn default_patch() -> usize {
    1
}

impl Config {
    /// The configuration that these tensors must have been saved with; what they don't tell is the same in all of FLUX.2.
    pub fn from_tensors(source: &WeightSource) -> Option<Config> {
        let side = |name: &str, axis: usize| source.entry(name)?.1.dims().get(axis).copied();
        let count = |blocks: &str| {
            let has = |i: &usize| source.contains(&format!("{blocks}.{i}.attn.norm_q.weight"));
            (0..).take_while(has).count()
        };
        let (doubles, singles) = (count("transformer_blocks"), count("single_transformer_blocks"));
        let norm = |blocks: &str| side(&format!("{blocks}.0.attn.norm_q.weight"), 0);
        let head = norm("transformer_blocks").or_else(|| norm("single_transformer_blocks"))?;
        let dim = side("x_embedder.weight", 0)?;
        let mlp = match side("transformer_blocks.0.ff.linear_out.weight", 1) {
            Some(mlp) => mlp,
            None => side("single_transformer_blocks.0.attn.to_out.weight", 1)?.checked_sub(dim)?,
        };
        const EMBEDDERS: &str = "time_guidance_embed";
        Some(Config {
            in_channels: side("x_embedder.weight", 1)?,
            out_channels: side("proj_out.weight", 0),
            num_layers: doubles,
            num_single_layers: singles,
            attention_head_dim: head,
            num_attention_heads: dim / head.max(1),
            joint_attention_dim: side("context_embedder.weight", 1)?,
            timestep_guidance_channels: side(&format!("{EMBEDDERS}.timestep_embedder.linear_1.weight"), 1)?,
            mlp_ratio: mlp as f64 / dim.max(1) as f64,
            axes_dims_rope: vec![head / 4; 4],
            rope_theta: default_theta(),
            eps: default_eps(),
            guidance_embeds: source.contains(&format!("{EMBEDDERS}.guidance_embedder.linear_1.weight")),
            patch_size: default_patch(),
        })
    }

    /// Width of the model.
    pub fn dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    fn mlp_dim(&self) -> usize {
        (self.dim() as f64 * self.mlp_ratio) as usize
    }

    /// What is wrong with these numbers, if anything is.
    pub fn problem(&self) -> Option<String> {
        let head = self.attention_head_dim;
        let sizes = [
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels.unwrap_or(self.in_channels)),
            ("attention_head_dim", head),
            ("num_attention_heads", self.num_attention_heads),
            ("joint_attention_dim", self.joint_attention_dim),
            ("timestep_guidance_channels", self.timestep_guidance_channels),
        ];
        let layers = [("num_layers", self.num_layers), ("num_single_layers", self.num_single_layers)];
        if let Some(problem) = config::absurd(&sizes, &layers) {
            return Some(problem);
        }
        let above_zero =
            [("rope_theta", self.rope_theta), ("mlp_ratio", self.mlp_ratio), ("eps", self.eps.into())];
        if let Some((name, value)) = above_zero.iter().find(|(_, v)| !(*v > 0.0 && *v < 1e6)) {
            return Some(format!("{name} must lie between 0 and a million, found {value}"));
        }
        if self.axes_dims_rope.len() != 4 || self.axes_dims_rope.iter().any(|d| !d.is_multiple_of(2)) {
            return Some(format!(
                "axes_dims_rope must be four even numbers, found {:?}",
                self.axes_dims_rope
            ));
        }
        if self.axes_dims_rope.iter().fold(0, |sum: usize, d| sum.saturating_add(*d)) != head {
            let found = &self.axes_dims_rope;
            return Some(format!("axes_dims_rope {found:?} must add up to attention_head_dim {head}"));
        }
        if !self.timestep_guidance_channels.is_multiple_of(2) || self.patch_size != 1 {
            return Some("timestep_guidance_channels must be even and patch_size 1".into());
        }
        None
    }
}

/// The transformer's weights on a backend.
pub struct Transformer<B: Backend> {
    /// Calls that the backend recorded, with these weights.
    replays: B::Replays,
    config: Config,
    dtype: DType,
    x_embedder: Linear<B>,
    context_embedder: Linear<B>,
    time_guidance_embed: TimeEmbedding<B>,
    double_stream_modulation_img: ModulationSource<B>,
    double_stream_modulation_txt: ModulationSource<B>,
    single_stream_modulation: ModulationSource<B>,
    transformer_blocks: Vec<DoubleBlock<B>>,
    single_transformer_blocks: Vec<SingleBlock<B>>,
    norm_out: Linear<B>,
    proj_out: Linear<B>,
    ahead: Ahead,
}

impl<B: Backend> Transformer<B> {
    /// Loads the transformer; activations will be `dtype`, and `plan` says which weights stay on the device.
    pub fn load(b: &B, vars: &Vars<'_>, config: &Config, dtype: DType, plan: &ResidencyPlan) -> Result<Self> {
        Self::load_blocks(b, vars, config, dtype, plan, &mut |_, _| Ok(()))
    }

    /// [`Transformer::load`], where `block` hears how many blocks of how many are loaded and may stop it.
    pub fn load_blocks(
        b: &B,
        vars: &Vars<'_>,
        config: &Config,
        dtype: DType,
        plan: &ResidencyPlan,
        block: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<Self> {
        let dim = config.dim();
        let weight = |name: &str, rows, cols| Linear::load(b, vars, plan, name, rows, cols);
        let modulation = |name: &str, sets| ModulationSource::load(b, &vars.at(name), plan, sets, dim);
        let doubles = vars.at("transformer_blocks");
        let singles = vars.at("single_transformer_blocks");
        let double_vars = (0..config.num_layers).map(|i| doubles.at(i));
        let single_vars = (0..config.num_single_layers).map(|i| singles.at(i));
        let total = config.num_layers + config.num_single_layers;
        let mut told = |done: usize| block(done, total);
        Ok(Transformer {
            dtype,
            ahead: Ahead::new(b, double_vars.chain(single_vars), true),
            x_embedder: weight("x_embedder", dim, config.in_channels)?,
            context_embedder: weight("context_embedder", dim, config.joint_attention_dim)?,
            time_guidance_embed: TimeEmbedding::load(b, &vars.at("time_guidance_embed"), plan, config)?,
            double_stream_modulation_img: modulation("double_stream_modulation_img", 2)?,
            double_stream_modulation_txt: modulation("double_stream_modulation_txt", 2)?,
            single_stream_modulation: modulation("single_stream_modulation", 1)?,
            transformer_blocks: (0..config.num_layers)
                .map(|i| {
                    let block = DoubleBlock::load(b, &doubles.at(i), plan, config)?;
                    told(i + 1)?;
                    Ok(block)
                })
                .collect::<Result<_>>()?,
            single_transformer_blocks: (0..config.num_single_layers)
                .map(|i| {
                    let block = SingleBlock::load(b, &singles.at(i), plan, config)?;
                    told(config.num_layers + i + 1)?;
                    Ok(block)
                })
                .collect::<Result<_>>()?,
            norm_out: weight("norm_out.linear", 2 * dim, dim)?,
            proj_out: weight("proj_out", config.out_channels.unwrap_or(config.in_channels), dim)?,
            replays: B::Replays::default(),
            config: config.clone(),
        })
    }

    /// Takes the LoRAs of `vars` instead of those that were laid over the loaded weights; everything else about `vars` is as
    /// it was for loading. All or nothing: after an error it computes as before.
    pub fn set_loras(&mut self, b: &B, vars: &Vars<'_>) -> Result<()> {
        let root = vars.root();
        let mut layers = self.linears();
        let relaid = layers.iter().map(|layer| layer.relaid(b, &root)).collect::<Result<Vec<_>>>()?;
        layers.iter_mut().zip(relaid).for_each(|(layer, relaid)| **layer = relaid);
        self.replays = B::Replays::default();
        Ok(())
    }

    /// Every linear layer.
    fn linears(&mut self) -> Vec<&mut Linear<B>> {
        let mut all = vec![&mut self.x_embedder, &mut self.context_embedder];
        all.extend(self.time_guidance_embed.linears());
        all.push(self.double_stream_modulation_img.linear());
        all.push(self.double_stream_modulation_txt.linear());
        all.push(self.single_stream_modulation.linear());
        all.extend(self.transformer_blocks.iter_mut().flat_map(DoubleBlock::linears));
        all.extend(self.single_transformer_blocks.iter_mut().flat_map(SingleBlock::linears));
        all.extend([&mut self.norm_out, &mut self.proj_out]);
        all
    }

    /// The configuration it was loaded with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Rotary tables for text at `text` and the image stream at `image`, in the order the stream will have:
    /// references after the image, or before it when they are to be extracted.
    pub fn layout(&self, b: &B, text: &[Position], image: &[Position]) -> Result<Layout<B>> {
        let table = |positions: &[Position]| rope::table(b, &self.config, positions);
        let (text, image) = (table(text)?, table(image)?);
        let cos = b.concat_rows(&[&text.cos, &image.cos])?;
        let sin = b.concat_rows(&[&text.sin, &image.sin])?;
        let joined = RopeTable { cos, sin, pairs: text.pairs };
        Ok(Layout { text, image, joined })
    }

    /// What it says of every picture, in their order. It is the same whichever others there are.
    pub fn forward(
        &self,
        b: &B,
        call: &Call<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<Answer<B>>> {
        let moment = self.time_guidance_embed.moment(b, call.timestep, call.guidance)?;
        let rows = Rows::new(b, call.items, self.config.num_attention_heads, moment)?;
        let mut attention = rows.attention();
        let velocity = match rows.is_plain() && !observer.looks_inside() {
            true => self.replayed(b, &rows, observer)?,
            false => self.velocity(b, &rows, &rows.inputs, call.guidance, &mut attention, observer)?,
        };
        let (mut start, mut results) = (0, Vec::with_capacity(rows.own.len()));
        for (own, cache) in rows.own.iter().zip(attention.into_caches()) {
            self.see_cache(&cache, observer)?;
            let velocity = b.slice_rows(&velocity, start..start + own.len())?;
            results.push(Answer { velocity, cache });
            start += own.len();
        }
        Ok(results)
    }

    /// [`Transformer::velocity`] of a call whose inputs alone change, so that a backend may do again what it did before.
    fn replayed(&self, b: &B, rows: &Rows<'_, B>, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let mut told = false;
        let velocity = b.replay(&self.replays, &rows.key(), &rows.inputs.list(), |b, run, list| {
            let (inputs, mut nobody) = (Inputs::of(list)?, ());
            let observer: &mut dyn Observer<B> = match run {
                Run::Now => &mut *observer,
                Run::Recorded => &mut nobody,
            };
            told |= run == Run::Now;
            self.velocity(b, rows, &inputs, None, &mut rows.attention(), observer)
        })?;
        // Nobody hears of blocks while they are replayed, but whoever counts them is told of as many.
        let total = self.blocks();
        (1..=total).filter(|_| !told).try_for_each(|done| observer.event(Event::Block { done, total }))?;
        Ok(velocity)
    }

    /// How many blocks a call goes through.
    fn blocks(&self) -> usize {
        self.transformer_blocks.len() + self.single_transformer_blocks.len()
    }

    /// The velocities of all pictures' image tokens, below each other. `guidance` is that of reference tokens that are being
    /// extracted.
    fn velocity(
        &self,
        b: &B,
        rows: &Rows<'_, B>,
        inputs: &Inputs<B>,
        guidance: Option<f32>,
        attention: &mut Attention<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let time = self.time_guidance_embed.forward(b, &inputs.moment)?;
        observer.see("temb", &time.embedding)?;
        // Reference tokens that are being extracted get the modulation of t = 0, as their own group of rows.
        let still = match rows.image_runs.any_still() {
            true => {
                let still = self.time_guidance_embed.moment(b, 0.0, guidance)?;
                self.time_guidance_embed.forward(b, &still)?.silu
            }
            false => time.silu.clone(),
        };
        let levels = Levels { now: &time.silu, still: &still };
        let image_mod = self.double_stream_modulation_img.double(b, &levels, &rows.image_runs)?;
        let text_mod = self.double_stream_modulation_txt.double(b, &levels, &rows.text_runs)?;
        let single_mod = self.single_stream_modulation.single(b, &levels, &rows.joined_runs)?;

        let mut image = b.linear(&b.cast(&inputs.image, self.dtype)?, &self.x_embedder)?;
        let mut text = b.linear(&b.cast(&inputs.text, self.dtype)?, &self.context_embedder)?;
        observer.see("x_embedder", &image)?;
        observer.see("context_embedder", &text)?;

        let layout = &inputs.layout;
        let total = self.blocks();
        for (i, block) in self.transformer_blocks.iter().enumerate() {
            self.ahead.begin(i);
            (text, image) = block.forward(b, text, image, &text_mod, &image_mod, layout, attention)?;
            observer.see(&format!("double{i}.txt"), &text)?;
            observer.see(&format!("double{i}.img"), &image)?;
            observer.event(Event::Block { done: i + 1, total })?;
        }
        let mut joined = attention.joined(b, &text, &image)?;
        for (i, block) in self.single_transformer_blocks.iter().enumerate() {
            self.ahead.begin(self.transformer_blocks.len() + i);
            joined = block.forward(b, joined, &single_mod, &layout.joined, attention)?;
            observer.see(&format!("single{i}"), &joined)?;
            observer.event(Event::Block { done: self.transformer_blocks.len() + i + 1, total })?;
        }

        let own = rows.own.iter().map(|own| Ok(b.slice_rows(&joined, own.clone())?));
        let image = join(b, own.collect::<Result<_>>()?)?;
        let dim = self.config.dim();
        let [scale, shift] = b.linear_split(&time.silu, &self.norm_out, [dim, dim])?;
        let images = Groups::one(image.shape().rows());
        let image = b.ada_layer_norm(&image, &scale, &shift, &images, self.config.eps)?;
        observer.see("norm_out", &image)?;
        let velocity = b.cast(&b.linear(&image, &self.proj_out)?, DType::F32)?;
        observer.see("transformer_out", &velocity)?;
        Ok(velocity)
    }

    fn see_cache(&self, cache: &Option<KvCache<B>>, observer: &mut dyn Observer<B>) -> Result<()> {
        for (i, [k, v]) in cache.iter().flat_map(|c| c.blocks.iter().enumerate()) {
            let doubles = self.transformer_blocks.len();
            let block = if i < doubles { format!("double{i}") } else { format!("single{}", i - doubles) };
            observer.see(&format!("kv.{block}.k"), k)?;
            observer.see(&format!("kv.{block}.v"), v)?;
        }
        Ok(())
    }
}
