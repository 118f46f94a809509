use kiln_image::{GrayPicture, Picture};
use kiln_tensor::HostTensor;

use crate::schedule::Spacing;
use crate::tokenizer::MAX_TOKENS;

/// One order: what to paint and how.
#[derive(Clone, Debug)]
pub struct Request {
    /// What the pictures show.
    pub prompt: Prompt,
    /// Pictures for each prompt.
    pub pictures_per_prompt: usize,
    /// Width in pixels; from the first reference or the picture to start from, else the model's own (1024).
    pub width: Option<usize>,
    /// Height in pixels, likewise.
    pub height: Option<usize>,
    /// Steps; the model's own number when absent.
    pub steps: Option<usize>,
    /// Noise levels before shifting, instead of evenly spaced ones.
    pub sigmas: Option<Vec<f32>>,
    /// How the noise levels are laid out.
    pub spacing: Spacing,
    /// Guidance; the model's own when absent.
    pub guidance: Option<f32>,
    /// Where the noise comes from.
    pub noise: Noise,
    /// Pictures to look at while painting.
    pub references: Vec<Picture>,
    /// From noise, from a picture, or inside a mask.
    pub task: Task,
    /// Length that every text is cut or padded to.
    pub max_tokens: usize,
}

impl Request {
    /// A picture of `prompt` with every choice left to the model, and seed 0.
    pub fn new(prompt: impl Into<String>) -> Request {
        Request {
            prompt: Prompt::Text { prompts: vec![prompt.into()], negative: None },
            pictures_per_prompt: 1,
            width: None,
            height: None,
            steps: None,
            sigmas: None,
            spacing: Spacing::Shifted,
            guidance: None,
            noise: Noise::Seed { seed: 0, rng: Rng::Cpu },
            references: Vec::new(),
            task: Task::Generate,
            max_tokens: MAX_TOKENS,
        }
    }
}

/// What the pictures show.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Words.
    Text {
        /// A picture (or more) for each.
        prompts: Vec<String>,
        /// What to stay away from, on models with guidance; the empty text when absent.
        negative: Option<String>,
    },
    /// Text tokens made elsewhere, `[tokens, dim]` each.
    Embeddings {
        /// A picture (or more) for each.
        prompts: Vec<HostTensor>,
        /// What to stay away from; needed for guidance when there is no text encoder.
        negative: Option<HostTensor>,
    },
}

impl Prompt {
    /// Number of prompts.
    pub fn count(&self) -> usize {
        match self {
            Prompt::Text { prompts, .. } => prompts.len(),
            Prompt::Embeddings { prompts, .. } => prompts.len(),
        }
    }

    pub(super) fn has_negative(&self) -> bool {
        match self {
            Prompt::Text { negative, .. } => negative.is_some(),
            Prompt::Embeddings { negative, .. } => negative.is_some(),
        }
    }
}

/// Whose random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Rng {
    /// `torch.Generator("cpu")` in f32; rounded, a 16-bit pipeline's draw in torch 2.13 and later.
    #[default]
    Cpu,
    /// `torch.Generator("cpu")` of a bf16 pipeline in torch up to 2.11.
    CpuBf16,
    /// `torch.Generator("cpu")` of an f16 pipeline in torch up to 2.11.
    CpuF16,
    /// `torch.Generator("cuda")`, whatever the type.
    Cuda,
}

/// Where the noise comes from.
#[derive(Clone, Debug)]
pub enum Noise {
    /// One generator draws the noise of all pictures at once.
    Seed {
        /// Its seed.
        seed: u64,
        /// Its kind.
        rng: Rng,
    },
    /// One picture of a batch that one generator drew, to make it again without the others.
    Part {
        /// The generator's seed.
        seed: u64,
        /// Its kind.
        rng: Rng,
        /// Which picture of the batch, from 0.
        index: usize,
        /// How many pictures the batch had.
        of: usize,
    },
    /// A generator a picture.
    Seeds {
        /// Their seeds.
        seeds: Vec<u64>,
        /// Their kind.
        rng: Rng,
    },
    /// Given: `[pictures, 128, h/16, w/16]` as diffusers takes it, or packed `[pictures, tokens, 128]`; the first
    /// dimension may be missing for one picture.
    Given(HostTensor),
}

/// How a picture begins.
#[derive(Clone, Debug)]
pub enum Task {
    /// From noise.
    Generate,
    /// From a picture, noised.
    Vary {
        /// The picture.
        source: Picture,
        /// How much of the way to noise: 1 forgets the picture, 0 keeps it.
        strength: f64,
    },
    /// Inside the mask from noise (or a noised picture), outside of it the picture.
    Inpaint {
        /// The picture.
        source: Picture,
        /// White is repainted, black stays.
        mask: GrayPicture,
        /// How much of the way to noise inside the mask.
        strength: f64,
        /// Work only on the mask's surroundings, this many pixels around it, and paste the result back.
        padding: Option<u32>,
    },
}
