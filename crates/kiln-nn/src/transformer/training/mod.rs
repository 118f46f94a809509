//! The forward pass that keeps what the backward pass needs, and the backward pass: gradients of [`Adapters`] from the
//! gradient of the velocity.
//!
//! ```text
//! embed ─▶ double blocks ─▶ join ─▶ single blocks ─▶ image rows ─▶ norm_out, proj_out ─▶ velocity
//!            ◀─ text, image ─ split ◀─ joined ─────── zeros for text and references ◀──── d velocity
//! ```
//! The model is frozen. Gradients flow back through it as far as the first block with an adapter, and within that block as
//! far as its first adapted layer; embedders and modulations are never reached. Every block knows how to go back
//! (`double.rs`, `single.rs`) from the tensors it kept, its *tape*. Norms, rotary embeddings and SwiGLU are computed again:
//! that is cheaper than keeping their results. With [`Keep::BlockInputs`] a block keeps its input only and runs again, too.
//!
//! Every example of a batch has its own noise level, so modulations have one group of rows per example.

mod attention;
mod conditioning;
mod double;
mod item;
mod linear;
mod single;

use kiln_ops::{AttentionSpec, RowGroups, TrainingBackend};
use kiln_tensor::DType;

use super::Transformer;
use super::attention::concat;
use super::batch::{BatchItem, References, StackedBatch};
use super::embed::TimestepProjection;
use super::modulation::ModulationProjection;
use crate::Result;
use attention::ExampleRows;
use conditioning::Conditioning;
use double::{DoubleTape, Streams};
pub use item::TrainingItem;
pub use linear::{Adapters, LayerStack};
use single::SingleTape;

/// What a forward pass keeps for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Every block's activations.
    Activations,
    /// Every block's input; its activations are computed again.
    BlockInputs,
    /// Nothing: there is no backward pass.
    Nothing,
}

/// What a forward pass kept.
pub struct Tape<B: TrainingBackend, A: Adapters<B>> {
    conditioning: Conditioning<B>,
    doubles: Vec<BlockTape<Streams<B>, DoubleTape<B, A>>>,
    singles: Vec<BlockTape<B::Tensor, SingleTape<B, A>>>,
    /// The image rows after the last block.
    image: B::Tensor,
}

/// What one block keeps.
enum BlockTape<X, T> {
    /// Nothing: no layer up to this block has an adapter.
    Nothing,
    /// Its input.
    Input(X),
    /// Its activations.
    Activations(T),
}

