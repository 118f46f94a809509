//! Prompt upsampling: a language model rewrites prompts before a request is planned.
//!
//! dev's own text encoder is such a model, if its files hold all layers and the output head; for other models, or in its
//! place, one is named by its path. It is loaded for the prompts of one request and released before the image is generated.

use std::path::Path;

use kiln_image::RgbImage;
use kiln_model::language_model::{self, Sampling};
use kiln_model::tokenizer::{PromptTokenizer, TokenizerFiles};
use kiln_model::vision::{self, Patches};
use kiln_model::{ResidencyPlan, TextEncoderFamily, Upsampler, text_encoder};
use kiln_ops::Backend;
use kiln_tensor::DType;

use crate::backend::{AnyBackend, BackendVisitor, DeviceInfo};
use crate::error::{Error, ErrorContext, Result};
use crate::inputs::InputResolver;
use crate::model::{Model, ModelComponent, open_text_encoder};
use crate::request::Request;
use crate::settings::{Precision, Settings};

/// The temperature that Black Forest Labs recommends.
pub const DEFAULT_TEMPERATURE: f32 = 0.15;

/// Largest temperature: beyond it, a text is noise.
const MAX_TEMPERATURE: f32 = 5.0;

/// GPU memory that is left for activations, keys and values.
const WORK_BYTES: u64 = 2 << 30;

/// Checks a temperature.
pub fn check_temperature(temperature: f32) -> Result<()> {
    if temperature > 0.0 && temperature <= MAX_TEMPERATURE {
        return Ok(());
    }
    let what = format!("the temperature must be above 0 and at most {MAX_TEMPERATURE}, found {temperature}");
    Err(Error::value(what).hint(format!("{DEFAULT_TEMPERATURE} is the recommended one")))
}

/// A language model that can rewrite prompts: its files are checked, but not loaded.
pub struct PromptRewriter {
    component: ModelComponent<text_encoder::Config>,
    tokenizer: PromptTokenizer,
    /// For requests with reference images.
    vision: Option<vision::Config>,
}

impl PromptRewriter {
    /// Opens the language model at `path`, or else the text encoder of `model`, for requests with or without images.
    pub fn open(model: &Model, path: Option<&Path>, with_images: bool) -> Result<PromptRewriter> {
        let own = model.text_encoder.as_ref().filter(|_| path.is_none());
        let Some(path) = path.or(own.map(|component| component.path.as_path())) else {
            let what =
                format!("the model `{}` has no text encoder to rewrite prompts with", model.path.display());
            return Err(Error::request(what).hint(HINT));
        };
        let refuse = |problem: String| {
            let what = format!("`{}` can't rewrite prompts: {problem}", path.display());
            Err(Error::request(what).hint(HINT))
        };
        let is_mistral = |config: &text_encoder::Config| config.family() == TextEncoderFamily::Mistral;
        // That of a packed model has no file of its own to open.
        if own.is_some_and(|component| !is_mistral(&component.config)) {
            return refuse("it is not a Mistral".into());
        }
        let component = open_text_encoder(path)?;
        if !is_mistral(&component.config) {
            return refuse("it is not a Mistral".into());
        }
        let weights = component.weights()?;
        if let Some(problem) = language_model::problem(weights, &component.config) {
            return refuse(problem);
        }
        let config = component.config_text();
        let vision = with_images.then(|| vision::Config::read(weights, config.as_deref())).transpose();
        let vision = match vision {
            Ok(vision) => vision,
            Err(problem) => return refuse(problem),
        };
        let tokenizer = match TokenizerFiles::embedded(weights) {
            Some(files) => PromptTokenizer::open(TextEncoderFamily::Mistral, &files)?,
            None => PromptTokenizer::built_in(TextEncoderFamily::Mistral)?,
        };
        Ok(PromptRewriter { component, tokenizer, vision })
    }

    /// Rewrites the prompts of a request: prompt `i` with the first seed plus `i`. They become its original prompts.
    /// `progress` gets the index of the prompt and the number of its tokens, and stops the run by returning `false`.
    pub fn rewrite(
        &self,
        request: &mut Request,
        temperature: f32,
        inputs: &dyn InputResolver,
        settings: &Settings,
        progress: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<()> {
        check_temperature(temperature)?;
        let images = request.references.iter().map(|file| Ok(inputs.image(&file.path)?.image));
        let images =
            images.collect::<Result<Vec<_>>>().with_context(|| "reading the reference images".into())?;
        let images: Vec<&RgbImage> = images.iter().map(|image| &**image).collect();
        let patches = match &self.vision {
            Some(config) if !images.is_empty() => Some(Patches::new(&images, config)?),
            _ => None,
        };
        let weights = self.component.weights()?;
        // What does not fit is streamed.
        let fits = |free: u64| {
            let small = || "it has too little memory to rewrite prompts".to_owned();
            if free > 3 * WORK_BYTES { Ok(()) } else { Err(small()) }
        };
        let (backend, _) = AnyBackend::for_model(settings, fits)?;
        let dtype = match settings.precision {
            Precision::Auto => backend.default_dtype(Some(weights)),
            stated => stated.dtype(),
        };
        let seed = request.seed.first().copied().unwrap_or(0);
        let job =
            Job { rewriter: self, prompts: &request.prompts, patches, temperature, seed, dtype, progress };
        let prompts = backend.accept(job).with_context(|| "rewriting the prompt".into())?;
        request.original_prompts = std::mem::replace(&mut request.prompts, prompts);
        Ok(())
    }
}

/// What to do about a model that can't rewrite prompts.
const HINT: &str = "name a whole Mistral Small 3 (a folder of safetensors with its `config.json`, or a GGUF file for \
                    prompts without images) with --upsample-model, or a service with --upsample-url";

/// The prompts of a request, to be rewritten on a backend.
struct Job<'a> {
    rewriter: &'a PromptRewriter,
    prompts: &'a [String],
    patches: Option<Patches>,
    temperature: f32,
    seed: u64,
    dtype: DType,
    progress: &'a mut dyn FnMut(usize, usize) -> bool,
}

impl BackendVisitor for Job<'_> {
    type Output = Result<Vec<String>>;

    fn visit<B: Backend + 'static>(self, b: B, device: DeviceInfo<B>) -> Result<Vec<String>> {
        let Job { rewriter, prompts, patches, temperature, seed, dtype, progress } = self;
        let PromptRewriter { component, tokenizer, vision } = rewriter;
        let weights = component.weights()?;
        let plan = match device.vram.map(|vram| vram.saturating_sub(WORK_BYTES)) {
            Some(vram) if vram < weights.bytes() => ResidencyPlan::new(vram, weights.bytes()),
            _ => ResidencyPlan::all_on_device(),
        };
        let (config, vision) = (&component.config, vision.as_ref());
        let model = Upsampler::load(&b, &weights.root(), config, vision, dtype, &plan)?;
        let mut rewritten = Vec::with_capacity(prompts.len());
        for (i, prompt) in prompts.iter().enumerate() {
            let sampling = Sampling::Random { temperature, seed: seed.wrapping_add(i as u64) };
            let mut go_on = |tokens| match progress(i, tokens) {
                true => Ok(()),
                false => Err(kiln_model::Error::Cancelled),
            };
            rewritten.push(model.rewrite(&b, tokenizer, prompt, patches.as_ref(), sampling, &mut go_on)?);
        }
        drop(model);
        device.release_memory(&b);
        Ok(rewritten)
    }
}
