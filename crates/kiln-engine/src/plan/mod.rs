//! A request understood: every default filled in, its files read, its images prepared. Made once, and used by everything
//! that follows.

mod checks;
mod contents;
mod files;

use std::sync::Arc;

use kiln_image::Picture;
use kiln_model::schedule::Schedule;
use kiln_model::tokenizer::Tokens;
use kiln_tensor::DType;

use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::lazy::Lazy;
use crate::memory::MemoryNeed;
use crate::model::{Model, VaeFile};
use crate::noise::Noise;
use crate::request::{Request, ScheduleKind};
use checks::{RHO, check, guidance, image_count, per_prompt, require_parts, schedule};
pub(crate) use contents::Texts;
pub use contents::{ImagePlan, InitImage, PlannedLora, Prompt, Start};
use files::{loras, noise, prepare_reference, prompt, read_image, start, vae};

/// Positions that the rotary embedding of FLUX.2 was trained for: text, image and reference tokens together.
const MAX_POSITIONS: usize = 52_000;
/// From so many references on, what they cost is said.
const MANY_REFERENCES: usize = 4;

/// A request understood by one model.
#[derive(Debug)]
pub struct Plan {
    /// The model.
    pub model: Arc<Model>,
    /// The request with every default filled in, and the hashes of the files it names.
    pub request: Request,
    /// Width in pixels, a multiple of 16.
    pub width: usize,
    /// Height in pixels, a multiple of 16.
    pub height: usize,
    /// Number of images.
    pub images: usize,
    /// Images for each prompt.
    pub per_prompt: usize,
    /// Steps of the whole schedule.
    pub steps: usize,
    /// The step to begin with: above 0 when strength leaves out the first ones.
    pub first_step: usize,
    /// Noise levels, the last 0 included.
    pub schedule: Schedule,
    /// Guidance, where the model has any.
    pub guidance: Option<f32>,
    /// Calls of the transformer a step.
    pub calls_per_step: usize,
    /// Length that every text is cut or padded to.
    pub max_tokens: usize,
    /// What the images show.
    pub prompt: Prompt,
    /// Reference images, resampled and cropped.
    pub references: Vec<Picture>,
    /// What the images start from.
    pub start: Start,
    /// Where the noise comes from.
    pub noise: Noise,
    /// LoRAs to use.
    pub loras: Vec<PlannedLora>,
    /// Whether modules of a LoRA that don't fit are left out.
    pub lora_partial: bool,
    /// An autoencoder to use instead of the model's.
    pub vae: Option<Arc<VaeFile>>,
    /// What the user should know: options without effect, rounded sizes.
    pub notes: Vec<String>,
    /// The size is the initial image's own.
    pub(crate) size_of_init: bool,
    tokens: Lazy<Texts<Tokens>>,
}

impl Plan {
    /// Understands a request: checks it against the model, reads its files, prepares its images, fills in its defaults.
    /// No weight is loaded.
    pub fn new(model: &Arc<Model>, request: &Request, inputs: &dyn Inputs) -> Result<Plan> {
        check(request)?;
        let mut used = request.clone();
        let mut notes = Vec::new();
        let prompt = prompt(request, &mut used, inputs)?;
        require_parts(model, &prompt, request)?;
        let prompts = prompt.count();
        let per_prompt = per_prompt(request, prompts)?;
        let images = image_count(prompts, per_prompt)?;
        let loras = loras(&mut used, inputs)?;
        let vae = vae(model, &mut used, inputs)?;
        let mut references = Vec::with_capacity(request.references.len());
        for reference in &mut used.references {
            let picture = read_image(inputs, reference, "reference image")?;
            references.push(prepare_reference(model, reference, &picture)?);
        }
        let (width, height, start, strength) =
            start(model, request, &mut used, inputs, &references, &mut notes)?;
        let steps = match (request.steps, request.sigmas.len()) {
            (Some(steps), _) => steps as usize,
            (None, 0) => model.default_steps(),
            (None, sigmas) => sigmas,
        };
        let schedule = schedule(model, request, width / 16 * (height / 16), steps)?;
        let first_step = schedule.first_step(strength.unwrap_or(1.0))?;
        let guidance = guidance(model, request, &mut notes)?;
        let max_tokens = request.max_tokens.map_or_else(|| model.default_tokens(), |n| n as usize);
        let noise = noise(model, request, &mut used, inputs, images, [height / 16, width / 16])?;
        let size_of_init = request.width.is_none()
            && request.height.is_none()
            && request.init.is_some()
            && request.mask.is_none();
        used.width = Some(width as u32);
        used.height = Some(height as u32);
        // With custom levels the number of steps asked for still shifts them.
        used.steps = Some(request.steps.unwrap_or(schedule.steps() as u32));
        used.schedule = Some(request.schedule.unwrap_or_default());
        used.rho = (used.schedule == Some(ScheduleKind::Power)).then(|| request.rho.unwrap_or(RHO));
        used.rng = Some(request.rng.unwrap_or_default());
        used.guidance = guidance;
        used.strength = strength;
        used.max_tokens = Some(max_tokens as u32);
        let plan = Plan {
            model: Arc::clone(model),
            width,
            height,
            images,
            per_prompt,
            steps: schedule.steps(),
            first_step,
            schedule,
            calls_per_step: model.variant.calls_per_step(guidance),
            guidance,
            max_tokens,
            prompt,
            references,
            start,
            noise,
            loras,
            lora_partial: request.lora_partial,
            vae,
            notes,
            size_of_init,
            request: used,
            tokens: Lazy::new(),
        };
        plan.check_positions()
    }

