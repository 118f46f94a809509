//! The FLUX.2 transformer: `velocity = transformer(text, image, references, sigma)`.
//!
//! ```text
//! text  [t, joint_dim] ──context_embedder──▶ [t, dim] ─┐
//!                                                      ├▶ double blocks ──▶ joined [t + n, dim] ──▶ single blocks
//! image [n, 128] ──x_embedder──────────────▶ [n, dim] ─┘    ──▶ image rows [n, dim] ──norm_out, proj_out──▶ [n, 128]
//! ```
//! Text comes first in every joined sequence, padding included: nothing is masked. One set of modulations, computed from
//! the timestep, serves all double blocks (one per stream), another all single blocks.
//!
//! Reference images take part in one of three ways ([`References`]): as tokens behind the image in every step; in the first
//! step of the KV model as tokens between text and image, which see only themselves, are modulated for t = 0 and whose keys
//! and values are extracted; in its later steps as these cached keys and values.
//!
//! The images of a batch are rows of one tensor: linear layers, norms and modulations don't depend on which image a row
//! belongs to. Only attention and the rotary embedding do (`attention.rs`, `batch.rs`), so an image's result does not depend
//! on the rest of the batch.
//!
//! Easy to get wrong: `norm_out` gives (scale, shift), but the block modulations are (shift, scale, gate); the SwiGLU gate
//! is the first half; keys are cached after the rotary embedding.

mod attention;
mod batch;
mod config;
mod double;
mod embed;
mod layers;
mod linear;
mod modulation;
mod rope;
mod row_levels;
mod single;
mod step_cache;
pub mod training;

use std::ops::Range;

use kiln_ops::{AttentionMask, AttentionSpec, Backend, RopeTable, RowGroups, RunMode, Tensor as _};
use kiln_tensor::DType;
use kiln_weights::{LinearPrecision, Vars};

use crate::prefetch::Prefetcher;
use crate::{Event, Observer, ResidencyPlan, Result};
pub use attention::KvCache;
use attention::{BatchAttention, concat};
pub use batch::{BatchItem, Prediction, References, TransformerBatch};
use batch::{GraphInputs, StackedBatch};
pub use config::Config;
use double::DoubleBlock;
use embed::TimestepEmbedder;
use linear::Linear;
use modulation::{DoubleModulation, ModulationInputs, ModulationProjection, SingleModulation};
pub use rope::{Position, RopeTables};
use single::SingleBlock;
pub use step_cache::{FirstBlocks, StepCache};

/// A part of the forward pass that a backend may record by itself.
#[derive(Clone, Copy)]
enum Stage {
    /// All of it.
    Whole,
    /// The embeddings and the first block.
    FirstBlock,
    /// All blocks but the first.
    OtherBlocks,
}

/// What the timestep conditions: the modulations of all blocks, and its embedding after SiLU.
struct Modulations<B: Backend> {
    silu: B::Tensor,
    /// Of the image and text streams; `None` without double blocks.
    double: Option<[DoubleModulation<B>; 2]>,
    single: SingleModulation<B>,
}

/// The transformer's weights on a backend.
pub struct Transformer<B: Backend> {
    /// Forward passes that the backend recorded, with these weights.
    graphs: B::GraphCache,
    config: Config,
    dtype: DType,
    /// Whether attention may round to 8 bits, as the blocks' linear layers do.
    eight_bit_attention: bool,
    x_embedder: Linear<B>,
    context_embedder: Linear<B>,
    time_guidance_embed: TimestepEmbedder<B>,
    /// Of the image and text streams; `None` without double blocks.
    double_stream_modulation: Option<[ModulationProjection<B>; 2]>,
    single_stream_modulation: ModulationProjection<B>,
    transformer_blocks: Vec<DoubleBlock<B>>,
    single_transformer_blocks: Vec<SingleBlock<B>>,
    norm_out: Linear<B>,
    proj_out: Linear<B>,
    prefetcher: Prefetcher,
}

impl<B: Backend> Transformer<B> {
    /// Loads the transformer; activations are `dtype`, and `plan` decides which weights stay on the device.
    pub fn load(b: &B, vars: &Vars<'_>, config: &Config, dtype: DType, plan: &ResidencyPlan) -> Result<Self> {
        Self::load_with_progress(b, vars, config, dtype, plan, &mut |_, _| Ok(()))
    }

