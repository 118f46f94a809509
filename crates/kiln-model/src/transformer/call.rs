//! What one call of the transformer is given, and how the pictures of a call become rows of one tensor.

use kiln_ops::{Backend, Error, Mask, RopePairs, RopeTable, Tensor as _};

use super::attention::{Attention, Piece, join};
use super::embed::Moment;
use super::layout::{KvCache, Layout};
use super::runs::{Level, Runs};
use crate::Result;

/// How reference pictures take part in a call.
pub enum References<'a, B: Backend> {
    /// Beside the image: `tokens` `[r, 128]`, or none.
    Joint(Option<&'a B::Tensor>),
    /// First step of the KV model: `tokens` see only themselves; their keys and values are returned.
    Extract(&'a B::Tensor),
    /// Later steps of the KV model.
    Cached(&'a KvCache<B>),
}

// Derived ones would ask the same of the backend.
impl<B: Backend> Clone for References<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for References<'_, B> {}

/// One picture of a call.
pub struct Item<'a, B: Backend> {
    /// Text tokens, `[t, joint_dim]`.
    pub text: &'a B::Tensor,
    /// Noisy latents, f32, `[n, 128]`.
    pub image: &'a B::Tensor,
    /// Reference tokens or what was kept of them.
    pub references: References<'a, B>,
    /// Made by [`Transformer::layout`](super::Transformer::layout) for the same tokens in the same order.
    pub layout: &'a Layout<B>,
}

/// One call of the transformer: pictures at the same noise level. They share the reading of the weights and nothing else;
/// each may have its own number of tokens.
pub struct Call<'a, B: Backend> {
    /// The pictures, at least one.
    pub items: &'a [Item<'a, B>],
    /// `t / 1000`.
    pub timestep: f32,
    /// Guidance as an input, for models that have it.
    pub guidance: Option<f32>,
}

/// What the transformer says of one picture.
pub struct Answer<B: Backend> {
    /// The velocity of its image tokens, f32 `[n, 128]`.
    pub velocity: B::Tensor,
    /// Its references' keys and values, when they were asked for.
    pub cache: Option<KvCache<B>>,
}

/// The pictures of a call below each other: all texts; all image streams; later each text before its own image.
pub(super) struct Rows<'a, B: Backend> {
    pub(super) inputs: Inputs<B>,
    pieces: Vec<Piece<'a, B>>,
    /// Which rows of the texts, of the image streams and of everything joined are modulated how.
    pub(super) text_runs: Runs,
    pub(super) image_runs: Runs,
    pub(super) joined_runs: Runs,
    /// The image's own rows among everything joined.
    pub(super) own: Vec<std::ops::Range<usize>>,
}

/// What changes from one call of its kind to the next; kept keys and values apart.
pub(super) struct Inputs<B: Backend> {
    pub(super) text: B::Tensor,
    /// The image streams: the image's tokens with those of the references.
    pub(super) image: B::Tensor,
    pub(super) layout: Layout<B>,
    pub(super) moment: Moment<B>,
}

impl<B: Backend> Inputs<B> {
    /// As [`Inputs::of`] takes them.
    pub(super) fn list(&self) -> Vec<&B::Tensor> {
        let Inputs { text, image, layout, moment } = self;
        let tables = [&layout.text, &layout.image, &layout.joined];
        let mut list = vec![text, image];
        list.extend(tables.into_iter().flat_map(|table| [&table.cos, &table.sin]));
        list.push(&moment.timestep);
        list.extend(&moment.guidance);
        list
    }

    pub(super) fn of(list: &[&B::Tensor]) -> Result<Self> {
        let &[text, image, c0, s0, c1, s1, c2, s2, timestep, ref guidance @ ..] = list else {
            let what = format!("{} inputs of a step", list.len());
            return Err(Error::Arguments { op: "replay", what }.into());
        };
        let table = |cos: &B::Tensor, sin: &B::Tensor| RopeTable {
            cos: cos.clone(),
            sin: sin.clone(),
            pairs: RopePairs::Adjacent,
        };
        let guidance = guidance.first().map(|&guidance| guidance.clone());
        Ok(Inputs {
            text: text.clone(),
            image: image.clone(),
            layout: Layout { text: table(c0, s0), image: table(c1, s1), joined: table(c2, s2) },
            moment: Moment { timestep: timestep.clone(), guidance },
        })
    }
}

impl<'a, B: Backend> Rows<'a, B> {
    pub(super) fn new(b: &B, items: &[Item<'a, B>], heads: usize, moment: Moment<B>) -> Result<Self> {
        let (mut texts, mut images, mut pieces, mut own) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let [mut text_runs, mut image_runs, mut joined_runs] = [(); 3].map(|()| Runs::default());
        let mut start = 0;
        for item in items {
            let (text, images_own) = (item.text.shape().rows(), item.image.shape().rows());
            let (stream, piece, still) = match &item.references {
                References::Joint(None) => (item.image.clone(), Piece::plain(heads), 0),
                References::Joint(Some(refs)) => {
                    (b.concat_rows(&[item.image, refs])?, Piece::plain(heads), 0)
                }
                References::Extract(refs) => {
                    let count = refs.shape().rows();
                    let mask = Mask::Isolated { rows: text..text + count };
                    (b.concat_rows(&[refs, item.image])?, Piece::extract(heads, mask, count), count)
                }
                References::Cached(cache) => (item.image.clone(), Piece::cached(heads, cache), 0),
            };
            let rows = stream.shape().rows();
            text_runs.push(Level::Now, text);
            joined_runs.push(Level::Now, text);
            for runs in [&mut image_runs, &mut joined_runs] {
                runs.push(Level::Still, still);
                runs.push(Level::Now, rows - still);
            }
            let first = start + text + still;
            own.push(first..first + images_own);
            start += text + rows;
            pieces.push(piece.of_rows(text, rows));
            texts.push(item.text.clone());
            images.push(stream);
        }
        let table = |which: fn(&Layout<B>) -> &RopeTable<B>| {
            let all = || items.iter().map(|item| which(item.layout));
            Ok::<_, crate::Error>(RopeTable {
                cos: join(b, all().map(|table| table.cos.clone()).collect())?,
                sin: join(b, all().map(|table| table.sin.clone()).collect())?,
                pairs: RopePairs::Adjacent,
            })
        };
        Ok(Rows {
            inputs: Inputs {
                text: join(b, texts)?,
                image: join(b, images)?,
                layout: Layout {
                    text: table(|l| &l.text)?,
                    image: table(|l| &l.image)?,
                    joined: table(|l| &l.joined)?,
                },
                moment,
            },
            pieces,
            text_runs,
            image_runs,
            joined_runs,
            own,
        })
    }

    /// At its first block.
    pub(super) fn attention(&self) -> Attention<'a, B> {
        Attention::new(self.pieces.clone())
    }

    /// Whether [`Rows::inputs`] are all that changes from call to call.
    pub(super) fn is_plain(&self) -> bool {
        self.pieces.iter().all(Piece::is_plain)
    }

    /// What tells calls of different operations apart whose inputs have the same shapes.
    pub(super) fn key(&self) -> Vec<usize> {
        let own = self.own.iter().flat_map(|own| [own.start, own.end]);
        self.pieces.iter().flat_map(Piece::rows).chain(own).collect()
    }
}
