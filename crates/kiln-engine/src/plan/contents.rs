//! The data types of a plan.

use std::path::PathBuf;
use std::sync::Arc;

use kiln_image::{InpaintInputs, RgbImage, TileGrid};
use kiln_tensor::HostTensor;
use kiln_weights::{DoraRule, Lora};

use crate::error::Result;
use crate::once::TryOnceLock;

/// The prompts of a plan.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Text.
    Text {
        /// The prompts; each gives one or more images.
        prompts: Vec<String>,
        /// Negative prompts: none, one for all prompts, or one for each.
        negatives: Vec<String>,
    },
    /// Prompt embeddings from a file or from memory, `[tokens, dim]` each.
    Embeddings {
        /// The prompts; each gives one or more images.
        prompts: Vec<HostTensor>,
        /// Negative prompts: none, one for all prompts, or one for each; needed for guidance if there is no text encoder.
        negatives: Vec<HostTensor>,
        /// Index of the first prompt in the file.
        first_row: usize,
    },
}

impl Prompt {
    /// Returns the number of prompts.
    pub fn count(&self) -> usize {
        match self {
            Prompt::Text { prompts, .. } => prompts.len(),
            Prompt::Embeddings { prompts, .. } => prompts.len(),
        }
    }
}

/// What denoising starts from.
#[derive(Debug)]
pub enum StartingPoint {
    /// Noise alone.
    Noise,
    /// A noised initial image.
    Image(Box<InitImage>),
    /// A noised initial image that is restored outside of the mask after every step.
    Inpaint(Box<InpaintInputs>),
    /// An enlarged image, of which each tile is noised and denoised.
    Upscale(Box<UpscaleInputs>),
}

/// An initial image. It is resized on first use, after its size has passed the memory check.
#[derive(Debug)]
pub struct InitImage {
    source: Arc<RgbImage>,
    width: Option<u32>,
    height: Option<u32>,
    unit: u32,
    prepared: TryOnceLock<RgbImage>,
}

impl InitImage {
    pub(super) fn new(
        source: Arc<RgbImage>,
        width: Option<u32>,
        height: Option<u32>,
        unit: u32,
    ) -> InitImage {
        InitImage { source, width, height, unit, prepared: TryOnceLock::new() }
    }

    pub(crate) fn prepared(&self) -> Result<&RgbImage> {
        let prepare = || Ok(kiln_image::prepare_init(&self.source, self.width, self.height, self.unit)?);
        self.prepared.get_or_try_init(prepare)
    }
}

/// An open LoRA.
#[derive(Clone, Debug)]
pub struct PlannedLora {
    /// The file.
    pub path: PathBuf,
    /// The weight that the request gives it.
    pub weight: f32,
    /// How a DoRA is applied, if the request says so.
    pub dora_rule: Option<DoraRule>,
    /// A hash that identifies its tensors in recipes.
    pub fingerprint: String,
    /// Which files were opened, and in which state.
    pub files: Option<String>,
    /// The LoRA.
    pub lora: Arc<Lora>,
}

impl PartialEq for PlannedLora {
    fn eq(&self, other: &PlannedLora) -> bool {
        // Not by the fingerprint alone, which doesn't cover every byte. The files are open: no other can take their identity.
        let same_file =
            Arc::ptr_eq(&self.lora, &other.lora) || self.files.is_some() && self.files == other.files;
        let asked =
            |lora: &PlannedLora| (lora.path.clone(), lora.weight, lora.dora_rule, lora.fingerprint.clone());
        same_file && asked(self) == asked(other)
    }
}

/// A value for every prompt, and for every negative prompt: none, one for all, or one for each.
#[derive(Clone, Debug)]
pub(crate) struct PromptSet<T> {
    pub prompts: Vec<T>,
    pub negatives: Vec<T>,
}

impl<T> PromptSet<T> {
    /// Returns the negative prompt of a prompt.
    pub fn negative(&self, prompt: usize) -> Option<&T> {
        self.negatives.get(prompt).or_else(|| self.negatives.first())
    }
}

/// What one image of a plan is generated from.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePlan {
    /// Its prompt; `None` for embeddings.
    pub prompt: Option<String>,
    /// Its negative prompt.
    pub negative: Option<String>,
    /// Index of its prompt in the file of embeddings.
    pub embeds_row: usize,
    /// Its seed, if the noise is drawn from one.
    pub seed: Option<u64>,
    /// Its index among the images whose noise is drawn together.
    pub batch_index: usize,
    /// The number of images whose noise is drawn together.
    pub batch: usize,
}

/// An image to enlarge, and its tiles.
#[derive(Debug)]
pub struct UpscaleInputs {
    /// The image as given.
    pub(super) source: Arc<RgbImage>,
    pub(super) scale: u32,
    /// Pixels along a side of one token.
    pub(crate) unit: u32,
    /// The tiles of the enlarged image.
    pub tiles: TileGrid,
    /// The whole image, small, as a reference for every tile; absent if there is one tile.
    pub(crate) overview: Option<RgbImage>,
    pub(super) enlarged: TryOnceLock<RgbImage>,
}

impl UpscaleInputs {
    /// Returns width and height of the result.
    pub fn size(&self) -> [u32; 2] {
        [self.source.width() * self.scale, self.source.height() * self.scale]
    }

    /// Returns the tokens of the enlarged image, whose sides are padded to whole tokens: rows and columns.
    pub(crate) fn grid(&self) -> [usize; 2] {
        let [width, height] = self.size().map(|side| side.div_ceil(self.unit) as usize);
        [height, width]
    }

    /// Returns the enlarged image, padded to whole tokens.
    pub(crate) fn enlarged(&self) -> Result<&RgbImage> {
        let enlarge = || Ok(kiln_image::enlarge(&self.source, self.scale, self.unit));
        self.enlarged.get_or_try_init(enlarge)
    }
}
