//! A request understood: every default filled in, its files read, its images prepared. Made once, and used by everything
//! that follows.

use std::path::PathBuf;
use std::sync::Arc;

use kiln_image::{GrayPicture, Inpaint, Picture};
use kiln_model::schedule::{Schedule, Spacing};
use kiln_model::tokenizer::Tokens;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Lora;

use crate::error::{Error, Result, While};
use crate::inputs::{self, InputImage, Inputs};
use crate::lazy::Lazy;
use crate::memory::MemoryNeed;
use crate::model::{Model, VaeFile, Variant};
use crate::noise::{MAX_IMAGES, Noise};
use crate::request::{FileRef, MAX_TOKENS, Request, ScheduleKind};

/// Image to image keeps the composition and changes the rest.
const STRENGTH: f64 = 0.6;
/// What diffusers' inpainting takes.
const MASK_STRENGTH: f64 = 0.8;
const RHO: f32 = 2.0;
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

impl Prompt {
    /// Number of prompts.
    pub fn count(&self) -> usize {
        match self {
            Prompt::Text { prompts, .. } => prompts.len(),
            Prompt::Embeddings { prompts, .. } => prompts.len(),
        }
    }
}

/// Refuses fields that make no sense together, before any file is read.
fn check(request: &Request) -> Result<()> {
    let needs = |field: &str, other: &str, what: &str| {
        Err(Error::combination(format!("`{field}` needs `{other}`"))
            .hint(format!("give {what} as `{other}`")))
    };
    let (init, mask) = (request.init.is_some(), request.mask.is_some());
    if mask && !init {
        return needs("mask", "init", "the image that the mask belongs to");
    }
    if request.strength.is_some() && !init {
        return needs("strength", "init", "the image to start from");
    }
    if request.mask_padding.is_some() && !mask {
        return needs("mask_padding", "mask", "the place to change");
    }
    if request.rho.is_some() && request.schedule != Some(ScheduleKind::Power) {
        return Err(Error::combination("`rho` goes with `schedule` power"));
    }
    if let Some(tokens) = request.max_tokens.filter(|tokens| !(1..=MAX_TOKENS).contains(tokens)) {
        let what = format!("the number of text tokens must lie between 1 and {MAX_TOKENS}, found {tokens}");
        return Err(Error::request(what));
    }
    if request.embeds.is_some() {
        if !request.negative_prompts.is_empty() {
            return Err(Error::combination("`negative_prompts` and `embeds` don't go together")
                .hint("put `negative_prompt_embeds` into the file of embeddings"));
        }
        return Ok(());
    }
    let (prompts, negatives) = (request.prompts.len(), request.negative_prompts.len());
    if prompts == 0 {
        return Err(Error::combination("no prompt was given").hint(
            "say what to show: kiln generate \"a red apple on a blue background\"; `-` reads it from standard input",
        ));
    }
    if negatives > 1 && negatives != prompts {
        return Err(Error::combination(format!(
            "{negatives} negative prompts were given for {prompts} prompts"
        ))
        .hint("give one for all, or one for each prompt"));
    }
    Ok(())
}

fn prompt(request: &Request, used: &mut Request, inputs: &dyn Inputs) -> Result<Prompt> {
    let Some(file) = &request.embeds else {
        let (prompts, negatives) = (request.prompts.clone(), request.negative_prompts.clone());
        return Ok(Prompt::Text { prompts, negatives });
    };
    let (source, from) = inputs::tensors(&inputs.tensors(&file.path)?, "prompt embeddings")?;
    used.embeds = Some(from);
    let all = entries(&inputs::named_tensor(&source, &["prompt_embeds"])?)?;
    let negative = match source.contains("negative_prompt_embeds") {
        true => entries(&source.tensor("negative_prompt_embeds")?)?.into_iter().next(),
        false => None,
    };
    let row = request.part.and_then(|part| part.row);
    let prompts = match row {
        None => all,
        Some(row) if row < all.len() => vec![all[row].clone()],
        Some(row) => {
            let (path, found) = (file.path.display(), all.len());
            let what = format!("`{path}` has {found} prompts, the recipe wants number {}", row + 1);
            return Err(Error::request(what));
        }
    };
    Ok(Prompt::Embeddings { prompts, negative, first_row: row.unwrap_or(0) })
}

