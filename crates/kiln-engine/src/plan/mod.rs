//! A plan: a request resolved for one model, with every default filled in, its files read and its images prepared.

mod checks;
mod contents;
mod defaults;
mod files;
mod limits;
mod upscale;

use std::sync::Arc;

use kiln_image::{Encoding, RgbImage};
use kiln_nn::schedule::Schedule;
use kiln_nn::tokenizer::Tokens;
use kiln_tensor::DType;

use crate::error::{Error, Result};
use crate::inputs::{InputResolver, read_image};
use crate::memory::MemoryEstimate;
use crate::model::{Model, VaeFile};
use crate::noise::NoiseSource;
use crate::once::TryOnceLock;
use crate::request::{BatchPosition, Request, ScheduleKind};
pub use checks::{check_range, check_request};
use checks::{image_count, images_per_prompt};
pub(crate) use contents::PromptSet;
pub use contents::{ImagePlan, InitImage, PlannedLora, Prompt, StartingPoint, UpscaleInputs};
use defaults::{RHO, cache, check_components, guidance, schedule, text_layers};
use files::{open_loras, open_vae, prepare_reference, read_noise, read_prompt, read_starting_point};

/// From this many reference images on, a note says what they cost.
const MANY_REFERENCES: usize = 4;

/// A request resolved for one model. Creating it checks the request, reads its files and fills in its defaults; nothing
/// that follows looks at the request again.
#[derive(Debug)]
pub struct Plan {
    /// The model.
    pub model: Arc<Model>,
    /// The request with defaults filled in, and with paths and hashes of its files; for recipes.
    pub request: Request,
    /// Width in pixels of what the model generates, whole tokens; of a tile when upscaling.
    pub width: usize,
    /// Height in pixels of what the model generates, whole tokens; of a tile when upscaling.
    pub height: usize,
    /// Number of images.
    pub images: usize,
    /// Images for each prompt.
    pub images_per_prompt: usize,
    /// Steps of the whole schedule, including those that strength skips.
    pub steps: usize,
    /// The first step to run; above 0 if strength skips some.
    pub first_step: usize,
    /// Noise levels, including the final 0.
    pub schedule: Schedule,
    /// Guidance; `None` for variants without guidance.
    pub guidance: Option<f32>,
    /// Threshold of the step cache; `None` if it is off.
    pub cache: Option<f32>,
    /// Transformer calls per step: 2 with classifier-free guidance.
    pub calls_per_step: usize,
    /// Number of tokens that prompts are truncated or padded to.
    pub max_tokens: usize,
    /// The text encoder's layers whose states make up a text token; empty without a text encoder.
    pub text_layers: Vec<usize>,
    /// The prompts.
    pub prompt: Prompt,
    /// Reference images, resized and cropped.
    pub references: Vec<RgbImage>,
    /// What denoising starts from.
    pub start: StartingPoint,
    /// The source of the noise.
    pub noise: NoiseSource,
    /// LoRAs for the transformer.
    pub loras: Vec<PlannedLora>,
    /// Whether modules of a LoRA that match no layer are skipped instead of refused.
    pub lora_partial: bool,
    /// A VAE to use in place of the model's.
    pub vae: Option<Arc<VaeFile>>,
    /// Notes for the user: options without effect, rounded sizes, words that a small model has not learned.
    pub notes: Vec<String>,
    /// Whether the size is taken from the initial image.
    pub(crate) size_of_init: bool,
    tokens: TryOnceLock<PromptSet<Tokens>>,
}

