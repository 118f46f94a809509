//! A loaded model on one backend: encodes texts and reference images, denoises, decodes.
//!
//! The layer below [`Engine`](crate::Engine), generic over the backend and without threads of its own for output. Tests and
//! benchmarks use it to observe intermediate tensors.

mod batch;
mod denoise;
mod generate;
mod options;
mod output;
mod parts;
mod text;
mod upscale;

use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;

use kiln_base::lock;
use kiln_nn::transformer::Transformer;
use kiln_nn::{Autoencoder, Event, Observer, ResidencyPlan};
use kiln_ops::Backend;
use kiln_weights::{LinearPrecision, LoraOptions, LoraReport, LoraUpdates};

pub use batch::BatchMember;
pub use options::{BatchLimit, LoadOptions};
pub use output::{PendingOutput, PipelineOutput};
use text::LazyTextEncoder;

use crate::error::{MissingComponent, Result};
use crate::model::{Model, VaeFile};
use crate::plan::{Plan, PlannedLora};
use crate::residency::WeightResidency;

/// Maximum number of VAEs that stay loaded besides the first.
const MAX_OTHER_VAES: usize = 2;

/// A loaded model.
pub struct Pipeline<B: Backend> {
    backend: B,
    model: Arc<Model>,
    options: LoadOptions,
    text_encoder: LazyTextEncoder<B>,
    transformer: Transformer<B>,
    /// The VAE it was loaded with, then others that plans named.
    autoencoders: Mutex<Vec<LoadedVae<B>>>,
}

/// A VAE and the file it comes from; `None` for the model's own.
struct LoadedVae<B: Backend> {
    file: Option<Arc<VaeFile>>,
    autoencoder: Arc<Autoencoder<B>>,
}

impl<B: Backend + 'static> Pipeline<B> {
    /// Loads all components of a model and checks them against their configuration. With a text cache, the text encoder
    /// is loaded on first use.
    pub fn load(
        backend: B,
        model: &Arc<Model>,
        options: &LoadOptions,
        observer: &mut dyn Observer<B>,
    ) -> Result<Self> {
        // Building the tokenizer's tables and repacking the VAE's kernels takes about as long as all the rest: each
        // gets its own thread.
        let loaded = std::thread::scope(|scope| {
            let tokenizer = scope.spawn(|| model.prompt_tokenizer().map(drop));
            // The first time that a text encoder is used with a cache, all of it is hashed.
            scope.spawn(|| {
                let component = model.text_encoder.as_ref().zip(options.text_cache.as_ref());
                // What can't be read is reported when it is loaded.
                component.map(|(encoder, cache)| encoder.content_key(&cache.hashes()).map(drop))
            });
            let autoencoder = scope.spawn(|| load_vae(&backend, model, options.vae.as_ref(), options));
            let text_encoder = LazyTextEncoder::new(&backend, model, options, observer)?;
            let transformer = load_transformer(&backend, model, options, observer)?;
            observer.event(Event::Loading { component: "tokenizer" })?;
            join(tokenizer)?;
            observer.event(Event::Loading { component: "vae" })?;
            Ok::<_, crate::Error>((text_encoder, transformer, join(autoencoder)?))
        });
        let (text_encoder, transformer, autoencoder) = loaded?;
        let (model, options) = (Arc::clone(model), LoadOptions { shared: None, ..options.clone() });
        let autoencoders = Mutex::new(vec![autoencoder]);
        Ok(Pipeline { backend, model, options, text_encoder, transformer, autoencoders })
    }
}

impl<B: Backend> Pipeline<B> {
    /// Replaces the LoRAs; the model stays loaded. After an error nothing has changed.
    ///
    /// Takes milliseconds, unless a DoRA needs the norms of its layers or a GPU needs changed weights.
    pub fn set_loras(&mut self, loras: &[PlannedLora], partial: bool) -> Result<Vec<LoraReport>> {
        let (updates, reports) = resolve_loras(&self.model, &self.options, loras, partial)?;
        let source = self.model.transformer.weights()?;
        let vars = source.root().with_precision(self.options.linear_precision).with_loras(&updates);
        self.transformer.set_loras(&self.backend, &vars)?;
        (self.options.loras, self.options.lora_partial) = (loras.to_vec(), partial);
        Ok(reports)
    }

