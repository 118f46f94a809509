use kiln_image::{Inpaint, Picture};

use super::{MemoryNeed, Options, Request, Task};
use crate::schedule::{Schedule, SchedulerConfig};
use crate::{Error, ModelFolder, Result, Variant};

/// A request with every default filled in.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Width in pixels, a multiple of 16.
    pub width: usize,
    /// Height in pixels, a multiple of 16.
    pub height: usize,
    /// Number of pictures.
    pub pictures: usize,
    /// Steps of the whole schedule.
    pub steps: usize,
    /// The step to begin with: above 0 when strength leaves out the first ones.
    pub first_step: usize,
    /// Noise levels, the last 0 included.
    pub schedule: Schedule,
    /// Guidance, where the model has any.
    pub guidance: Option<f32>,
    /// What the user should know: options without effect, rounded sizes.
    pub notes: Vec<String>,
}

impl Resolved {
    /// Token grid: height and width.
    pub fn grid(&self) -> [usize; 2] {
        [self.height / 16, self.width / 16]
    }

    /// Whether the transformer is asked twice a step, with and without the prompt.
    pub(super) fn two_calls(&self, variant: Variant) -> bool {
        variant == Variant::Base && self.guidance.is_some_and(|g| g > 1.0)
    }
}

/// The request's pictures, made ready for the autoencoder.
pub(super) struct Prepared<'a> {
    pub(super) references: Vec<Picture>,
    pub(super) start: Start<'a>,
}

pub(super) enum Start<'a> {
    Noise,
    /// A picture that is still to be resized: its size must pass the memory check first.
    Picture(&'a Picture),
    Inpaint(Box<Inpaint>),
}

impl ModelFolder {
    /// Checks a request against this model and fills in its defaults, before any weight is loaded.
    pub fn resolve(&self, request: &Request, options: &Options) -> Result<Resolved> {
        Ok(check(self, request, options)?.0)
    }
}

/// [`resolve`], and whether there is memory enough.
pub(super) fn check<'a>(
    folder: &ModelFolder,
    request: &'a Request,
    options: &Options,
) -> Result<(Resolved, Prepared<'a>)> {
    let (plan, prepared) = resolve(folder, request)?;
    let (width, height) = (plan.width, plan.height);
    let reference_tokens: u64 = prepared.references.iter().map(|r| r.area() / 256).sum();
    let others = request.max_tokens + reference_tokens as usize;
    let need = MemoryNeed::new(folder, [width, height], others, options.dtype);
    match options.memory_limit {
        Some(limit) if need.peak() > limit => Err(Error::Memory { width, height, need, limit }),
        _ => Ok((plan, prepared)),
    }
}

/// Checks a request and fills in what it leaves open.
fn resolve<'a>(folder: &ModelFolder, request: &'a Request) -> Result<(Resolved, Prepared<'a>)> {
    let mut notes = Vec::new();
    let references = request.references.iter().map(|r| reference(folder, r)).collect::<Result<Vec<_>>>()?;
    let (width, height, start, strength) = match &request.task {
        Task::Generate => {
            let first = references.first().map(|r| (r.width() as usize, r.height() as usize));
            let (w, h) = first.unwrap_or((folder.default_size, folder.default_size));
            let width = side("width", request.width.unwrap_or(w), &mut notes)?;
            let height = side("height", request.height.unwrap_or(h), &mut notes)?;
            (width, height, Start::Noise, 1.0)
        }
        Task::Vary { source, strength } => {
            let ask = |name, size: Option<usize>, notes: &mut Vec<String>| {
                size.map(|s| side(name, s, notes).map(|s| s as u32)).transpose()
            };
            let width = ask("width", request.width, &mut notes)?;
            let height = ask("height", request.height, &mut notes)?;
            let (width, height) = kiln_image::init_size(source, width, height)?;
            (width as usize, height as usize, Start::Picture(source), *strength)
        }
        Task::Inpaint { source, mask, strength, padding } => {
            if request.width.is_some() || request.height.is_some() {
                notes.push("width and height have no effect with a mask: the picture keeps its size".into());
            }
            let inpaint = kiln_image::prepare_inpaint(source, mask, *padding)?;
            let (width, height) = (inpaint.width as usize, inpaint.height as usize);
            (width, height, Start::Inpaint(Box::new(inpaint)), *strength)
        }
    };
    let pictures = count(request)?;
    let steps = match (request.steps, &request.sigmas) {
        (Some(steps), _) => steps,
        (None, Some(sigmas)) => sigmas.len(),
        (None, None) => folder.default_steps(),
    };
    let schedule = schedule(&folder.scheduler, request, width / 16 * (height / 16), steps)?;
    let first_step = schedule.first_step(strength)?;
    let guidance = guidance(folder, request, &mut notes)?;
    let steps = schedule.steps();
    let resolved = Resolved { width, height, pictures, steps, first_step, schedule, guidance, notes };
    Ok((resolved, Prepared { references, start }))
}

