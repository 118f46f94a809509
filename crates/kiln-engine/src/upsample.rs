//! Prompt upsampling: a language model rewrites prompts before a request is planned.
//!
//! dev's own text encoder is such a model, if its files hold all layers and the output head; for other models, or in its
//! place, one is named by its path. It is loaded once for all prompts and released before an image is generated.

use std::path::Path;

use kiln_image::RgbImage;
use kiln_nn::language_model::{self, Sampling};
use kiln_nn::tokenizer::{PromptTokenizer, TokenizerFiles};
use kiln_nn::vision::{self, Patches};
use kiln_nn::{ResidencyPlan, Upsampler, text_encoder};
use kiln_ops::Backend;
use kiln_tensor::DType;
use kiln_weights::WeightSource;

use crate::backend::{AnyBackend, BackendVisitor, DeviceInfo};
use crate::error::{Error, ErrorContext, Field, Hint, Result};
use crate::inputs::InputResolver;
use crate::model::{Model, ModelComponent, find_tokenizer, open_text_encoder, open_tokenizer};
use crate::request::Request;
use crate::settings::{Precision, Settings};
use crate::{hint, text};

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
    let range = format!(" must be above 0 and at most {MAX_TEMPERATURE}, found {temperature}");
    let what = text![Field::Temperature, range];
    Err(Error::value(what).with_hint(format!("{DEFAULT_TEMPERATURE} is the recommended one")))
}

/// Describes why a text encoder can't rewrite prompts, if so. Reads nothing but names.
pub fn problem(component: &ModelComponent<text_encoder::Config>) -> Result<Option<String>> {
    if !component.config.encoder().rewrites_prompts {
        return Ok(Some("it is not a Mistral".into()));
    }
    Ok(language_model::problem(component.weights()?, &component.config))
}

/// A language model that can rewrite prompts: its files are checked, but not loaded.
pub struct PromptRewriter {
    weights: WeightSource,
    config: text_encoder::Config,
    tokenizer: PromptTokenizer,
    /// For requests with reference images.
    vision: Option<vision::Config>,
}

impl PromptRewriter {
    /// Opens the language model at `path`, or else the text encoder of `model`, for requests with or without images.
    pub fn open(model: &Model, path: Option<&Path>, with_images: bool) -> Result<PromptRewriter> {
        match (path, &model.text_encoder) {
            (Some(path), _) => PromptRewriter::open_file(path, with_images),
            (None, Some(own)) => PromptRewriter::new(own, model.tokenizer.as_ref(), with_images),
            (None, None) => {
                let path = model.path.display();
                let what = format!("the model `{path}` has no text encoder to rewrite prompts with");
                Err(Error::request(what).with_hint(other_model()))
            }
        }
    }

    /// Opens the language model at `path`: a text encoder's file or folder, or a model's folder.
    pub fn open_file(path: &Path, with_images: bool) -> Result<PromptRewriter> {
        let component = open_text_encoder(path)?;
        let tokenizer = find_tokenizer(&component.path)?;
        PromptRewriter::new(&component, tokenizer.as_ref(), with_images)
    }

    /// `tokenizer` is the one beside the text encoder, if there is one.
    fn new(
        component: &ModelComponent<text_encoder::Config>,
        tokenizer: Option<&TokenizerFiles>,
        with_images: bool,
    ) -> Result<PromptRewriter> {
        let refuse = |problem: String| {
            let what = format!("`{}` can't rewrite prompts: {problem}", component.path.display());
            Err(Error::request(what).with_hint(other_model()))
        };
        if let Some(problem) = problem(component)? {
            return refuse(problem);
        }
        let weights = component.weights()?;
        let config = component.config_text();
        let vision = with_images.then(|| vision::Config::read(weights, config.as_deref())).transpose();
        let vision = match vision {
            Ok(vision) => vision,
            Err(problem) => return refuse(problem),
        };
        let tokenizer = open_tokenizer(component.config.encoder(), tokenizer, Some(weights))?;
        Ok(PromptRewriter { weights: weights.clone(), config: component.config.clone(), tokenizer, vision })
    }