/// `[batch, tokens, dim]` as its entries; `[tokens, dim]` is one.
fn entries(x: &HostTensor) -> Result<Vec<HostTensor>> {
    let bad = |e: kiln_tensor::Error| Error::request(format!("the prompt embeddings can't be used: {e}"));
    match *x.shape().dims() {
        [batch, tokens, dim] => (0..batch)
            .map(|i| x.rows(i..i + 1)?.reshape([tokens, dim]))
            .collect::<Result<_, _>>()
            .map_err(bad),
        _ => Ok(vec![x.clone()]),
    }
}

/// Refuses a model that lacks a part which this request needs, and embeddings that are not this model's.
fn require_parts(model: &Model, prompt: &Prompt, request: &Request) -> Result<()> {
    if model.vae.is_none() && request.vae.is_none() {
        return Err(model.missing_part(crate::error::MissingPart::Vae));
    }
    let Prompt::Embeddings { prompts, negative, .. } = prompt else {
        return match model.text_encoder {
            Some(_) => Ok(()),
            None => Err(model.missing_part(crate::error::MissingPart::TextEncoder)),
        };
    };
    let (dim, path) =
        (model.transformer.config.joint_attention_dim, request.embeds.as_ref().map(|e| &e.path));
    let path = path.map_or(std::path::Path::new(""), PathBuf::as_path);
    let fits =
        |text: &&HostTensor| matches!(text.shape().dims(), [tokens, last] if *tokens > 0 && *last == dim);
    if let Some(text) = prompts.iter().chain(negative).find(|text| !fits(text)) {
        let (file, shape) = (path.display(), text.shape());
        let what = format!("`{file}` has prompt embeddings of shape {shape}, expected [tokens, {dim}]");
        return Err(
            Error::request(what).hint("they must come from the text encoder that belongs to this model")
        );
    }
    prompts.iter().chain(negative).try_for_each(|text| inputs::finite(path, "prompt embeddings", text))
}

/// Images for each of `prompts`, and a check that there is a seed for each image.
fn per_prompt(request: &Request, prompts: usize) -> Result<usize> {
    let seeds = request.seed.len();
    let asked = request.n.map(|n| n as usize);
    if seeds <= 1 || request.noise.is_some() {
        return Ok(asked.unwrap_or(1));
    }
    let per_prompt = asked.unwrap_or((seeds / prompts.max(1)).max(1));
    if per_prompt.checked_mul(prompts) != Some(seeds) {
        let images = per_prompt.saturating_mul(prompts);
        return Err(Error::combination(format!("{seeds} seeds were given for {images} images"))
            .hint("give one seed for all, or one for each image"));
    }
    Ok(per_prompt)
}

fn image_count(prompts: usize, per_prompt: usize) -> Result<usize> {
    match prompts.saturating_mul(per_prompt) {
        0 => Err(Error::request("there is nothing to generate: no prompt, or a batch of 0")),
        n if n > MAX_IMAGES => {
            Err(Error::request(format!("{n} images are too many for one request; at most {MAX_IMAGES}")))
        }
        n => Ok(n),
    }
}

fn loras(used: &mut Request, inputs: &dyn Inputs) -> Result<Vec<PlannedLora>> {
    let mut planned = Vec::with_capacity(used.loras.len());
    for lora in &mut used.loras {
        let path = inputs.lora(&lora.path)?;
        let open = || {
            let lora = Lora::open(&path)?;
            Ok::<_, kiln_weights::Error>((lora.fingerprint()?, lora))
        };
        let (fingerprint, opened) = open().while_doing(|| "reading a LoRA".into())?;
        lora.path = inputs::absolute(&path).into();
        lora.sha256 = Some(fingerprint.clone());
        planned.push(PlannedLora { path, weight: lora.weight, fingerprint, lora: Arc::new(opened) });
    }
    Ok(planned)
}

