//! An order with its files read: the request for the pipeline, and the recipe of each picture.

use kiln_image::GrayPicture;
use kiln_model::{ModelFolder, Noise, Options, Part, Prompt, Request, Resolved, Task, TextCache};
use kiln_tensor::HostTensor;
use kiln_weights::LinearForm;

use crate::args::ScheduleArg;
use crate::failure::{Failure, While};
use crate::files;
use crate::order::{Chance, Order, Start, Words};
use crate::recipe::{LoraUsed, Model, OtherParts, Recipe, Row, Used};

/// Pictures that are painted at once, where that is faster; more make no more of a difference.
pub const MOST_TOGETHER: usize = 4;

/// Everything that is needed to paint.
pub struct Job {
    pub request: Request,
    pub options: Options,
    pub pictures: Vec<Plan>,
    used: Files,
}

/// One picture to come.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub prompt: Option<String>,
    /// Which of the embeddings in the file, when there is no prompt.
    pub row: usize,
    pub seed: Option<u64>,
    /// Place in the batch whose noise is drawn at once, and its size.
    pub part: (usize, usize),
}

/// What recipes say of the files that were read.
#[derive(Default)]
struct Files {
    embeds: Option<Used>,
    noise: Option<Used>,
    references: Vec<Used>,
    init: Option<Used>,
    mask: Option<Used>,
}

impl Job {
    /// Reads every file of the order but the weights.
    pub fn read(
        order: &Order,
        folder: &ModelFolder,
        memory_limit: Option<u64>,
        text_cache: Option<TextCache>,
    ) -> Result<Job, Failure> {
        let mut used = Files::default();
        let (prompt, first_row) = prompt(order, &mut used)?;
        let per_prompt = order.per_prompt(prompt.count())?;
        let mut references = Vec::new();
        for path in &order.references {
            let (picture, file) = files::picture(path, "reference picture")?;
            // The pipeline does so again; here the file can be named.
            kiln_image::prepare_reference(&picture)
                .while_doing(|| format!("preparing the reference picture `{}`", path.display()))?;
            references.push(picture);
            used.references.push(file);
        }
        let request = Request {
            pictures_per_prompt: per_prompt,
            width: order.width,
            height: order.height,
            steps: order.steps,
            sigmas: order.sigmas.clone(),
            spacing: order.spacing(),
            guidance: order.guidance,
            noise: noise(order, &mut used)?,
            references,
            task: task(order, &mut used)?,
            max_tokens: order.max_tokens.unwrap_or_else(|| folder.default_tokens()),
            prompt,
        };
        let options = Options {
            dtype: order.precision.dtype(),
            form: LinearForm::Float,
            vae: order.vae.clone(),
            loras: order.loras.iter().map(|l| (l.path.clone(), l.weight)).collect(),
            lora_partial: order.lora_partial,
            memory_limit,
            most_together: MOST_TOGETHER,
            placement: None,
            text_cache,
        };
        let pictures = plans(order, &request, first_row);
        Ok(Job { request, options, pictures, used })
    }

    /// Checks tensors that were made elsewhere against the model, while their files can still be named.
    pub fn check(&self, order: &Order, folder: &ModelFolder, resolved: &Resolved) -> Result<(), Failure> {
        let config = &folder.transformer.config;
        if let (Words::Embeds { file, .. }, Prompt::Embeddings { prompts, negative }) =
            (&order.words, &self.request.prompt)
        {
            let dim = config.joint_attention_dim;
            let fits = |text: &&HostTensor| matches!(text.shape().dims(), [tokens, last] if *tokens > 0 && *last == dim);
            if let Some(text) = prompts.iter().chain(negative).find(|text| !fits(text)) {
                let (file, shape) = (file.display(), text.shape());
                return Err(Failure::new(format!(
                    "`{file}` has prompt embeddings of shape {shape}, expected [tokens, {dim}]"
                ))
                .hint("they must come from the text encoder that belongs to this model"));
            }
            prompts
                .iter()
                .chain(negative)
                .try_for_each(|text| files::finite(file, "prompt embeddings", text))?;
        }
        if let (Chance::File { path, .. }, Noise::Given(noise)) = (&order.chance, &self.request.noise) {
            let (pictures, channels, [height, width]) =
                (resolved.pictures, config.in_channels, resolved.grid());
            let tokens = height * width;
            let batch = |dims: &[usize], one: &[usize]| {
                dims.strip_suffix(one).is_some_and(|rest| rest.iter().product::<usize>() == pictures)
            };
            let dims = noise.shape().dims();
            if !batch(dims, &[channels, height, width]) && !batch(dims, &[tokens, channels]) {
                let (path, shape) = (path.display(), noise.shape());
                return Err(Failure::new(format!(
                    "`{path}` has noise of shape {shape}, expected [{pictures}, {channels}, {height}, {width}] or \
                     [{pictures}, {tokens}, {channels}]"
                ))
                .hint("width and height of the noise are a sixteenth of the picture's: choose -W and -H to fit"));
            }
            files::finite(path, "noise", noise)?;
        }
        Ok(())
    }