    /// Rewrites the prompts of requests: prompt `i` of one with its first seed plus `i`. They become the original prompts.
    /// The model is loaded once. `go_on` is asked after each token, and stops the run by returning `false`.
    pub fn rewrite(
        &self,
        requests: &mut [Request],
        temperature: f32,
        inputs: &dyn InputResolver,
        settings: &Settings,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        check_temperature(temperature)?;
        let patches = requests.iter().map(|request| self.patches(request, inputs));
        let patches = patches.collect::<Result<_>>()?;
        // What does not fit is streamed.
        let fits = |free: u64| {
            let small = || "it has too little memory to rewrite prompts".to_owned();
            if free > 3 * WORK_BYTES { Ok(()) } else { Err(small()) }
        };
        let (backend, _) = AnyBackend::for_model(settings, fits)?;
        let dtype = match settings.precision {
            Precision::Auto => backend.default_dtype(Some(&self.weights)),
            stated => stated.dtype(),
        };
        let job = Job { rewriter: self, requests, patches, temperature, dtype, go_on };
        let rewritten = backend.accept(job).with_context(|| "rewriting the prompt".into())?;
        for (request, prompts) in requests.iter_mut().zip(rewritten) {
            request.original_prompts = std::mem::replace(&mut request.prompts, prompts);
        }
        Ok(())
    }

    /// Prepares the reference images of a request.
    fn patches(&self, request: &Request, inputs: &dyn InputResolver) -> Result<Option<Patches>> {
        let Some(config) = self.vision.as_ref().filter(|_| !request.references.is_empty()) else {
            return Ok(None);
        };
        let images = request.references.iter().map(|file| Ok(inputs.image(&file.path)?.image));
        let images =
            images.collect::<Result<Vec<_>>>().with_context(|| "reading the reference images".into())?;
        let images: Vec<&RgbImage> = images.iter().map(|image| &**image).collect();
        Ok(Some(Patches::new(&images, config)?))
    }
}

/// What to do about a model that can't rewrite prompts.
fn other_model() -> Hint {
    hint![
        "name a whole Mistral Small 3 (a folder of safetensors with its `config.json`, or a GGUF file for prompts \
         without images: mmproj files are not read) with ", Field::UpsampleModel;
        "name a service with ", Field::UpsampleUrl
    ]
}

/// The prompts of requests, to be rewritten on a backend.
struct Job<'a> {
    rewriter: &'a PromptRewriter,
    requests: &'a [Request],
    /// The images of each request.
    patches: Vec<Option<Patches>>,
    temperature: f32,
    dtype: DType,
    go_on: &'a mut dyn FnMut() -> bool,
}

impl BackendVisitor for Job<'_> {
    type Output = Result<Vec<Vec<String>>>;

    fn visit<B: Backend + 'static>(self, b: B, device: DeviceInfo<B>) -> Result<Vec<Vec<String>>> {
        let Job { rewriter, requests, patches, temperature, dtype, go_on } = self;
        let PromptRewriter { weights, config, tokenizer, vision } = rewriter;
        let plan = match device.vram.map(|vram| vram.saturating_sub(WORK_BYTES)) {
            Some(vram) if vram < weights.bytes() => ResidencyPlan::new(vram, weights.bytes()),
            _ => ResidencyPlan::all_on_device(),
        };
        let model = Upsampler::load(&b, &weights.root(), config, vision.as_ref(), dtype, &plan)?;
        let mut progress = |_: usize| if go_on() { Ok(()) } else { Err(kiln_nn::Error::Cancelled) };
        let mut rewrite = |request: &Request, patches: Option<&Patches>| {
            let first = request.seed.first().copied().unwrap_or(0);
            let prompts = request.prompts.iter().zip(0u64..).map(|(prompt, i)| {
                let sampling = Sampling::Random { temperature, seed: first.wrapping_add(i) };
                Ok(model.rewrite(&b, tokenizer, prompt, patches, sampling, &mut progress)?)
            });
            prompts.collect::<Result<Vec<_>>>()
        };
        let each = requests.iter().zip(&patches);
        let rewritten = each.map(|(request, patches)| rewrite(request, patches.as_ref())).collect();
        drop(model);
        device.release_memory(&b);
        rewritten
    }
}
