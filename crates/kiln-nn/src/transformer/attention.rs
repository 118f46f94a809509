//! Attention over a batch of images of different sizes.
//!
//! Every other operation works on rows, whichever image they belong to. Here the rows of each image are sliced out, so that
//! they attend only to each other. Reference tokens either take part like image tokens, or their keys and values are
//! extracted into a [`KvCache`] (in the first step of the KV model), or used from one (in its later steps).

use std::ops::Range;

use kiln_ops::{AttentionMask, AttentionSpec, Backend, HeadBlock};

use crate::Result;

/// Keys (after the rotary embedding) and values of the reference tokens, one pair per block: double blocks, then single.
pub struct KvCache<B: Backend> {
    blocks: Vec<[B::Tensor; 2]>,
}

impl<B: Backend> KvCache<B> {
    /// Key and value of each block, double blocks first.
    pub fn blocks(&self) -> &[[B::Tensor; 2]] {
        &self.blocks
    }
}

/// Queries and keys, before norm and rotation, and values of the same tokens.
pub(super) struct Qkv<'a, B: Backend> {
    pub(super) qk: HeadBlock<'a, B::Tensor>,
    pub(super) v: &'a B::Tensor,
}

/// The attention of a batch, as it goes from block to block.
pub(super) struct BatchAttention<'a, B: Backend> {
    images: Vec<ImageAttention<'a, B>>,
}

/// Tokens from which on rounding to 8 bits takes less time than it saves.
const MIN_EIGHT_BIT_TOKENS: usize = 3072;

/// The attention of one image.
pub(super) struct ImageAttention<'a, B: Backend> {
    spec: AttentionSpec,
    references: ReferenceKv<'a, B>,
    /// Number of rows of text.
    text: usize,
    /// Number of rows of the image stream.
    image: usize,
}

/// What happens to the keys and values of reference tokens.
enum ReferenceKv<'a, B: Backend> {
    /// Nothing: there are no references, or they are image tokens like the others.
    None,
    /// The first `rows` rows of the image stream are references; their keys and values are extracted.
    Extract { rows: usize, blocks: Vec<[B::Tensor; 2]> },
    /// Keys and values of the remaining blocks are taken from a cache.
    Cached(std::slice::Iter<'a, [B::Tensor; 2]>),
}

// `derive` would require the same of the backend.
impl<B: Backend> Clone for ImageAttention<'_, B> {
    fn clone(&self) -> Self {
        let references = match &self.references {
            ReferenceKv::None => ReferenceKv::None,
            ReferenceKv::Extract { rows, blocks } => {
                ReferenceKv::Extract { rows: *rows, blocks: blocks.clone() }
            }
            ReferenceKv::Cached(blocks) => ReferenceKv::Cached(blocks.clone()),
        };
        ImageAttention { spec: self.spec.clone(), references, text: self.text, image: self.image }
    }
}

impl<'a, B: Backend> BatchAttention<'a, B> {
    pub(super) fn new(images: Vec<ImageAttention<'a, B>>) -> Self {
        BatchAttention { images }
    }

    /// Returns the rows of each image's text and image stream among all texts and all image streams.
    pub(super) fn streams(&self) -> Vec<[Range<usize>; 2]> {
        let (mut text, mut image) = (0, 0);
        let rows = |item: &ImageAttention<'a, B>| {
            let rows = [text..text + item.text, image..image + item.image];
            (text, image) = (rows[0].end, rows[1].end);
            rows
        };
        self.images.iter().map(rows).collect()
    }

    /// The only image, if its attention is over all rows and nothing else, so that norm and rotation can be part of it.
    fn whole(&self) -> Option<&ImageAttention<'a, B>> {
        match &self.images[..] {
            [item] if item.is_uncached() => Some(item),
            _ => None,
        }
    }

    /// Computes the attention of a double block: of all texts, and of all image streams.
    pub(super) fn double(
        &mut self,
        b: &B,
        Qkv { qk: qk_text, v: v_text }: Qkv<'_, B>,
        Qkv { qk: qk_image, v: v_image }: Qkv<'_, B>,
        eps: f32,
    ) -> Result<[B::Tensor; 2]> {
        if let Some(item) = self.whole() {
            let attended =
                b.norm_rope_attention(&[qk_text, qk_image], &[v_text, v_image], eps, &item.spec)?;
            return item.split(b, &attended, 0);
        }
        let [q_text, k_text] = &qk_text.norm_rope(b, eps)?;
        let [q_image, k_image] = &qk_image.norm_rope(b, eps)?;
        let streams = self.streams();
        let (mut texts, mut images) = (Vec::new(), Vec::new());
        for (item, [text, image]) in self.images.iter_mut().zip(streams) {
            let slice = |of_text: &B::Tensor, of_image: &B::Tensor| -> Result<[B::Tensor; 2]> {
                Ok([b.slice_rows(of_text, text.clone())?, b.slice_rows(of_image, image.clone())?])
            };
            let [q, k, v] = [slice(q_text, q_image)?, slice(k_text, k_image)?, slice(v_text, v_image)?];
            let attended = item.forward(b, &[&q[0], &q[1]], &k, &v)?;
            let [text, image] = item.split(b, &attended, 0)?;
            texts.push(text);
            images.push(image);
        }
        Ok([concat(b, texts)?, concat(b, images)?])
    }

    /// Computes the attention of a single block, over rows in which each image's text comes before its image stream.
    pub(super) fn single(&mut self, b: &B, Qkv { qk, v }: Qkv<'_, B>, eps: f32) -> Result<B::Tensor> {
        if let Some(item) = self.whole() {
            return Ok(b.norm_rope_attention(&[qk], &[v], eps, &item.spec)?);
        }
        let [q, k] = &qk.norm_rope(b, eps)?;
        let (mut start, mut all) = (0, Vec::new());
        for item in &mut self.images {
            let q = b.slice_rows(q, start..start + item.text + item.image)?;
            let (k, v) = (item.split(b, k, start)?, item.split(b, v, start)?);
            all.push(item.forward(b, &[&q], &k, &v)?);
            start += item.text + item.image;
        }
        concat(b, all)
    }

    /// Interleaves all texts and all image streams: each image's text before its image stream.
    pub(super) fn join_streams(&self, b: &B, text: &B::Tensor, image: &B::Tensor) -> Result<B::Tensor> {
        let mut all = Vec::new();
        for [text_rows, image_rows] in self.streams() {
            all.extend([b.slice_rows(text, text_rows)?, b.slice_rows(image, image_rows)?]);
        }
        concat(b, all)
    }

    /// Returns the keys and values that were extracted for each image.
    pub(super) fn into_caches(self) -> impl Iterator<Item = Option<KvCache<B>>> {
        self.images.into_iter().map(|item| match item.references {
            ReferenceKv::Extract { blocks, .. } => Some(KvCache { blocks }),
            _ => None,
        })
    }
}