    /// Returns the current LoRAs, and whether modules that match no layer are skipped.
    pub fn loras(&self) -> (&[PlannedLora], bool) {
        (&self.options.loras, self.options.lora_partial)
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Returns the backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Returns the transformer.
    pub(crate) fn transformer(&self) -> &Transformer<B> {
        &self.transformer
    }

    /// Returns the options it was loaded with.
    pub fn options(&self) -> &LoadOptions {
        &self.options
    }

    /// Returns the VAE in this file, or the one the pipeline was loaded with. Loads it on first use.
    pub fn autoencoder(&self, vae: Option<&Arc<VaeFile>>) -> Result<Arc<Autoencoder<B>>> {
        let vae = vae.or(self.options.vae.as_ref());
        let mut all = lock(&self.autoencoders);
        let same = |loaded: &&LoadedVae<B>| match (&loaded.file, vae) {
            (Some(file), Some(vae)) => Arc::ptr_eq(file, vae) || file.is_same(vae),
            (None, None) => true,
            _ => false,
        };
        if let Some(loaded) = all.iter().find(same) {
            return Ok(Arc::clone(&loaded.autoencoder));
        }
        let loaded = load_vae(&self.backend, &self.model, vae, &self.options)?;
        let autoencoder = Arc::clone(&loaded.autoencoder);
        if all.len() > MAX_OTHER_VAES {
            all.remove(1);
        }
        all.push(loaded);
        Ok(autoencoder)
    }

    /// Loads the text encoder if a text of this plan is not cached.
    ///
    /// Generating does so itself; calling this first reports damaged files early.
    pub fn prepare(&self, plan: &Plan, observer: &mut dyn Observer<B>) -> Result<()> {
        let tokens = plan.tokens()?;
        let texts = tokens.prompts.iter().chain(&tokens.negatives);
        self.text_encoder.prepare(&self.backend, texts, &plan.text_layers, observer)
    }

    /// Generates all images of a plan, one after the other.
    pub fn generate(&self, plan: &Plan, observer: &mut dyn Observer<B>) -> Result<Vec<PipelineOutput>> {
        let (mut images, mut end) = (Vec::new(), Ok(()));
        let mut output = |image: PendingOutput<B>| {
            images.push(image.finish(&self.backend, plan)?);
            Ok(())
        };
        let members = &mut [BatchMember { plan, observer, output: &mut output }];
        self.run(members, &BatchLimit::ONE, &mut |_, result| end = result);
        end.map(|()| images)
    }
}

fn load_transformer<B: Backend + 'static>(
    b: &B,
    model: &Model,
    options: &LoadOptions,
    observer: &mut dyn Observer<B>,
) -> Result<Transformer<B>> {
    let (precision, dtype) = (options.linear_precision, options.dtype);
    let shared = options.shared.as_ref().map(|device| device.transformer(b, model, precision, dtype));
    let shared = shared.transpose()?.flatten();
    if shared.is_none() {
        observer.event(Event::Loading { component: "transformer" })?;
    }
    let residency = options.residency.as_ref();
    let plan = residency.map_or_else(ResidencyPlan::all_on_device, WeightResidency::transformer_plan);
    let source = model.transformer.weights()?;
    let (updates, reports) = resolve_loras(model, options, &options.loras, options.lora_partial)?;
    let int8 = matches!(precision, LinearPrecision::Int8 { .. });
    let quantizes = int8 && source.int8_bytes_to_quantize() > 0;
    let mut progress = |done, total| {
        if quantizes { observer.event(Event::BlockQuantized { done, total }) } else { Ok(()) }
    };
    let vars = source.root().with_precision(precision).with_loras(&updates);
    let config = &model.transformer.config;
    let transformer = match shared {
        Some(mut shared) => {
            shared.set_loras(b, &vars)?;
            shared
        }
        None => Transformer::load_with_progress(b, &vars, config, dtype, &plan, &mut progress)?,
    };
    for report in reports {
        observer.event(Event::LoraApplied { report: report.to_string() })?;
    }
    Ok(transformer)
}

/// Loads the VAE of this file, or the model's own.
fn load_vae<B: Backend>(
    b: &B,
    model: &Model,
    vae: Option<&Arc<VaeFile>>,
    options: &LoadOptions,
) -> Result<LoadedVae<B>> {
    let autoencoder = match (vae, &model.vae) {
        (Some(file), _) => Autoencoder::load(b, &file.weights, file.config.as_ref(), options.dtype)?,
        (None, Some(own)) => Autoencoder::load(b, own.weights()?, Some(&own.config), options.dtype)?,
        (None, None) => return Err(model.missing_component(MissingComponent::Vae)),
    };
    Ok(LoadedVae { file: vae.cloned(), autoencoder: Arc::new(autoencoder) })
}

/// Matches the modules of LoRAs with the transformer's layers.
fn resolve_loras(
    model: &Model,
    options: &LoadOptions,
    loras: &[PlannedLora],
    partial: bool,
) -> Result<(LoraUpdates, Vec<LoraReport>)> {
    let layers = model.transformer.config.linear_layers();
    // The same for all LoRAs of a request.
    let dora_rule = loras.first().and_then(|lora| lora.dora_rule);
    let loras = loras.iter().map(|lora| (Arc::clone(&lora.lora), lora.weight));
    let options = LoraOptions { partial, dtype: options.dtype, dora_rule };
    Ok(LoraUpdates::resolve(model.transformer.weights()?, &layers, loras, options)?)
}

/// Returns the result of a thread; continues its panic on this one.
fn join<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