/// A reference as the pipeline takes it. A small model gets it no larger than the pictures it was trained on.
fn reference(folder: &ModelFolder, picture: &Picture) -> Result<Picture> {
    if folder.trained_sides().is_none() {
        return Ok(kiln_image::prepare_reference(picture)?);
    }
    let area = (folder.default_size as u64).pow(2);
    Ok(kiln_image::prepare_reference(&kiln_image::shrink_to(picture, area))?)
}

fn schedule(config: &SchedulerConfig, request: &Request, tokens: usize, steps: usize) -> Result<Schedule> {
    const MOST: usize = 10_000;
    if steps > MOST {
        return Err(Error::request(format!("{steps} steps are too many; at most {MOST}")));
    }
    Schedule::new(config, request.spacing, tokens, steps, request.sigmas.as_deref())
}

fn side(name: &str, size: usize, notes: &mut Vec<String>) -> Result<usize> {
    const MOST: usize = 1 << 20;
    let rounded = size / 16 * 16;
    if rounded == 0 || size > MOST {
        return Err(Error::request(format!("{name} must lie between 16 and {MOST} pixels, found {size}")));
    }
    if rounded != size {
        notes.push(format!("{name} {size} is rounded down to {rounded}, a multiple of 16"));
    }
    Ok(rounded)
}

/// The most pictures of one request.
pub(super) const MOST_PICTURES: usize = 1000;

fn count(request: &Request) -> Result<usize> {
    match request.prompt.count().saturating_mul(request.pictures_per_prompt) {
        0 => Err(Error::request("there is nothing to paint: no prompt, or a batch of 0")),
        n if n > MOST_PICTURES => {
            Err(Error::request(format!("{n} pictures are too many for one request; at most {MOST_PICTURES}")))
        }
        n => Ok(n),
    }
}

fn guidance(folder: &ModelFolder, request: &Request, notes: &mut Vec<String>) -> Result<Option<f32>> {
    let variant = folder.variant;
    if let Some(g) = request.guidance.filter(|g| !(g.is_finite() && *g >= 0.0)) {
        return Err(Error::request(format!("guidance must be a number of at least 0, found {g}")));
    }
    let guidance = folder.default_guidance().map(|default| request.guidance.unwrap_or(default));
    if guidance.is_none() && request.guidance.is_some_and(|g| g != 1.0) {
        notes.push(format!("guidance has no effect: {variant} needs none"));
    }
    let uses_negative = variant == Variant::Base && guidance.is_some_and(|g| g > 1.0);
    if request.prompt.has_negative() && !uses_negative {
        let why = if variant == Variant::Base {
            "it needs a guidance above 1"
        } else {
            "this model has no guidance"
        };
        notes.push(format!("the negative prompt has no effect: {why}"));
    }
    Ok(guidance)
}