impl<B: TrainingBackend> Transformer<B> {
    /// Predicts the velocities of all examples' image tokens, f32 `[Σ n, channels]`, with adapters.
    pub fn forward_training<A: Adapters<B>>(
        &self,
        b: &B,
        items: &[TrainingItem<'_, B>],
        guidance: Option<f32>,
        adapters: &A,
        keep: Keep,
    ) -> Result<(B::Tensor, Tape<B, A>)> {
        let (conditioning, [mut text, mut image]) = self.condition(b, items, guidance)?;
        let c = &conditioning;
        let kept = |first: Option<usize>, block: usize| match first {
            Some(first) if block >= first => keep,
            _ => Keep::Nothing,
        };
        let first = self.first_adapted_block(adapters);
        let mut doubles = Vec::with_capacity(self.transformer_blocks.len());
        for (i, block) in self.transformer_blocks.iter().enumerate() {
            self.prefetcher.prefetch_after(i);
            let (streams, tape) = block.forward_training(b, [&text, &image], c, adapters)?;
            doubles.push(match kept(first, i) {
                Keep::Nothing => BlockTape::Nothing,
                Keep::BlockInputs => BlockTape::Input([text, image]),
                Keep::Activations => BlockTape::Activations(tape),
            });
            [text, image] = streams;
        }
        let mut joined = attention::join(b, &c.rows, &text, &image)?;
        drop([text, image]);
        let mut singles = Vec::with_capacity(self.single_transformer_blocks.len());
        for (i, block) in self.single_transformer_blocks.iter().enumerate() {
            let index = self.transformer_blocks.len() + i;
            self.prefetcher.prefetch_after(index);
            let (next, tape) = block.forward_training(b, &joined, c, adapters)?;
            singles.push(match kept(first, index) {
                Keep::Nothing => BlockTape::Nothing,
                Keep::BlockInputs => BlockTape::Input(joined),
                Keep::Activations => BlockTape::Activations(tape),
            });
            joined = next;
        }
        let images = c.rows.iter().map(|rows| Ok(b.slice_rows(&joined, rows.joined_image())?));
        let image = concat(b, images.collect::<Result<_>>()?)?;
        let [scale, shift] = &c.norm_out;
        let normed = b.ada_layer_norm(&image, scale, shift, &c.image_groups, self.config.eps)?;
        let velocity = b.cast(&b.linear(&normed, &self.proj_out)?, DType::F32)?;
        Ok((velocity, Tape { conditioning, doubles, singles, image }))
    }

    /// Adds the gradients of the adapters, from the gradient of the velocity that [`Transformer::forward_training`] predicted.
    pub fn backward<A: Adapters<B>>(
        &self,
        b: &B,
        tape: Tape<B, A>,
        d_velocity: &B::Tensor,
        adapters: &mut A,
    ) -> Result<()> {
        let Tape { conditioning: c, doubles, singles, image } = tape;
        let Some(first) = self.first_adapted_block(adapters) else { return Ok(()) };
        let d_normed = b.linear_backward(&[&b.cast(d_velocity, self.dtype)?], &self.proj_out, None)?;
        let d_image = b.ada_layer_norm_backward(
            &d_normed,
            &image,
            &c.norm_out[0],
            &c.image_groups,
            self.config.eps,
            None,
        )?;
        let mut d_joined = Some(attention::pad_images(b, &c.rows, &d_image)?);
        let offset = self.transformer_blocks.len();
        for (i, (block, tape)) in self.single_transformer_blocks.iter().zip(singles).enumerate().rev() {
            let Some(dy) = d_joined.take() else { return Ok(()) };
            let tape = match tape {
                BlockTape::Nothing => return Ok(()),
                BlockTape::Input(x) => block.forward_training(b, &x, &c, adapters)?.1,
                BlockTape::Activations(tape) => tape,
            };
            d_joined = block.backward(b, tape, dy, &c, adapters, first < offset + i)?;
        }
        let Some(d_joined) = d_joined else { return Ok(()) };
        let mut streams = Some(attention::split_streams(b, &c.rows, &d_joined)?);
        drop(d_joined);
        for (i, (block, tape)) in self.transformer_blocks.iter().zip(doubles).enumerate().rev() {
            let Some(dys) = streams.take() else { return Ok(()) };
            let tape = match tape {
                BlockTape::Nothing => return Ok(()),
                BlockTape::Input([text, image]) => {
                    block.forward_training(b, [&text, &image], &c, adapters)?.1
                }
                BlockTape::Activations(tape) => tape,
            };
            streams = block.backward(b, tape, dys, &c, adapters, first < i)?;
        }
        Ok(())
    }

    /// The linear layers of all blocks, which can have adapters.
    pub fn block_linears(&self) -> impl Iterator<Item = (&LayerStack, &B::Weight)> {
        let streams = self.transformer_blocks.iter().flat_map(|block| [&block.text, &block.image]);
        let doubles = streams.flat_map(|s| [&s.qkv, &s.to_out, &s.linear_in, &s.linear_out]);
        let singles = self.single_transformer_blocks.iter().flat_map(|s| [&s.to_qkv_mlp_proj, &s.to_out]);
        doubles.chain(singles).map(|linear| (linear.stack(), &**linear))
    }

    /// The first block with an adapter, double blocks first.
    fn first_adapted_block<A: Adapters<B>>(&self, adapters: &A) -> Option<usize> {
        let double = |block: &super::double::DoubleBlock<B>| block.is_adapted(adapters);
        let single = |block: &super::single::SingleBlock<B>| block.is_adapted(adapters);
        let doubles = self.transformer_blocks.iter().map(double);
        doubles.chain(self.single_transformer_blocks.iter().map(single)).position(|adapted| adapted)
    }

    /// Computes the modulations, and embeds the text and image streams.
    fn condition(
        &self,
        b: &B,
        items: &[TrainingItem<'_, B>],
        guidance: Option<f32>,
    ) -> Result<(Conditioning<B>, [B::Tensor; 2])> {
        let projections =
            items.iter().map(|item| self.time_guidance_embed.project(b, item.timestep, guidance));
        let projections = projections.collect::<Result<Vec<_>>>()?;
        let guidances: Vec<B::Tensor> = projections.iter().filter_map(|p| p.guidance.clone()).collect();
        let timestep = TimestepProjection {
            timestep: concat(b, projections.iter().map(|p| p.timestep.clone()).collect())?,
            guidance: if guidances.is_empty() { None } else { Some(concat(b, guidances)?) },
        };
        let stacked: Vec<BatchItem<'_, B>> = items
            .iter()
            .map(|item| BatchItem {
                text: item.text,
                image: item.image,
                references: References::Joint(item.references),
                rope: item.rope,
            })
            .collect();
        let heads = self.config.num_attention_heads;
        let spec = AttentionSpec::new(heads, heads, kiln_ops::AttentionMask::None);
        let inputs = StackedBatch::new(b, &stacked, &spec, timestep)?.inputs;
        let rows = ExampleRows::of(items);
        let silu = self.time_guidance_embed.forward(b, &inputs.timestep)?.silu;
        let groups = |count: fn(&ExampleRows) -> usize| {
            RowGroups::from_lengths(&rows.iter().map(count).collect::<Vec<_>>())
        };
        let dim = self.config.dim();
        let text_groups = groups(|rows| rows.text.len());
        let stream_groups = groups(|rows| rows.stream.len());
        let joined_groups = groups(|rows| rows.text.len() + rows.stream.len());
        let double = |[image, text]: &[ModulationProjection<B>; 2]| {
            let image = image.double_of(b, &silu, stream_groups)?;
            Ok::<_, crate::Error>([image, text.double_of(b, &silu, text_groups)?])
        };
        let conditioning = Conditioning {
            double: self.double_stream_modulation.as_ref().map(double).transpose()?,
            single: self.single_stream_modulation.single_of(b, &silu, joined_groups)?,
            norm_out: b.linear_split(&silu, &self.norm_out, [dim, dim])?,
            image_groups: groups(|rows| rows.image),
            rope: inputs.rope,
            spec,
            rows,
        };
        let image = b.linear(&b.cast(&inputs.image, self.dtype)?, &self.x_embedder)?;
        let text = b.linear(&b.cast(&inputs.text, self.dtype)?, &self.context_embedder)?;
        Ok((conditioning, [text, image]))
    }
}