fn vae(model: &Model, used: &mut Request, inputs: &dyn Inputs) -> Result<Option<Arc<VaeFile>>> {
    let Some(asked) = &used.vae else { return Ok(None) };
    let path = inputs.vae(&asked.path)?;
    let file = model.vae_file(&path).while_doing(|| "opening the autoencoder".into())?;
    let (path, sha256) = (inputs::absolute(&path).into(), Some(file.fingerprint.clone()));
    used.vae = Some(FileRef { path, sha256 });
    Ok(Some(file))
}

/// Reads an image, and notes what a recipe says of it.
fn read_image(inputs: &dyn Inputs, file: &mut FileRef, role: &str) -> Result<Arc<Picture>> {
    let read = inputs.image(&file.path).while_doing(|| format!("reading the {role}"))?;
    let InputImage { picture, file: used } = read;
    *file = used;
    Ok(picture)
}

/// A reference as the pipeline takes it. A small model gets it no larger than the images it was trained on.
fn prepare_reference(model: &Model, file: &FileRef, picture: &Picture) -> Result<Picture> {
    let prepared = match model.trained_sides() {
        None => kiln_image::prepare_reference(picture),
        Some(_) => {
            let area = (model.default_size as u64).pow(2);
            kiln_image::prepare_reference(&kiln_image::shrink_to(picture, area))
        }
    };
    prepared.while_doing(|| format!("preparing the reference image `{}`", file.path.display()))
}

/// Width, height, what to start from, and the strength where there is one.
fn start(
    model: &Model,
    request: &Request,
    used: &mut Request,
    inputs: &dyn Inputs,
    references: &[Picture],
    notes: &mut Vec<String>,
) -> Result<(usize, usize, Start, Option<f64>)> {
    const INIT: &str = "image to start from";
    let Some(init) = &mut used.init else {
        let first = references.first().map(|r| (r.width(), r.height()));
        let own = model.default_size as u32;
        let (width, height) = first.unwrap_or((own, own));
        let width = side("width", request.width.unwrap_or(width), notes)?;
        let height = side("height", request.height.unwrap_or(height), notes)?;
        return Ok((width as usize, height as usize, Start::Noise, None));
    };
    let source = read_image(inputs, init, INIT)?;
    let Some(mask) = &mut used.mask else {
        let mut ask = |name, size: Option<u32>| size.map(|s| side(name, s, notes)).transpose();
        let (width, height) = (ask("width", request.width)?, ask("height", request.height)?);
        let size =
            kiln_image::init_size(&source, width, height).while_doing(|| format!("preparing the {INIT}"));
        let size = size.map(|(width, height)| (width as usize, height as usize))?;
        let start = InitImage { source, width, height, prepared: Lazy::new() };
        let strength = Some(request.strength.unwrap_or(STRENGTH));
        return Ok((size.0, size.1, Start::Image(Box::new(start)), strength));
    };
    if request.width.is_some() || request.height.is_some() {
        notes.push("width and height have no effect with a mask: the image keeps its size".into());
    }
    let mask = GrayPicture::from(&*read_image(inputs, mask, "mask")?);
    let inpaint = kiln_image::prepare_inpaint(&source, &mask, request.mask_padding)?;
    let (width, height) = (inpaint.width as usize, inpaint.height as usize);
    let strength = Some(request.strength.unwrap_or(MASK_STRENGTH));
    Ok((width, height, Start::Inpaint(Box::new(inpaint)), strength))
}