    /// What all recipes of this job share; [`Job::recipe`] adds what is a picture's own.
    pub fn recipe_base(
        &self,
        order: &Order,
        folder: &ModelFolder,
        resolved: &Resolved,
        model: String,
        backend: String,
    ) -> Result<Recipe, Failure> {
        let lora = |l: &crate::values::LoraArg| {
            if l.path.is_dir() {
                let path = l.path.display();
                return Err(Failure::new(format!("LoRA `{path}` is a folder, expected a safetensors file"))
                    .hint("name the file in it"));
            }
            let fingerprint = kiln_weights::Lora::open(&l.path).and_then(|lora| lora.fingerprint());
            let sha256 = fingerprint.while_doing(|| "reading a LoRA".into())?;
            Ok(LoraUsed { file: Used { path: files::absolute(&l.path), sha256 }, weight: l.weight })
        };
        let (strength, padding) = match &self.request.task {
            Task::Generate => (None, None),
            Task::Vary { strength, .. } => (Some(*strength), None),
            Task::Inpaint { strength, padding, .. } => (Some(*strength), *padding),
        };
        let own_size = self.request.width.is_none() && self.request.height.is_none();
        let text_encoder = folder.text_encoder.as_ref().filter(|_| self.used.embeds.is_none());
        Ok(Recipe {
            kiln: env!("CARGO_PKG_VERSION").into(),
            prompt: None,
            negative: match &self.request.prompt {
                Prompt::Text { negative, .. } => negative.clone(),
                Prompt::Embeddings { .. } => None,
            },
            embeds: None,
            seed: None,
            rng: order.rng,
            noise: self.used.noise.clone(),
            index: 0,
            batch: 1,
            model: Model {
                path: model,
                variant: folder.variant.to_string(),
                transformer: fingerprint(&folder.transformer)?,
                text_encoder: text_encoder.map(fingerprint).transpose()?,
                vae: folder.vae.as_ref().filter(|_| order.vae.is_none()).map(fingerprint).transpose()?,
                parts: OtherParts::default(),
            },
            width: resolved.width,
            height: resolved.height,
            // With custom levels the number of steps asked for still shifts them.
            steps: order.steps.unwrap_or(resolved.steps),
            sigmas: order.sigmas.clone(),
            schedule: order.schedule,
            rho: (order.schedule == ScheduleArg::Power).then_some(order.rho),
            guidance: resolved.guidance,
            references: self.used.references.clone(),
            init: self.used.init.clone(),
            size_of_init: own_size && self.used.init.is_some() && self.used.mask.is_none(),
            mask: self.used.mask.clone(),
            strength,
            mask_padding: padding,
            loras: order.loras.iter().map(lora).collect::<Result<_, Failure>>()?,
            lora_partial: order.lora_partial,
            vae: order
                .vae
                .as_deref()
                .map(files::weights)
                .transpose()
                .while_doing(|| "reading --vae".into())?,
            max_tokens: self.request.max_tokens,
            dtype: order.precision.name().to_owned(),
            backend,
        })
    }

    /// The recipe of picture `index`.
    pub fn recipe(&self, base: &Recipe, index: usize) -> Recipe {
        let plan = &self.pictures[index];
        Recipe {
            prompt: plan.prompt.clone(),
            embeds: self.used.embeds.clone().map(|file| Row { file, row: plan.row }),
            seed: plan.seed,
            index: plan.part.0,
            batch: plan.part.1,
            ..base.clone()
        }
    }
}

fn fingerprint<C>(part: &Part<C>) -> Result<String, Failure> {
    Ok(part.weights()?.fingerprint()?)
}