impl Plan {
    /// Checks a request against the model, reads its files, prepares its images and fills in its defaults. Loads no
    /// weights.
    pub fn new(model: &Arc<Model>, request: &Request, inputs: &dyn InputResolver) -> Result<Plan> {
        check_request(request)?;
        let mut resolved = request.clone();
        let mut notes = Vec::new();
        let prompt = read_prompt(request, &mut resolved, inputs)?;
        check_components(model, &prompt, request)?;
        let prompts = prompt.count();
        let images_per_prompt = images_per_prompt(request, prompts)?;
        let images = image_count(prompts, images_per_prompt)?;
        let loras = open_loras(&mut resolved, inputs)?;
        let vae = open_vae(model, &mut resolved, inputs, &mut notes)?;
        let mut references = Vec::with_capacity(request.references.len());
        for reference in &mut resolved.references {
            let image = read_image(inputs, reference, "reference image")?;
            references.push(prepare_reference(model, reference, &image)?);
        }
        let (width, height, start, strength) =
            read_starting_point(model, request, &mut resolved, inputs, &references, &mut notes)?;
        let steps = match (request.steps, request.sigmas.len()) {
            (Some(steps), _) => steps as usize,
            (None, 0) => model.default_steps(),
            (None, sigmas) => sigmas,
        };
        if let (Some(steps), sigmas @ 1..) = (request.steps, request.sigmas.len())
            && steps as usize != sigmas
        {
            notes.push(format!(
                "the {sigmas} sigmas decide on the number of steps, not the {steps} given for it"
            ));
        }
        let tokens = model.grid_tokens([width, height]);
        let (schedule, first_step, noise_grid) = match &start {
            StartingPoint::Upscale(inputs) => {
                let schedule = upscale::schedule(model, request, tokens, strength.unwrap_or(1.0));
                (schedule, 0, inputs.grid())
            }
            _ => {
                let schedule = schedule(model, request, tokens, steps);
                let first_step = schedule.first_step(strength.unwrap_or(1.0));
                (schedule, first_step, model.grid([width, height]))
            }
        };
        let guidance = guidance(model, request, &mut notes);
        let cache = cache(model, request, &mut notes);
        let max_tokens = request.max_tokens.map_or_else(|| model.default_tokens(), |n| n as usize);
        let text_layers = text_layers(model, request, &mut notes)?;
        notes.extend(limits::notes(model, &prompt, !loras.is_empty(), [width, height]));
        let noise = read_noise(model, request, &mut resolved, inputs, images, noise_grid)?;
        let size_of_init = request.width.is_none()
            && request.height.is_none()
            && request.init.is_some()
            && request.mask.is_none();
        if request.upscale.is_none() {
            (resolved.width, resolved.height) = (Some(width as u32), Some(height as u32));
        }
        // With custom sigmas, the requested number of steps still determines the shift.
        resolved.steps = Some(request.steps.unwrap_or(schedule.steps() as u32));
        resolved.schedule = Some(request.schedule.unwrap_or_default());
        resolved.rho = (resolved.schedule == Some(ScheduleKind::Power)).then(|| request.rho.unwrap_or(RHO));
        resolved.rng = Some(request.rng.unwrap_or_default());
        resolved.guidance = guidance;
        resolved.cache = cache;
        resolved.strength = strength;
        resolved.max_tokens = Some(max_tokens as u32);
        let plan = Plan {
            model: Arc::clone(model),
            width,
            height,
            images,
            images_per_prompt,
            steps: schedule.steps(),
            first_step,
            schedule,
            calls_per_step: model.variant.calls_per_step(guidance),
            guidance,
            cache,
            max_tokens,
            text_layers,
            prompt,
            references,
            start,
            noise,
            loras,
            lora_partial: request.lora_partial,
            vae,
            notes,
            size_of_init,
            request: resolved,
            tokens: TryOnceLock::new(),
        };
        if request.output_format.is_some() {
            plan.check_encoding(request.encoding())?;
        }
        plan.check_positions()
    }

    /// Refuses a file format that can't hold images of this size.
    pub fn check_encoding(&self, encoding: Encoding) -> Result<()> {
        let [width, height] = self.output_size();
        let max = encoding.max_side();
        if width.max(height) <= max {
            return Ok(());
        }
        let format = encoding.format;
        Err(Error::value(format!(
            "a {format} file has at most {max} pixels a side, the image {width}x{height}"
        ))
        .with_hint("choose PNG, or a smaller size"))
    }

    /// Returns the token grid: height and width; of a tile when upscaling.
    pub fn grid(&self) -> [usize; 2] {
        self.model.grid([self.width, self.height])
    }

    /// Returns the grid of the noise: all of the image, also when upscaling.
    pub(crate) fn noise_grid(&self) -> [usize; 2] {
        self.upscale().map_or(self.grid(), UpscaleInputs::grid)
    }

    /// Returns the image to upscale and its tiles, if the plan is to upscale.
    pub fn upscale(&self) -> Option<&UpscaleInputs> {
        match &self.start {
            StartingPoint::Upscale(inputs) => Some(inputs),
            _ => None,
        }
    }

    /// Returns width and height of the images in pixels.
    pub fn output_size(&self) -> [u32; 2] {
        match &self.start {
            StartingPoint::Upscale(inputs) => inputs.size(),
            StartingPoint::Inpaint(inpaint) => {
                inpaint.paste.as_ref().map_or([inpaint.width, inpaint.height], |paste| {
                    [paste.original.width(), paste.original.height()]
                })
            }
            _ => [self.width as u32, self.height as u32],
        }
    }

    /// Returns the tokens of all reference images, including the source of an inpainting.
    pub fn reference_tokens(&self) -> usize {
        let tokens = |image: &RgbImage| {
            self.model.grid_tokens([image.width(), image.height()].map(|side| side as usize))
        };
        let source = match &self.start {
            StartingPoint::Inpaint(inpaint) => tokens(&inpaint.source),
            StartingPoint::Upscale(inputs) => {
                let tile = [inputs.tiles.tile_width(), inputs.tiles.tile_height()];
                let tile = self.model.grid_tokens(tile.map(|side| side as usize));
                tile + inputs.overview.as_ref().map_or(0, tokens)
            }
            StartingPoint::Noise | StartingPoint::Image(_) => 0,
        };
        source + self.references.iter().map(tokens).sum::<usize>()
    }

