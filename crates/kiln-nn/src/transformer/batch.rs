//! The inputs and outputs of a forward pass, and how the images of a batch become rows of one tensor.
//!
//! The text streams of all images are stacked, `[Σ t, joint_dim]`, and so are their image streams, `[Σ n, 128]`. An image
//! stream is the image with its joint references behind it, or with extracted references before it. In single blocks the
//! rows are joined: each image's text, then its image stream. Images may differ in their number of tokens.

use kiln_ops::{AttentionMask, AttentionSpec, Backend, Error, RopeLayout, RopeTable, Tensor as _};

use super::attention::{BatchAttention, ImageAttention, KvCache, concat};
use super::embed::TimestepProjection;
use super::rope::RopeTables;
use super::row_levels::{NoiseLevel, RowLevels};
use crate::Result;

/// How reference images take part in a forward pass.
pub enum References<'a, B: Backend> {
    /// As tokens `[r, 128]` beside those of the image, or no references.
    Joint(Option<&'a B::Tensor>),
    /// In the first step of the KV model: the tokens see only themselves; their keys and values are returned.
    Extract(&'a B::Tensor),
    /// In later steps of the KV model: as their keys and values.
    Cached(&'a KvCache<B>),
}

// `derive` would require the same of the backend.
impl<B: Backend> Clone for References<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for References<'_, B> {}

/// One image of a batch.
pub struct BatchItem<'a, B: Backend> {
    /// Text tokens, `[t, joint_dim]`.
    pub text: &'a B::Tensor,
    /// Noisy latents, f32, `[n, 128]`.
    pub image: &'a B::Tensor,
    /// Reference tokens, or their keys and values.
    pub references: References<'a, B>,
    /// From [`Transformer::rope_tables`](super::Transformer::rope_tables), for the same tokens in the same order.
    pub rope: &'a RopeTables<B>,
}

/// The input of a forward pass: images at the same noise level.
///
/// They share nothing but the weights; each may have its own number of tokens.
pub struct TransformerBatch<'a, B: Backend> {
    /// The images, at least one.
    pub items: &'a [BatchItem<'a, B>],
    /// `t / 1000`.
    pub timestep: f32,
    /// Guidance, for models that take it as an input.
    pub guidance: Option<f32>,
}

/// The output for one image.
pub struct Prediction<B: Backend> {
    /// Velocity of the image tokens, f32 `[n, 128]`.
    pub velocity: B::Tensor,
    /// Keys and values of the references, for [`References::Extract`].
    pub cache: Option<KvCache<B>>,
}

/// The images of a batch as rows of shared tensors.
pub(super) struct StackedBatch<'a, B: Backend> {
    pub(super) inputs: GraphInputs<B>,
    attention: Vec<ImageAttention<'a, B>>,
    /// Noise levels of the text rows.
    pub(super) text_levels: RowLevels,
    /// Noise levels of the image streams' rows.
    pub(super) image_levels: RowLevels,
    /// Noise levels of the joined rows.
    pub(super) joined_levels: RowLevels,
    /// The joined rows of each image's own tokens, without references.
    pub(super) image_rows: Vec<std::ops::Range<usize>>,
}

/// The tensors that differ between forward passes of the same shapes, apart from cached keys and values: the inputs of a
/// recorded graph.
pub(super) struct GraphInputs<B: Backend> {
    pub(super) text: B::Tensor,
    pub(super) image: B::Tensor,
    pub(super) rope: RopeTables<B>,
    pub(super) timestep: TimestepProjection<B>,
}

impl<B: Backend> GraphInputs<B> {
    /// Lists the tensors in the order that [`GraphInputs::from_tensors`] takes them.
    pub(super) fn tensors(&self) -> Vec<&B::Tensor> {
        let GraphInputs { text, image, rope, timestep } = self;
        let tables = [&rope.text, &rope.image, &rope.joined];
        let mut list = vec![text, image];
        list.extend(tables.into_iter().flat_map(|table| [&table.cos, &table.sin]));
        list.push(&timestep.timestep);
        list.extend(&timestep.guidance);
        list
    }