fn side(name: &str, size: u32, notes: &mut Vec<String>) -> Result<u32> {
    const MAX: u32 = 1 << 20;
    let rounded = size / 16 * 16;
    if rounded == 0 || size > MAX {
        return Err(Error::request(format!("{name} must lie between 16 and {MAX} pixels, found {size}")));
    }
    if rounded != size {
        notes.push(format!("{name} {size} is rounded down to {rounded}, a multiple of 16"));
    }
    Ok(rounded)
}

fn schedule(model: &Model, request: &Request, tokens: usize, steps: usize) -> Result<Schedule> {
    const MAX: usize = 10_000;
    if steps > MAX {
        return Err(Error::request(format!("{steps} steps are too many; at most {MAX}")));
    }
    let spacing = match request.schedule.unwrap_or_default() {
        ScheduleKind::Shifted => Spacing::Shifted,
        ScheduleKind::Power => Spacing::Power { rho: request.rho.unwrap_or(RHO) },
    };
    let custom = Some(&request.sigmas[..]).filter(|sigmas| !sigmas.is_empty());
    Ok(Schedule::new(&model.scheduler, spacing, tokens, steps, custom)?)
}

fn guidance(model: &Model, request: &Request, notes: &mut Vec<String>) -> Result<Option<f32>> {
    let variant = model.variant;
    if let Some(g) = request.guidance.filter(|g| !(g.is_finite() && *g >= 0.0)) {
        return Err(Error::request(format!("guidance must be a number of at least 0, found {g}")));
    }
    let guidance = model.default_guidance().map(|default| request.guidance.unwrap_or(default));
    if guidance.is_none() && request.guidance.is_some_and(|g| g != 1.0) {
        notes.push(format!("guidance has no effect: {variant} needs none"));
    }
    if !request.negative_prompts.is_empty() && variant.calls_per_step(guidance) == 1 {
        let why = match variant {
            Variant::Base => "it needs a guidance above 1",
            _ => "this model has no guidance",
        };
        notes.push(format!("the negative prompt has no effect: {why}"));
    }
    Ok(guidance)
}

fn noise(
    model: &Model,
    request: &Request,
    used: &mut Request,
    inputs: &dyn Inputs,
    images: usize,
    [height, width]: [usize; 2],
) -> Result<Noise> {
    let rng = request.rng.unwrap_or_default();
    let Some(file) = &request.noise else {
        return Ok(match (&request.seed[..], request.part) {
            ([], _) => Noise::Seed { seed: 0, rng },
            (&[seed], Some(part)) => Noise::Part { seed, rng, index: part.index, of: part.of },
            (&[seed], None) => Noise::Seed { seed, rng },
            (seeds, _) => Noise::Seeds { seeds: seeds.to_vec(), rng },
        });
    };
    let (source, from) = inputs::tensors(&inputs.tensors(&file.path)?, "noise")?;
    used.noise = Some(from);
    let all = inputs::named_tensor(&source, &["noise", "latents"])?;
    let path = file.path.display();
    let noise = match request.part {
        Some(part) if part.of > 1 => all
            .rows(part.index..part.index + 1)
            .map_err(|e| Error::request(format!("`{path}` is not the noise of {} images: {e}", part.of)))?,
        _ => all,
    };
    let (channels, tokens) = (model.transformer.config.in_channels, height * width);
    let batch = |dims: &[usize], one: &[usize]| {
        dims.strip_suffix(one).is_some_and(|rest| rest.iter().product::<usize>() == images)
    };
    let dims = noise.shape().dims();
    if !batch(dims, &[channels, height, width]) && !batch(dims, &[tokens, channels]) {
        let shape = noise.shape();
        return Err(Error::request(format!(
            "`{path}` has noise of shape {shape}, expected [{images}, {channels}, {height}, {width}] or \
             [{images}, {tokens}, {channels}]"
        ))
        .hint("width and height of the noise are a sixteenth of the image's: choose them to fit"));
    }
    inputs::finite(&file.path, "noise", &noise)?;
    Ok(Noise::Given(noise))
}