impl<'a, B: Backend> ImageAttention<'a, B> {
    pub(super) fn uncached(spec: AttentionSpec) -> Self {
        ImageAttention::new(spec, ReferenceKv::None)
    }

    pub(super) fn extract(spec: AttentionSpec, mask: AttentionMask, rows: usize) -> Self {
        let references = ReferenceKv::Extract { rows, blocks: Vec::new() };
        ImageAttention::new(AttentionSpec { mask, ..spec }, references)
    }

    pub(super) fn cached(spec: AttentionSpec, cache: &'a KvCache<B>) -> Self {
        ImageAttention::new(spec, ReferenceKv::Cached(cache.blocks.iter()))
    }

    fn new(spec: AttentionSpec, references: ReferenceKv<'a, B>) -> Self {
        ImageAttention { spec, references, text: 0, image: 0 }
    }

    /// Sets the number of rows of text and of the image stream.
    pub(super) fn with_rows(mut self, text: usize, image: usize) -> Self {
        self.spec.eight_bits &= text + image >= MIN_EIGHT_BIT_TOKENS;
        ImageAttention { text, image, ..self }
    }

    /// Whether no keys and values of references are extracted or cached.
    pub(super) fn is_uncached(&self) -> bool {
        matches!(self.references, ReferenceKv::None)
    }

    /// Number of rows of text, and of the image stream.
    pub(super) fn rows(&self) -> [usize; 2] {
        [self.text, self.image]
    }

    /// Slices the rows of the text, which begin at `start`, and of the image stream behind it.
    fn split(&self, b: &B, x: &B::Tensor, start: usize) -> Result<[B::Tensor; 2]> {
        let middle = start + self.text;
        Ok([b.slice_rows(x, start..middle)?, b.slice_rows(x, middle..middle + self.image)?])
    }

    /// `k` and `v` are given as text rows and image-stream rows.
    fn forward(
        &mut self,
        b: &B,
        q: &[&B::Tensor],
        [k_text, k_image]: &[B::Tensor; 2],
        [v_text, v_image]: &[B::Tensor; 2],
    ) -> Result<B::Tensor> {
        let attend = |k: &[&B::Tensor], v: &[&B::Tensor]| Ok(b.attention(q, k, v, &self.spec)?);
        match &mut self.references {
            ReferenceKv::None => attend(&[k_text, k_image], &[v_text, v_image]),
            ReferenceKv::Extract { rows, blocks } => {
                blocks.push([b.slice_rows(k_image, 0..*rows)?, b.slice_rows(v_image, 0..*rows)?]);
                attend(&[k_text, k_image], &[v_text, v_image])
            }
            ReferenceKv::Cached(blocks) => match blocks.next() {
                Some([k, v]) => attend(&[k_text, k, k_image], &[v_text, v, v_image]),
                None => attend(&[k_text, k_image], &[v_text, v_image]),
            },
        }
    }
}

/// Concatenates rows; a single tensor is not copied.
pub(super) fn concat<B: Backend>(b: &B, mut tensors: Vec<B::Tensor>) -> Result<B::Tensor> {
    if tensors.len() == 1 {
        return Ok(tensors.remove(0));
    }
    Ok(b.concat_rows(&tensors.iter().collect::<Vec<_>>())?)
}