/// The words, and the number of the first of the embeddings that are taken.
fn prompt(order: &Order, used: &mut Files) -> Result<(Prompt, usize), Failure> {
    let (file, row) = match &order.words {
        Words::Prompts { texts, negative } => {
            return Ok((Prompt::Text { prompts: texts.clone(), negative: negative.clone() }, 0));
        }
        Words::Embeds { file, row } => (file, *row),
    };
    let (source, from) = files::tensors(file, "prompt embeddings")?;
    used.embeds = Some(from);
    let all = rows(&files::named_tensor(&source, &["prompt_embeds"])?)?;
    let negative = match source.contains("negative_prompt_embeds") {
        true => rows(&source.tensor("negative_prompt_embeds")?)?.into_iter().next(),
        false => None,
    };
    let prompts = match row {
        None => all,
        Some(row) if row < all.len() => vec![all[row].clone()],
        Some(row) => {
            let (path, found) = (file.display(), all.len());
            return Err(Failure::new(format!(
                "`{path}` has {found} prompts, the recipe wants number {}",
                row + 1
            )));
        }
    };
    Ok((Prompt::Embeddings { prompts, negative }, row.unwrap_or(0)))
}

/// `[batch, tokens, dim]` as its entries; `[tokens, dim]` is one.
fn rows(x: &HostTensor) -> Result<Vec<HostTensor>, Failure> {
    let bad = |e: kiln_tensor::Error| Failure::new(format!("the prompt embeddings can't be used: {e}"));
    match *x.shape().dims() {
        [batch, tokens, dim] => (0..batch)
            .map(|i| x.rows(i..i + 1)?.reshape([tokens, dim]))
            .collect::<Result<_, _>>()
            .map_err(bad),
        _ => Ok(vec![x.clone()]),
    }
}

fn noise(order: &Order, used: &mut Files) -> Result<Noise, Failure> {
    let rng = order.rng();
    let (path, part) = match &order.chance {
        Chance::Seed(seed) => return Ok(Noise::Seed { seed: *seed, rng }),
        Chance::Part { seed, index, of } => {
            return Ok(Noise::Part { seed: *seed, rng, index: *index, of: *of });
        }
        Chance::Seeds(seeds) => return Ok(Noise::Seeds { seeds: seeds.clone(), rng }),
        Chance::File { path, part } => (path, *part),
    };
    let (source, from) = files::tensors(path, "noise")?;
    used.noise = Some(from);
    let all = files::named_tensor(&source, &["noise", "latents"])?;
    let one = match part {
        Some((index, of)) if of > 1 => all.rows(index..index + 1).map_err(|e| {
            Failure::new(format!("`{}` is not the noise of {of} pictures: {e}", path.display()))
        })?,
        _ => all,
    };
    Ok(Noise::Given(one))
}

fn task(order: &Order, used: &mut Files) -> Result<Task, Failure> {
    Ok(match &order.start {
        Start::Noise => Task::Generate,
        Start::Picture { init, strength } => {
            let (source, file) = files::picture(init, "picture to start from")?;
            used.init = Some(file);
            Task::Vary { source, strength: *strength }
        }
        Start::Masked { init, mask, strength, padding } => {
            let (source, file) = files::picture(init, "picture to start from")?;
            used.init = Some(file);
            let (mask, file) = files::picture(mask, "mask")?;
            used.mask = Some(file);
            Task::Inpaint { source, mask: GrayPicture::from(&mask), strength: *strength, padding: *padding }
        }
    })
}

fn plans(order: &Order, request: &Request, first_row: usize) -> Vec<Plan> {
    let (prompts, per_prompt) = (request.prompt.count(), request.pictures_per_prompt);
    // A number too large is refused by the model; there is no need to list them all before.
    let total = prompts.saturating_mul(per_prompt).min(1000);
    let plan = |i: usize| {
        let (seed, part) = match &order.chance {
            Chance::Seed(seed) => (Some(*seed), (i, total)),
            Chance::Part { seed, index, of } => (Some(*seed), (*index, *of)),
            Chance::Seeds(seeds) => (seeds.get(i).copied(), (0, 1)),
            Chance::File { part, .. } => (None, part.unwrap_or((i, total))),
        };
        let prompt = match &request.prompt {
            Prompt::Text { prompts, .. } => prompts.get(i / per_prompt).cloned(),
            Prompt::Embeddings { .. } => None,
        };
        Plan { prompt, row: first_row + i / per_prompt, seed, part }
    };
    (0..total).map(plan).collect()
}
