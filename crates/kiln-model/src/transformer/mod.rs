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
mod config;
mod double;
mod embed;
mod layers;
mod layout;
mod linear;
mod rope;
mod runs;
mod single;

use kiln_ops::{Backend, Groups, RopeTable, Run, Tensor as _};
use kiln_tensor::DType;
use kiln_weights::Vars;

use crate::ahead::Ahead;
use crate::{Event, Observer, ResidencyPlan, Result};
use attention::{Attention, join};
pub use call::{Answer, Call, Item, References};
use call::{Inputs, Rows};
pub use config::Config;
use double::DoubleBlock;
use embed::{Levels, ModulationSource, TimeEmbedding};
pub use layout::{KvCache, Layout};
use linear::Linear;
pub use rope::Position;
use single::SingleBlock;

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
