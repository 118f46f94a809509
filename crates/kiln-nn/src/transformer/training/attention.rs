//! The rows of a batch's examples, their attention, and its backward pass.

use std::ops::Range;

use kiln_ops::{AttentionSpec, Tensor as _, TrainingBackend};

use super::item::TrainingItem;
use crate::Result;
use crate::transformer::attention::concat;

/// Where the rows of one example are.
pub(super) struct ExampleRows {
    /// Its text among all texts.
    pub(super) text: Range<usize>,
    /// Its image stream, the image before its references, among all image streams.
    pub(super) stream: Range<usize>,
    /// Number of image tokens in the stream.
    pub(super) image: usize,
    /// Where its joined rows start: its text, then its image stream.
    joined: usize,
}

impl ExampleRows {
    pub(super) fn of<B: TrainingBackend>(items: &[TrainingItem<'_, B>]) -> Vec<ExampleRows> {
        let (mut text, mut stream) = (0, 0);
        let rows = |item: &TrainingItem<'_, B>| {
            let image = item.image.shape().rows();
            let references = item.references.map_or(0, |references| references.shape().rows());
            let joined = text + stream;
            let rows = ExampleRows {
                text: text..text + item.text.shape().rows(),
                stream: stream..stream + image + references,
                image,
                joined,
            };
            (text, stream) = (rows.text.end, rows.stream.end);
            rows
        };
        items.iter().map(rows).collect()
    }

    /// Its image tokens among the joined rows.
    pub(super) fn joined_image(&self) -> Range<usize> {
        let first = self.joined + self.text.len();
        first..first + self.image
    }

    fn joined_text(&self) -> Range<usize> {
        self.joined..self.joined + self.text.len()
    }

    fn joined_stream(&self) -> Range<usize> {
        let first = self.joined + self.text.len();
        first..first + self.stream.len()
    }

    fn all(&self) -> Range<usize> {
        self.joined..self.joined + self.text.len() + self.stream.len()
    }
}

/// Each example's text before its image stream.
pub(super) fn join<B: TrainingBackend>(
    b: &B,
    rows: &[ExampleRows],
    text: &B::Tensor,
    image: &B::Tensor,
) -> Result<B::Tensor> {
    let mut all = Vec::with_capacity(2 * rows.len());
    for rows in rows {
        all.extend([b.slice_rows(text, rows.text.clone())?, b.slice_rows(image, rows.stream.clone())?]);
    }
    concat(b, all)
}

/// The inverse of [`join`].
pub(super) fn split_streams<B: TrainingBackend>(
    b: &B,
    rows: &[ExampleRows],
    joined: &B::Tensor,
) -> Result<[B::Tensor; 2]> {
    let texts = rows.iter().map(|rows| Ok(b.slice_rows(joined, rows.joined_text())?));
    let images = rows.iter().map(|rows| Ok(b.slice_rows(joined, rows.joined_stream())?));
    Ok([concat(b, texts.collect::<Result<_>>()?)?, concat(b, images.collect::<Result<_>>()?)?])
}

/// The gradient of all joined rows from that of the image rows: zero for texts and references.
pub(super) fn pad_images<B: TrainingBackend>(
    b: &B,
    rows: &[ExampleRows],
    d_image: &B::Tensor,
) -> Result<B::Tensor> {
    let (dim, dtype) = (d_image.shape().last(), d_image.dtype());
    let (mut first, mut all) = (0, Vec::new());
    for rows in rows {
        all.push(b.zeros([rows.text.len(), dim].into(), dtype)?);
        all.push(b.slice_rows(d_image, first..first + rows.image)?);
        let references = rows.stream.len() - rows.image;
        if references > 0 {
            all.push(b.zeros([references, dim].into(), dtype)?);
        }
        first += rows.image;
    }
    concat(b, all)
}

/// The row blocks of the examples, as an attention reads them: one list per example.
pub(super) enum Blocks<'a, B: TrainingBackend> {
    /// Texts and image streams.
    Streams([&'a B::Tensor; 2]),
    /// Joined rows.
    Joined(&'a B::Tensor),
}

// `derive` would require the same of the backend.
impl<B: TrainingBackend> Clone for Blocks<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: TrainingBackend> Copy for Blocks<'_, B> {}

impl<B: TrainingBackend> Blocks<'_, B> {
    fn of(&self, b: &B, rows: &ExampleRows) -> Result<Vec<B::Tensor>> {
        Ok(match self {
            Blocks::Streams([text, image]) => {
                vec![b.slice_rows(text, rows.text.clone())?, b.slice_rows(image, rows.stream.clone())?]
            }
            Blocks::Joined(joined) => vec![b.slice_rows(joined, rows.all())?],
        })
    }
}

/// The results of the examples' attention: per example `[text and stream rows, dim]`, and its log-sum-exp.
pub(super) type Attended<B> = Vec<[<B as kiln_ops::Backend>::Tensor; 2]>;

pub(super) fn forward<B: TrainingBackend>(
    b: &B,
    rows: &[ExampleRows],
    [q, k, v]: [Blocks<'_, B>; 3],
    spec: &AttentionSpec,
) -> Result<Attended<B>> {
    let example = |rows: &ExampleRows| -> Result<[B::Tensor; 2]> {
        let [q, k, v] = [q.of(b, rows)?, k.of(b, rows)?, v.of(b, rows)?];
        Ok(b.attention_lse(&refs(&q), &refs(&k), &refs(&v), spec)?)
    };
    rows.iter().map(example).collect()
}

/// The gradients of queries, keys and values of all examples, joined.
pub(super) fn backward<B: TrainingBackend>(
    b: &B,
    rows: &[ExampleRows],
    dout: Blocks<'_, B>,
    [q, k, v]: [Blocks<'_, B>; 3],
    attended: &Attended<B>,
    spec: &AttentionSpec,
) -> Result<[B::Tensor; 3]> {
    let mut all = [(); 3].map(|()| Vec::with_capacity(rows.len()));
    for (rows, [out, lse]) in rows.iter().zip(attended) {
        let [dout, q, k, v] = [dout.of(b, rows)?, q.of(b, rows)?, k.of(b, rows)?, v.of(b, rows)?];
        let gradients =
            b.attention_backward(&refs(&dout), &refs(&q), &refs(&k), &refs(&v), out, lse, spec)?;
        all.iter_mut().zip(gradients).for_each(|(all, gradient)| all.push(gradient));
    }
    let [q, k, v] = all;
    Ok([concat(b, q)?, concat(b, k)?, concat(b, v)?])
}

/// All examples' results as joined rows.
pub(super) fn joined<B: TrainingBackend>(b: &B, attended: &Attended<B>) -> Result<B::Tensor> {
    concat(b, attended.iter().map(|[out, _]| out.clone()).collect())
}

fn refs<T>(tensors: &[T]) -> Vec<&T> {
    tensors.iter().collect()
}