    pub(super) fn from_tensors(list: &[&B::Tensor]) -> Result<Self> {
        let &[text, image, c0, s0, c1, s1, c2, s2, timestep, ref guidance @ ..] = list else {
            let what = format!("{} inputs of a forward pass", list.len());
            return Err(Error::Arguments { op: "replay", what }.into());
        };
        let table = |cos: &B::Tensor, sin: &B::Tensor| RopeTable {
            cos: cos.clone(),
            sin: sin.clone(),
            pairs: RopeLayout::Interleaved,
        };
        let guidance = guidance.first().map(|&guidance| guidance.clone());
        Ok(GraphInputs {
            text: text.clone(),
            image: image.clone(),
            rope: RopeTables { text: table(c0, s0), image: table(c1, s1), joined: table(c2, s2) },
            timestep: TimestepProjection { timestep: timestep.clone(), guidance },
        })
    }
}

impl<'a, B: Backend> StackedBatch<'a, B> {
    pub(super) fn new(
        b: &B,
        items: &[BatchItem<'a, B>],
        spec: &AttentionSpec,
        timestep: TimestepProjection<B>,
    ) -> Result<Self> {
        let (mut texts, mut images, mut attention, mut image_rows) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let [mut text_levels, mut image_levels, mut joined_levels] = [(); 3].map(|()| RowLevels::default());
        let mut start = 0;
        for item in items {
            let (text, image) = (item.text.shape().rows(), item.image.shape().rows());
            let (stream, image_attention, clean) = match &item.references {
                References::Joint(None) => (item.image.clone(), ImageAttention::uncached(spec.clone()), 0),
                References::Joint(Some(refs)) => {
                    (b.concat_rows(&[item.image, refs])?, ImageAttention::uncached(spec.clone()), 0)
                }
                References::Extract(refs) => {
                    let count = refs.shape().rows();
                    let mask = AttentionMask::Isolated { rows: text..text + count };
                    (
                        b.concat_rows(&[refs, item.image])?,
                        ImageAttention::extract(spec.clone(), mask, count),
                        count,
                    )
                }
                References::Cached(cache) => {
                    (item.image.clone(), ImageAttention::cached(spec.clone(), cache), 0)
                }
            };
            let rows = stream.shape().rows();
            text_levels.push(NoiseLevel::Current, text);
            joined_levels.push(NoiseLevel::Current, text);
            for levels in [&mut image_levels, &mut joined_levels] {
                levels.push(NoiseLevel::Clean, clean);
                levels.push(NoiseLevel::Current, rows - clean);
            }
            let first = start + text + clean;
            image_rows.push(first..first + image);
            start += text + rows;
            attention.push(image_attention.with_rows(text, rows));
            texts.push(item.text.clone());
            images.push(stream);
        }
        let table = |which: fn(&RopeTables<B>) -> &RopeTable<B::Tensor>| {
            let all = || items.iter().map(|item| which(item.rope));
            Ok::<_, crate::Error>(RopeTable {
                cos: concat(b, all().map(|table| table.cos.clone()).collect())?,
                sin: concat(b, all().map(|table| table.sin.clone()).collect())?,
                pairs: RopeLayout::Interleaved,
            })
        };
        Ok(StackedBatch {
            inputs: GraphInputs {
                text: concat(b, texts)?,
                image: concat(b, images)?,
                rope: RopeTables {
                    text: table(|l| &l.text)?,
                    image: table(|l| &l.image)?,
                    joined: table(|l| &l.joined)?,
                },
                timestep,
            },
            attention,
            text_levels,
            image_levels,
            joined_levels,
            image_rows,
        })
    }

    /// Returns the attention for the first block.
    pub(super) fn attention(&self) -> BatchAttention<'a, B> {
        BatchAttention::new(self.attention.clone())
    }

    /// Whether a graph of this forward pass can be replayed with other [`StackedBatch::inputs`]: no keys and values are
    /// extracted or cached.
    pub(super) fn is_replayable(&self) -> bool {
        self.attention.iter().all(ImageAttention::is_uncached)
    }

    /// Returns the rows of each image's text among all texts, and of its image stream among all image streams.
    pub(super) fn streams(&self) -> Vec<[std::ops::Range<usize>; 2]> {
        self.attention().streams()
    }

    /// Returns a key that differs between batches whose inputs have the same shapes but need different operations.
    pub(super) fn key(&self) -> Vec<usize> {
        let image_rows = self.image_rows.iter().flat_map(|rows| [rows.start, rows.end]);
        self.attention.iter().flat_map(ImageAttention::rows).chain(image_rows).collect()
    }
}