    /// Token grid: height and width.
    pub fn grid(&self) -> [usize; 2] {
        [self.height / 16, self.width / 16]
    }

    /// Tokens of all references, the source of an inpainting among them.
    pub fn reference_tokens(&self) -> usize {
        let source = match &self.start {
            Start::Inpaint(inpaint) => inpaint.source.area() / 256,
            Start::Noise | Start::Image(_) => 0,
        };
        (source + self.references.iter().map(|r| r.area() / 256).sum::<u64>()) as usize
    }

    /// Rows of one image in the transformer: text, image and reference tokens.
    pub fn rows(&self) -> usize {
        let [height, width] = self.grid();
        self.text_rows() + height * width + self.reference_tokens()
    }

    fn text_rows(&self) -> usize {
        match &self.prompt {
            Prompt::Text { .. } => self.max_tokens,
            Prompt::Embeddings { prompts, .. } => {
                prompts.iter().map(|text| text.shape().rows()).max().unwrap_or(0)
            }
        }
    }

    /// The memory that one image takes beside the weights.
    pub fn memory_need(&self, dtype: DType) -> MemoryNeed {
        let others = self.text_rows() + self.reference_tokens();
        self.model.memory_need([self.width, self.height], others, dtype)
    }

    /// Refuses an image that needs more than `limit` bytes beside the weights.
    pub fn check_memory(&self, dtype: DType, limit: Option<u64>) -> Result<()> {
        let need = self.memory_need(dtype);
        match limit {
            Some(limit) if need.peak() > limit => {
                let smallest = self.model.memory_need([16, 16], self.max_tokens, dtype);
                let (width, height, any_size) = (self.width, self.height, smallest.peak() > limit);
                Err(Error::Memory { width, height, need, limit, any_size })
            }
            _ => Ok(()),
        }
    }

    /// What one of its images is made from.
    pub fn image(&self, index: usize) -> ImagePlan {
        let (seed, part) = match &self.noise {
            Noise::Seed { seed, .. } => (Some(*seed), (index, self.images)),
            Noise::Part { seed, index, of, .. } => (Some(*seed), (*index, *of)),
            Noise::Seeds { seeds, .. } => (seeds.get(index).copied(), (0, 1)),
            Noise::Given(_) => {
                let part = self.request.part.map(|part| (part.index, part.of));
                (None, part.unwrap_or((index, self.images)))
            }
        };
        let number = index / self.per_prompt;
        match &self.prompt {
            Prompt::Text { prompts, negatives } => ImagePlan {
                prompt: prompts.get(number).cloned(),
                negative: negatives.get(number).or_else(|| negatives.first()).cloned(),
                row: 0,
                seed,
                part,
            },
            Prompt::Embeddings { first_row, .. } => {
                ImagePlan { prompt: None, negative: None, row: first_row + number, seed, part }
            }
        }
    }

    /// Turns the prompts into tokens now, on this thread, and not when the images are made.
    pub fn tokenize(&self) -> Result<()> {
        self.tokens().map(drop)
    }

    /// The texts that have to be encoded, as tokens; none where embeddings are given. Made the first time.
    pub(crate) fn tokens(&self) -> Result<&Texts<Tokens>> {
        self.tokens.get(|| {
            let texts = self.texts();
            let encode = |texts: Vec<&str>| -> Result<Vec<Tokens>> {
                if texts.is_empty() {
                    return Ok(Vec::new());
                }
                let tokenizer = self.model.prompt_tokenizer()?;
                texts.into_iter().map(|text| Ok(tokenizer.encode(text, self.max_tokens)?)).collect()
            };
            Ok(Texts { prompts: encode(texts.prompts)?, negatives: encode(texts.negatives)? })
        })
    }

    /// Prompts that are longer than what the model looks at.
    pub(crate) fn cut_prompts(&self) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        for prompt in self.texts().prompts {
            let count = self.model.prompt_tokenizer()?.count(prompt)?;
            if count > self.max_tokens {
                let max = self.max_tokens;
                notes.push(format!("the prompt has {count} tokens and is cut to {max}"));
            }
        }
        Ok(notes)
    }

    /// Guidance without a negative prompt steers away from the empty text.
    fn texts(&self) -> Texts<&str> {
        let guided = self.calls_per_step > 1;
        match &self.prompt {
            Prompt::Text { prompts, negatives } => {
                let negatives = match &negatives[..] {
                    _ if !guided => Vec::new(),
                    [] => vec![""],
                    negatives => negatives.iter().map(String::as_str).collect(),
                };
                Texts { prompts: prompts.iter().map(String::as_str).collect(), negatives }
            }
            Prompt::Embeddings { negative: None, .. } if guided => {
                Texts { prompts: Vec::new(), negatives: vec![""] }
            }
            Prompt::Embeddings { .. } => Texts { prompts: Vec::new(), negatives: Vec::new() },
        }
    }

    /// Refuses more tokens than the model has positions for, and says what many references cost.
    fn check_positions(mut self) -> Result<Plan> {
        let (rows, references) = (self.rows(), self.reference_tokens());
        if references > 0 && rows > MAX_POSITIONS {
            let count = self.references.len();
            return Err(Error::request(format!(
                "{count} reference images take {references} tokens, {rows} with text and image; the model has \
                 {MAX_POSITIONS} positions"
            ))
            .hint("give fewer or smaller references"));
        }
        if self.references.len() >= MANY_REFERENCES {
            let (count, config) = (self.references.len(), &self.model.transformer.config);
            let cost = config.operations(rows) / config.operations(rows - references).max(1.0);
            self.notes.push(format!(
                "{count} references take {references} tokens: a step costs {cost:.1} times one without them"
            ));
        }
        Ok(self)
    }
}