    /// [`Transformer::load`] that calls `progress` with the numbers of loaded and of all blocks; an error stops it.
    pub fn load_with_progress(
        b: &B,
        vars: &Vars<'_>,
        config: &Config,
        dtype: DType,
        plan: &ResidencyPlan,
        progress: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<Self> {
        let dim = config.dim();
        let weight = |name: &str, rows, cols| Linear::load(b, vars, plan, name, rows, cols);
        let modulation = |name: &str, sets| ModulationProjection::load(b, &vars.at(name), plan, sets, dim);
        let double_modulation = || {
            let image = modulation("double_stream_modulation_img", 2)?;
            Ok::<_, crate::Error>([image, modulation("double_stream_modulation_txt", 2)?])
        };
        let doubles = vars.at("transformer_blocks");
        let singles = vars.at("single_transformer_blocks");
        let double_vars = (0..config.num_layers).map(|i| doubles.at(i));
        let single_vars = (0..config.num_single_layers).map(|i| singles.at(i));
        let total = config.num_layers + config.num_single_layers;
        let mut loaded = |done: usize| progress(done, total);
        Ok(Transformer {
            dtype,
            eight_bit_attention: vars.precision() == LinearPrecision::Fp8,
            prefetcher: Prefetcher::new(b, double_vars.chain(single_vars), true),
            x_embedder: weight("x_embedder", dim, config.in_channels)?,
            context_embedder: weight("context_embedder", dim, config.joint_attention_dim)?,
            time_guidance_embed: TimestepEmbedder::load(b, &vars.at("time_guidance_embed"), plan, config)?,
            double_stream_modulation: (config.num_layers > 0).then(double_modulation).transpose()?,
            single_stream_modulation: modulation("single_stream_modulation", 1)?,
            transformer_blocks: (0..config.num_layers)
                .map(|i| {
                    let block = DoubleBlock::load(b, &doubles.at(i), plan, config)?;
                    loaded(i + 1)?;
                    Ok(block)
                })
                .collect::<Result<_>>()?,
            single_transformer_blocks: (0..config.num_single_layers)
                .map(|i| {
                    let block = SingleBlock::load(b, &singles.at(i), plan, config)?;
                    loaded(config.num_layers + i + 1)?;
                    Ok(block)
                })
                .collect::<Result<_>>()?,
            norm_out: weight("norm_out.linear", 2 * dim, dim)?,
            proj_out: weight("proj_out", config.out_channels.unwrap_or(config.in_channels), dim)?,
            graphs: B::GraphCache::default(),
            config: config.clone(),
        })
    }

    /// Another transformer on the same weights, with activations of `dtype` and the LoRAs of `vars`, which must otherwise
    /// be the same as when loading.
    pub fn share(&self, b: &B, vars: &Vars<'_>, dtype: DType) -> Result<Self> {
        let mut shared = Transformer {
            graphs: B::GraphCache::default(),
            config: self.config.clone(),
            dtype,
            eight_bit_attention: self.eight_bit_attention,
            x_embedder: self.x_embedder.clone(),
            context_embedder: self.context_embedder.clone(),
            time_guidance_embed: self.time_guidance_embed.clone(),
            double_stream_modulation: self.double_stream_modulation.clone(),
            single_stream_modulation: self.single_stream_modulation.clone(),
            transformer_blocks: self.transformer_blocks.clone(),
            single_transformer_blocks: self.single_transformer_blocks.clone(),
            norm_out: self.norm_out.clone(),
            proj_out: self.proj_out.clone(),
            prefetcher: self.prefetcher.clone(),
        };
        shared.set_loras(b, vars)?;
        Ok(shared)
    }

    /// Replaces the LoRAs with those of `vars`, which must otherwise be the same as when loading. After an error the
    /// old LoRAs are still in place.
    pub fn set_loras(&mut self, b: &B, vars: &Vars<'_>) -> Result<()> {
        let root = vars.root();
        let mut layers = self.linears();
        let updated = layers.iter().map(|layer| layer.with_loras(b, &root)).collect::<Result<Vec<_>>>()?;
        layers.iter_mut().zip(updated).for_each(|(layer, updated)| **layer = updated);
        self.graphs = B::GraphCache::default();
        Ok(())
    }

    /// All linear layers.
    fn linears(&mut self) -> Vec<&mut Linear<B>> {
        let mut all = vec![&mut self.x_embedder, &mut self.context_embedder];
        all.extend(self.time_guidance_embed.linears());
        let double = self.double_stream_modulation.iter_mut().flatten();
        all.extend(double.map(ModulationProjection::linear));
        all.push(self.single_stream_modulation.linear());
        all.extend(self.transformer_blocks.iter_mut().flat_map(DoubleBlock::linears));
        all.extend(self.single_transformer_blocks.iter_mut().flat_map(SingleBlock::linears));
        all.extend([&mut self.norm_out, &mut self.proj_out]);
        all
    }

    /// The dtype of activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The configuration it was loaded with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Computes the rotary tables for the positions of the text and of the image stream, in the stream's order: references
    /// after the image, or before it when their keys and values are extracted.
    pub fn rope_tables(&self, b: &B, text: &[Position], image: &[Position]) -> Result<RopeTables<B>> {
        let table = |positions: &[Position]| rope::table(b, &self.config, positions);
        let (text, image) = (table(text)?, table(image)?);
        let cos = b.concat_rows(&[&text.cos, &image.cos])?;
        let sin = b.concat_rows(&[&text.sin, &image.sin])?;
        let joined = RopeTable { cos, sin, pairs: text.pairs };
        Ok(RopeTables { text, image, joined })
    }

    /// Predicts the velocity of every image of the batch, in order. A result does not depend on the rest of the batch.
    pub fn forward(
        &self,
        b: &B,
        batch: &TransformerBatch<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<Prediction<B>>> {
        let timestep = self.time_guidance_embed.project(b, batch.timestep, batch.guidance)?;
        let stacked = StackedBatch::new(b, batch.items, &self.attention_spec(), timestep)?;
        let mut attention = stacked.attention();
        let velocity = if stacked.is_replayable() && !observer.wants_tensors() {
            self.replay(b, Stage::Whole, &stacked, &stacked.inputs, observer)?
        } else {
            self.velocity(b, &stacked, &stacked.inputs, batch.guidance, &mut attention, observer)?
        };
        let (mut start, mut predictions) = (0, Vec::with_capacity(batch.items.len()));
        for (rows, cache) in stacked.image_rows.iter().zip(attention.into_caches()) {
            self.inspect_cache(&cache, observer)?;
            let velocity = b.slice_rows(&velocity, start..start + rows.len())?;
            predictions.push(Prediction { velocity, cache });
            start += rows.len();
        }
        Ok(predictions)
    }

    /// Runs a stage of the forward pass through [`Backend::replay`]: a backend may record it as a graph, and launch that
    /// graph again with other inputs.
    fn replay(
        &self,
        b: &B,
        stage: Stage,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let mut executed = false;
        let mut key = batch.key();
        key.push(stage as usize);
        let result = b.replay(&self.graphs, &key, &inputs.tensors(), |b, run, tensors| {
            let (inputs, mut nobody) = (GraphInputs::from_tensors(tensors)?, ());
            let observer: &mut dyn Observer<B> = match run {
                RunMode::Execute => &mut *observer,
                RunMode::Record => &mut nobody,
            };
            executed |= run == RunMode::Execute;
            self.run(b, stage, batch, &inputs, observer)
        })?;
        // A replayed graph sends no events; report its blocks for observers that count them.
        if !executed {
            let total = self.block_count();
            let blocks = match stage {
                Stage::Whole => 0..total,
                Stage::FirstBlock => 0..1,
                Stage::OtherBlocks => 1..total,
            };
            self.report_blocks(blocks, observer)?;
        }
        Ok(result)
    }

    /// Runs a stage of the forward pass of a batch without extracted or cached references.
    fn run(
        &self,
        b: &B,
        stage: Stage,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let attention = &mut batch.attention();
        match stage {
            Stage::Whole => self.velocity(b, batch, inputs, None, attention, observer),
            Stage::FirstBlock => self.first_block(b, batch, inputs, attention, observer),
            Stage::OtherBlocks => self.other_blocks(b, batch, inputs, attention, observer),
        }
    }

    /// Reports blocks as finished.
    fn report_blocks(&self, blocks: Range<usize>, observer: &mut dyn Observer<B>) -> Result<()> {
        let total = self.block_count();
        blocks.into_iter().try_for_each(|i| observer.event(Event::Block { done: i + 1, total }))
    }

    /// The attention of an image without references.
    fn attention_spec(&self) -> AttentionSpec {
        let heads = self.config.num_attention_heads;
        AttentionSpec {
            eight_bits: self.eight_bit_attention,
            ..AttentionSpec::new(heads, heads, AttentionMask::None)
        }
    }

    /// Number of double and single blocks.
    fn block_count(&self) -> usize {
        self.transformer_blocks.len() + self.single_transformer_blocks.len()
    }

    /// Computes the velocities of all image tokens, `[Σ n, 128]`. `guidance` is for references that are being extracted.
    fn velocity(
        &self,
        b: &B,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        guidance: Option<f32>,
        attention: &mut BatchAttention<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let m = self.modulations(b, batch, inputs, guidance, observer)?;
        let streams = self.embed(b, inputs, observer)?;
        let image = self.blocks(b, 0, streams, &m, batch, inputs, attention, observer)?;
        self.output(b, &image, &m.silu, observer)
    }

    /// Computes the modulations of all blocks.
    fn modulations(
        &self,
        b: &B,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        guidance: Option<f32>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Modulations<B>> {
        let time = self.time_guidance_embed.forward(b, &inputs.timestep)?;
        observer.inspect("temb", &time.embedding)?;
        // References that are being extracted are modulated for t = 0, as their own group of rows.
        let clean = if batch.image_levels.has_clean() {
            let clean = self.time_guidance_embed.project(b, 0.0, guidance)?;
            self.time_guidance_embed.forward(b, &clean)?.silu
        } else {
            time.silu.clone()
        };
        let silu = ModulationInputs { current: &time.silu, clean: &clean };
        let double = |[image, text]: &[ModulationProjection<B>; 2]| {
            let image = image.double(b, &silu, &batch.image_levels)?;
            Ok::<_, crate::Error>([image, text.double(b, &silu, &batch.text_levels)?])
        };
        Ok(Modulations {
            double: self.double_stream_modulation.as_ref().map(double).transpose()?,
            single: self.single_stream_modulation.single(b, &silu, &batch.joined_levels)?,
            silu: time.silu,
        })
    }

    /// Embeds the text tokens and the tokens of the image streams.
    fn embed(
        &self,
        b: &B,
        inputs: &GraphInputs<B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<[B::Tensor; 2]> {
        let image = b.linear(&b.cast(&inputs.image, self.dtype)?, &self.x_embedder)?;
        let text = b.linear(&b.cast(&inputs.text, self.dtype)?, &self.context_embedder)?;
        observer.inspect("x_embedder", &image)?;
        observer.inspect("context_embedder", &text)?;
        Ok([text, image])
    }

    /// Runs double block `i` on the text and image streams.
    #[expect(clippy::too_many_arguments, reason = "two streams and everything that conditions them")]
    fn double_block(
        &self,
        b: &B,
        i: usize,
        [text, image]: [B::Tensor; 2],
        [image_mod, text_mod]: &[DoubleModulation<B>; 2],
        inputs: &GraphInputs<B>,
        attention: &mut BatchAttention<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<[B::Tensor; 2]> {
        self.prefetcher.prefetch_after(i);
        let block = &self.transformer_blocks[i];
        let (text, image) = block.forward(b, text, image, text_mod, image_mod, &inputs.rope, attention)?;
        observer.inspect(&format!("double{i}.txt"), &text)?;
        observer.inspect(&format!("double{i}.img"), &image)?;
        observer.event(Event::Block { done: i + 1, total: self.block_count() })?;
        Ok([text, image])
    }

    /// Runs all blocks from double block `first` on. Returns the rows of the images' own tokens, `[Σ n, dim]`.
    #[expect(clippy::too_many_arguments, reason = "two streams and everything that conditions them")]
    fn blocks(
        &self,
        b: &B,
        first: usize,
        mut streams: [B::Tensor; 2],
        m: &Modulations<B>,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        attention: &mut BatchAttention<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let (doubles, total) = (self.transformer_blocks.len(), self.block_count());
        if let Some(modulation) = &m.double {
            for i in first..doubles {
                streams = self.double_block(b, i, streams, modulation, inputs, attention, observer)?;
            }
        }
        let [text, image] = streams;
        let mut joined = attention.join_streams(b, &text, &image)?;
        for (i, block) in self.single_transformer_blocks.iter().enumerate() {
            self.prefetcher.prefetch_after(doubles + i);
            joined = block.forward(b, joined, &m.single, &inputs.rope.joined, attention)?;
            observer.inspect(&format!("single{i}"), &joined)?;
            observer.event(Event::Block { done: doubles + i + 1, total })?;
        }
        let images = batch.image_rows.iter().map(|rows| Ok(b.slice_rows(&joined, rows.clone())?));
        concat(b, images.collect::<Result<_>>()?)
    }

    /// Projects image tokens after the last block, `[n, dim]`, to velocities, `[n, 128]`.
    fn output(
        &self,
        b: &B,
        image: &B::Tensor,
        silu: &B::Tensor,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let dim = self.config.dim();
        let [scale, shift] = b.linear_split(silu, &self.norm_out, [dim, dim])?;
        let groups = RowGroups::single(image.shape().rows());
        let image = b.ada_layer_norm(image, &scale, &shift, &groups, self.config.eps)?;
        observer.inspect("norm_out", &image)?;
        let velocity = b.cast(&b.linear(&image, &self.proj_out)?, DType::F32)?;
        observer.inspect("transformer_out", &velocity)?;
        Ok(velocity)
    }

    fn inspect_cache(&self, cache: &Option<KvCache<B>>, observer: &mut dyn Observer<B>) -> Result<()> {
        for (i, [k, v]) in cache.iter().flat_map(|c| c.blocks().iter().enumerate()) {
            let doubles = self.transformer_blocks.len();
            let block = if i < doubles { format!("double{i}") } else { format!("single{}", i - doubles) };
            observer.inspect(&format!("kv.{block}.k"), k)?;
            observer.inspect(&format!("kv.{block}.v"), v)?;
        }
        Ok(())
    }
}
