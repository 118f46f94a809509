use std::ops::Range;

use kiln_ops::{AttentionSpec, Backend, Mask};

use super::layout::KvCache;
use crate::Result;

/// What the blocks of one call do at their attention. Everything else is done to rows, whosever they are; here each
/// picture's rows see only each other.
pub(super) struct Attention<'a, B: Backend> {
    pieces: Vec<Piece<'a, B>>,
}

/// One picture at its attention: plain, keeping the references' keys and values, or using them.
pub(super) struct Piece<'a, B: Backend> {
    spec: AttentionSpec,
    references: Kept<'a, B>,
    /// Rows of text, and of its image stream.
    text: usize,
    image: usize,
}

enum Kept<'a, B: Backend> {
    None,
    /// The first `rows` rows of the image stream are references; their keys and values are collected.
    Collecting {
        rows: usize,
        blocks: Vec<[B::Tensor; 2]>,
    },
    /// Keys and values of the blocks to come.
    Using(std::slice::Iter<'a, [B::Tensor; 2]>),
}

// Derived ones would ask the same of the backend.
impl<B: Backend> Clone for Piece<'_, B> {
    fn clone(&self) -> Self {
        let references = match &self.references {
            Kept::None => Kept::None,
            Kept::Collecting { rows, blocks } => Kept::Collecting { rows: *rows, blocks: blocks.clone() },
            Kept::Using(blocks) => Kept::Using(blocks.clone()),
        };
        Piece { spec: self.spec.clone(), references, text: self.text, image: self.image }
    }
}

impl<'a, B: Backend> Attention<'a, B> {
    pub(super) fn new(pieces: Vec<Piece<'a, B>>) -> Self {
        Attention { pieces }
    }

    /// Where each picture's text and image stream lie among all texts and all image streams.
    fn streams(&self) -> Vec<[Range<usize>; 2]> {
        let (mut text, mut image) = (0, 0);
        let place = |piece: &Piece<'a, B>| {
            let rows = [text..text + piece.text, image..image + piece.image];
            (text, image) = (rows[0].end, rows[1].end);
            rows
        };
        self.pieces.iter().map(place).collect()
    }

    /// Attention of a double block: queries, keys and values of all texts, and of all image streams.
    pub(super) fn double(
        &mut self,
        b: &B,
        [q_text, k_text, v_text]: [&B::Tensor; 3],
        [q_image, k_image, v_image]: [&B::Tensor; 3],
    ) -> Result<[B::Tensor; 2]> {
        let places = self.streams();
        let (mut texts, mut images) = (Vec::new(), Vec::new());
        for (piece, [text, image]) in self.pieces.iter_mut().zip(places) {
            let both = |of_text: &B::Tensor, of_image: &B::Tensor| -> Result<[B::Tensor; 2]> {
                Ok([b.slice_rows(of_text, text.clone())?, b.slice_rows(of_image, image.clone())?])
            };
            let [q, k, v] = [both(q_text, q_image)?, both(k_text, k_image)?, both(v_text, v_image)?];
            let attended = piece.forward(b, &[&q[0], &q[1]], &k, &v)?;
            let [text, image] = piece.cut(b, &attended, 0)?;
            texts.push(text);
            images.push(image);
        }
        Ok([join(b, texts)?, join(b, images)?])
    }

    /// Attention of a single block, over rows in which each picture's text comes before its image stream.
    pub(super) fn single(&mut self, b: &B, [q, k, v]: [&B::Tensor; 3]) -> Result<B::Tensor> {
        let (mut start, mut all) = (0, Vec::new());
        for piece in &mut self.pieces {
            let q = b.slice_rows(q, start..start + piece.text + piece.image)?;
            let (k, v) = (piece.cut(b, k, start)?, piece.cut(b, v, start)?);
            all.push(piece.forward(b, &[&q], &k, &v)?);
            start += piece.text + piece.image;
        }
        join(b, all)
    }

    /// Each picture's text before its image stream, from all texts and all image streams.
    pub(super) fn joined(&self, b: &B, text: &B::Tensor, image: &B::Tensor) -> Result<B::Tensor> {
        let mut all = Vec::new();
        for [text_rows, image_rows] in self.streams() {
            all.extend([b.slice_rows(text, text_rows)?, b.slice_rows(image, image_rows)?]);
        }
        join(b, all)
    }

    /// What was collected for each picture.
    pub(super) fn into_caches(self) -> impl Iterator<Item = Option<KvCache<B>>> {
        self.pieces.into_iter().map(|piece| match piece.references {
            Kept::Collecting { blocks, .. } => Some(KvCache { blocks }),
            _ => None,
        })
    }
}

impl<'a, B: Backend> Piece<'a, B> {
    pub(super) fn plain(heads: usize) -> Self {
        Piece::new(heads, Mask::None, Kept::None)
    }

    pub(super) fn extract(heads: usize, mask: Mask, rows: usize) -> Self {
        Piece::new(heads, mask, Kept::Collecting { rows, blocks: Vec::new() })
    }

    pub(super) fn cached(heads: usize, cache: &'a KvCache<B>) -> Self {
        Piece::new(heads, Mask::None, Kept::Using(cache.blocks.iter()))
    }

    fn new(heads: usize, mask: Mask, references: Kept<'a, B>) -> Self {
        Piece { spec: AttentionSpec { heads, kv_heads: heads, mask }, references, text: 0, image: 0 }
    }

    /// The same with so many rows of text and of its image stream.
    pub(super) fn of_rows(self, text: usize, image: usize) -> Self {
        Piece { text, image, ..self }
    }

    /// Whether no reference's keys and values are kept or used.
    pub(super) fn is_plain(&self) -> bool {
        matches!(self.references, Kept::None)
    }

    /// How many rows of text it has, and of its image stream.
    pub(super) fn rows(&self) -> [usize; 2] {
        [self.text, self.image]
    }

    /// Its text's rows and those of its image stream, which begin at `start`.
    fn cut(&self, b: &B, x: &B::Tensor, start: usize) -> Result<[B::Tensor; 2]> {
        let middle = start + self.text;
        Ok([b.slice_rows(x, start..middle)?, b.slice_rows(x, middle..middle + self.image)?])
    }

    /// `k` and `v` are given as their text rows and their image-stream rows.
    fn forward(
        &mut self,
        b: &B,
        q: &[&B::Tensor],
        [k_text, k_image]: &[B::Tensor; 2],
        [v_text, v_image]: &[B::Tensor; 2],
    ) -> Result<B::Tensor> {
        let attend = |k: &[&B::Tensor], v: &[&B::Tensor]| Ok(b.attention(q, k, v, &self.spec)?);
        match &mut self.references {
            Kept::None => attend(&[k_text, k_image], &[v_text, v_image]),
            Kept::Collecting { rows, blocks } => {
                blocks.push([b.slice_rows(k_image, 0..*rows)?, b.slice_rows(v_image, 0..*rows)?]);
                attend(&[k_text, k_image], &[v_text, v_image])
            }
            Kept::Using(blocks) => match blocks.next() {
                Some([k, v]) => attend(&[k_text, k, k_image], &[v_text, v, v_image]),
                None => attend(&[k_text, k_image], &[v_text, v_image]),
            },
        }
    }
}

/// Tensors below each other; one alone is not copied.
pub(super) fn join<B: Backend>(b: &B, mut parts: Vec<B::Tensor>) -> Result<B::Tensor> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    Ok(b.concat_rows(&parts.iter().collect::<Vec<_>>())?)
}
