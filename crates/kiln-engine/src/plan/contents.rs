//! What a plan holds beside numbers.

use std::path::PathBuf;
use std::sync::Arc;

use kiln_image::{Inpaint, Picture};
use kiln_tensor::HostTensor;
use kiln_weights::Lora;

use crate::error::Result;
use crate::lazy::Lazy;

/// What the images show.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Words.
    Text {
        /// An image (or more) for each.
        prompts: Vec<String>,
        /// What to avoid: none, one for all prompts, or one for each.
        negatives: Vec<String>,
    },
    /// Text tokens made elsewhere, `[tokens, dim]` each.
    Embeddings {
        /// An image (or more) for each.
        prompts: Vec<HostTensor>,
        /// What to avoid; needed for guidance when there is no text encoder.
        negative: Option<HostTensor>,
        /// The number of the first in the file.
        first_row: usize,
    },
}

/// What an image starts from besides noise.
#[derive(Debug)]
pub enum Start {
    /// Nothing.
    Noise,
    /// An image, noised.
    Image(Box<InitImage>),
    /// An image that is put back outside of the mask after every step.
    Inpaint(Box<Inpaint>),
}

/// An image to start from. It is resized when it is first needed: its size has to pass the memory check before.
#[derive(Debug)]
pub struct InitImage {
    source: Arc<Picture>,
    width: Option<u32>,
    height: Option<u32>,
    prepared: Lazy<Picture>,
}

impl InitImage {
    pub(super) fn new(source: Arc<Picture>, width: Option<u32>, height: Option<u32>) -> InitImage {
        InitImage { source, width, height, prepared: Lazy::new() }
    }

    pub(crate) fn prepared(&self) -> Result<&Picture> {
        self.prepared.get(|| Ok(kiln_image::prepare_init(&self.source, self.width, self.height)?))
    }
}

/// A LoRA that was opened.
#[derive(Clone, Debug)]
pub struct PlannedLora {
    /// The file.
    pub path: PathBuf,
    /// The user's factor.
    pub weight: f32,
    /// Identity of its weights.
    pub fingerprint: String,
    /// The LoRA.
    pub lora: Arc<Lora>,
}

impl PartialEq for PlannedLora {
    fn eq(&self, other: &PlannedLora) -> bool {
        (&self.path, self.weight, &self.fingerprint) == (&other.path, other.weight, &other.fingerprint)
    }
}

/// Something of every prompt, and of every negative prompt: none, one for all, or one for each.
#[derive(Clone, Debug)]
pub(crate) struct Texts<T> {
    pub prompts: Vec<T>,
    pub negatives: Vec<T>,
}

impl<T> Texts<T> {
    /// The negative one that belongs to a prompt.
    pub fn negative(&self, prompt: usize) -> Option<&T> {
        self.negatives.get(prompt).or_else(|| self.negatives.first())
    }
}

/// One image of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePlan {
    /// Its prompt, where that is words.
    pub prompt: Option<String>,
    /// Its negative prompt.
    pub negative: Option<String>,
    /// Which of the embeddings in the file, when there is no prompt.
    pub row: usize,
    /// Its seed, where it has one.
    pub seed: Option<u64>,
    /// Its place in the batch whose noise is drawn at once, and the size of that batch.
    pub part: (usize, usize),
}

impl Prompt {
    /// Number of prompts.
    pub fn count(&self) -> usize {
        match self {
            Prompt::Text { prompts, .. } => prompts.len(),
            Prompt::Embeddings { prompts, .. } => prompts.len(),
        }
    }
}