    /// Returns the rows of one image in the transformer: text, image and reference tokens.
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

    /// Estimates the memory that one image takes in addition to the weights.
    pub fn memory_estimate(&self, dtype: DType) -> MemoryEstimate {
        let other_tokens = self.text_rows() + self.reference_tokens();
        let mut estimate = self.model.memory_estimate([self.width, self.height], other_tokens, dtype);
        if self.cache.is_some() {
            let config = &self.model.transformer.config;
            estimate.transformer +=
                self.calls_per_step as u64 * MemoryEstimate::step_cache(config, self.rows(), dtype);
        }
        estimate
    }

    /// Refuses an image that needs more than `limit` bytes in addition to the weights.
    pub fn check_memory(&self, dtype: DType, limit: Option<u64>) -> Result<()> {
        let estimate = self.memory_estimate(dtype);
        match limit {
            Some(limit) if estimate.peak() > limit => {
                let smallest =
                    self.model.memory_estimate([self.model.pixels_per_token(); 2], self.max_tokens, dtype);
                let (width, height, any_size) = (self.width, self.height, smallest.peak() > limit);
                Err(Error::Memory { width, height, estimate, limit, any_size })
            }
            _ => Ok(()),
        }
    }

    /// Returns what one of the images is generated from.
    pub fn image(&self, index: usize) -> ImagePlan {
        let (seed, batch_index, batch) = match &self.noise {
            NoiseSource::Seed { seed, .. } => (Some(*seed), index, self.images),
            NoiseSource::OneOfBatch { seed, index, batch, .. } => (Some(*seed), *index, *batch),
            NoiseSource::Seeds { seeds, .. } => (seeds.get(index).copied(), 0, 1),
            NoiseSource::Given(_) => match self.request.batch_position {
                Some(BatchPosition { index, batch, .. }) => (None, index, batch),
                None => (None, index, self.images),
            },
        };
        let number = index / self.images_per_prompt;
        let (prompt, negative, embeds_row) = match &self.prompt {
            Prompt::Text { prompts, negatives } => {
                let negative = negatives.get(number).or_else(|| negatives.first());
                (prompts.get(number).cloned(), negative.cloned(), 0)
            }
            Prompt::Embeddings { first_row, .. } => (None, None, first_row + number),
        };
        ImagePlan { prompt, negative, embeds_row, seed, batch_index, batch }
    }

    /// Tokenizes the prompts now, on this thread, instead of when generating starts.
    pub fn tokenize(&self) -> Result<()> {
        self.tokens().map(drop)
    }

    /// Returns the tokens of the texts to encode; none for embeddings. Tokenizes on first use.
    pub(crate) fn tokens(&self) -> Result<&PromptSet<Tokens>> {
        self.tokens.get_or_try_init(|| {
            let texts = self.texts();
            let encode = |texts: Vec<&str>| -> Result<Vec<Tokens>> {
                if texts.is_empty() {
                    return Ok(Vec::new());
                }
                let tokenizer = self.model.prompt_tokenizer()?;
                texts.into_iter().map(|text| Ok(tokenizer.encode(text, self.max_tokens)?)).collect()
            };
            Ok(PromptSet { prompts: encode(texts.prompts)?, negatives: encode(texts.negatives)? })
        })
    }

    /// Returns a note for each prompt that is truncated.
    pub(crate) fn truncation_notes(&self) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        for prompt in self.texts().prompts {
            let count = self.model.prompt_tokenizer()?.count(prompt)?;
            if count > self.max_tokens {
                let max = self.max_tokens;
                notes.push(format!("the prompt has {count} tokens and is truncated to {max}"));
            }
        }
        Ok(notes)
    }

    /// Returns the texts to encode. Guidance without a negative prompt uses the empty text.
    fn texts(&self) -> PromptSet<&str> {
        let guided = self.calls_per_step > 1;
        match &self.prompt {
            Prompt::Text { prompts, negatives } => {
                let negatives = match &negatives[..] {
                    _ if !guided => Vec::new(),
                    [] => vec![""],
                    negatives => negatives.iter().map(String::as_str).collect(),
                };
                PromptSet { prompts: prompts.iter().map(String::as_str).collect(), negatives }
            }
            Prompt::Embeddings { negatives, .. } if guided && negatives.is_empty() => {
                PromptSet { prompts: Vec::new(), negatives: vec![""] }
            }
            Prompt::Embeddings { .. } => PromptSet { prompts: Vec::new(), negatives: Vec::new() },
        }
    }

    /// Refuses more tokens than the model has positions for; notes the cost of many reference images.
    fn check_positions(mut self) -> Result<Plan> {
        let (rows, references) = (self.rows(), self.reference_tokens());
        let positions = self.model.variant.family.positions;
        if references > 0 && rows > positions {
            let count = self.references.len();
            return Err(Error::request(format!(
                "{count} reference images take {references} tokens, {rows} with text and image; the model has \
                 {positions} positions"
            ))
            .with_hint("give fewer or smaller references"));
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
