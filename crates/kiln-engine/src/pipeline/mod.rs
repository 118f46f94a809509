//! A loaded model: plans to images. Encodes text and references, denoises, decodes.

mod batch;
mod denoise;
mod options;
mod run;
mod text;
mod unfinished;

use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;

use kiln_base::lock;
use kiln_model::transformer::Transformer;
use kiln_model::{Autoencoder, Event, Observer, ResidencyPlan};
use kiln_ops::Backend;
use kiln_weights::{LinearForm, LoraReport};

pub use batch::Member;
pub use options::{BatchLimit, LoadOptions};
use text::LazyTextEncoder;
pub use unfinished::{Generated, Unfinished};

use crate::error::{MissingPart, Result};
use crate::model::{Model, VaeFile};
use crate::placement::Placement;
use crate::plan::{Plan, PlannedLora};

/// Other autoencoders that stay loaded.
const OTHER_VAES: usize = 2;

/// A loaded model.
pub struct Pipeline<B: Backend> {
    backend: B,
    model: Arc<Model>,
    options: LoadOptions,
    text_encoder: LazyTextEncoder<B>,
    transformer: Transformer<B>,
    /// The model's own autoencoder, or the one that was asked for when it was loaded; then others that plans named.
    autoencoders: Mutex<Vec<LoadedVae<B>>>,
}

/// An autoencoder and the file it comes from; the model's own has none.
struct LoadedVae<B: Backend> {
    file: Option<Arc<VaeFile>>,
    autoencoder: Arc<Autoencoder<B>>,
}

impl<B: Backend> Pipeline<B> {
    /// Loads every part of the model and checks it against its configuration.
    pub fn load(
        backend: B,
        model: &Arc<Model>,
        options: &LoadOptions,
        observer: &mut dyn Observer<B>,
    ) -> Result<Self> {
        // The tokenizer's names and the autoencoder's kernels are put in order, which takes about as long as all the
        // rest: each on a thread of its own.
        let loaded = std::thread::scope(|scope| {
            let tokenizer = scope.spawn(|| model.prompt_tokenizer().map(drop));
            let autoencoder = scope.spawn(|| load_vae(&backend, model, options.vae.as_ref(), options));
            Self::load_others(&backend, model, options, observer).and_then(|others| {
                observer.event(Event::Loading { part: "tokenizer" })?;
                join(tokenizer)?;
                observer.event(Event::Loading { part: "vae" })?;
                Ok((others, join(autoencoder)?))
            })
        });
        let ((text_encoder, transformer), autoencoder) = loaded?;
        let (model, options) = (Arc::clone(model), options.clone());
        let autoencoders = Mutex::new(vec![autoencoder]);
        Ok(Pipeline { backend, model, options, text_encoder, transformer, autoencoders })
    }

    /// The text encoder (unless it may not be needed) and the transformer.
    fn load_others(
        b: &B,
        model: &Arc<Model>,
        options: &LoadOptions,
        observer: &mut dyn Observer<B>,
    ) -> Result<(LazyTextEncoder<B>, Transformer<B>)> {
        let text_encoder = LazyTextEncoder::new(b, model, options, observer)?;
        observer.event(Event::Loading { part: "transformer" })?;
        let plan = options.placement.as_ref().map_or_else(ResidencyPlan::whole, Placement::transformer_plan);
        let part = &model.transformer;
        let source = part.weights()?;
        let (updates, reports) = resolve_loras(model, options, &options.loras, options.lora_partial)?;
        let rounds = matches!(options.form, LinearForm::Int8 { .. }) && source.bytes_to_round() > 0;
        let mut loaded = |done, total| match rounds {
            true => observer.event(Event::Rounded { done, total }),
            false => Ok(()),
        };
        let vars = source.root().with_form(options.form).with_loras(&updates);
        let transformer =
            Transformer::load_blocks(b, &vars, &part.config, options.dtype, &plan, &mut loaded)?;
        for report in reports {
            observer.event(Event::Lora { report: report.to_string() })?;
        }
        Ok((text_encoder, transformer))
    }

    /// Takes these LoRAs instead of those it has; the model stays loaded. After an error everything is as before.
    ///
    /// It takes milliseconds; longer only where a DoRA has its layers measured, or a GPU needs changed weights.
    pub fn set_loras(&mut self, loras: &[PlannedLora], partial: bool) -> Result<Vec<LoraReport>> {
        let (updates, reports) = resolve_loras(&self.model, &self.options, loras, partial)?;
        let source = self.model.transformer.weights()?;
        let vars = source.root().with_form(self.options.form).with_loras(&updates);
        self.transformer.set_loras(&self.backend, &vars)?;
        (self.options.loras, self.options.lora_partial) = (loras.to_vec(), partial);
        Ok(reports)
    }

    /// The LoRAs it has.
    pub fn loras(&self) -> (&[PlannedLora], bool) {
        (&self.options.loras, self.options.lora_partial)
    }

    /// The model it was loaded from.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The backend it runs on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// How it was loaded.
    pub fn options(&self) -> &LoadOptions {
        &self.options
    }

    /// The autoencoder that a plan asks for. One that was not used before is loaded.
    pub fn autoencoder(&self, vae: Option<&Arc<VaeFile>>) -> Result<Arc<Autoencoder<B>>> {
        let wanted = vae.or(self.options.vae.as_ref());
        let mut all = lock(&self.autoencoders);
        let same = |loaded: &&LoadedVae<B>| match (&loaded.file, wanted) {
            (Some(file), Some(wanted)) => Arc::ptr_eq(file, wanted) || file.path == wanted.path,
            (None, None) => true,
            _ => false,
        };
        if let Some(loaded) = all.iter().find(same) {
            return Ok(Arc::clone(&loaded.autoencoder));
        }
        let loaded = load_vae(&self.backend, &self.model, wanted, &self.options)?;
        let autoencoder = Arc::clone(&loaded.autoencoder);
        if all.len() > OTHER_VAES {
            all.remove(1);
        }
        all.push(loaded);
        Ok(autoencoder)
    }

    /// Loads what this plan needs and is not loaded yet: the text encoder, unless every text is in the cache.
    ///
    /// Running the plan does so itself when it comes to that; doing it before finds damaged files early.
    pub fn prepare(&self, plan: &Plan, observer: &mut dyn Observer<B>) -> Result<()> {
        let tokens = plan.tokens()?;
        self.text_encoder.prepare(&self.backend, tokens.prompts.iter().chain(&tokens.negatives), observer)
    }

    /// All images of a plan.
    pub fn generate(&self, plan: &Plan, observer: &mut dyn Observer<B>) -> Result<Vec<Generated>> {
        let (mut images, mut end) = (Vec::new(), Ok(()));
        let mut done = |image: Unfinished<B>| {
            images.push(image.finish(&self.backend, plan)?);
            Ok(())
        };
        let members = &mut [Member { plan, observer, done: &mut done }];
        self.run(members, &BatchLimit::ONE, &mut |_, result| end = result);
        end.map(|()| images)
    }
}

/// The autoencoder of this file, or the model's own.
fn load_vae<B: Backend>(
    b: &B,
    model: &Model,
    vae: Option<&Arc<VaeFile>>,
    options: &LoadOptions,
) -> Result<LoadedVae<B>> {
    let autoencoder = match (vae, &model.vae) {
        (Some(file), _) => Autoencoder::load(b, &file.weights, file.config.as_ref(), options.dtype)?,
        (None, Some(part)) => Autoencoder::load(b, part.weights()?, Some(&part.config), options.dtype)?,
        (None, None) => return Err(model.missing_part(MissingPart::Vae)),
    };
    Ok(LoadedVae { file: vae.cloned(), autoencoder: Arc::new(autoencoder) })
}

fn resolve_loras(
    model: &Model,
    options: &LoadOptions,
    loras: &[PlannedLora],
    partial: bool,
) -> Result<(kiln_weights::LoraUpdates, Vec<LoraReport>)> {
    let part = &model.transformer;
    let loras = loras.iter().map(|lora| (Arc::clone(&lora.lora), lora.weight));
    let how = kiln_weights::LoraOptions { partial, dtype: options.dtype };
    Ok(kiln_weights::LoraUpdates::resolve(part.weights()?, &part.config.linear_layers(), loras, how)?)
}

/// What a thread made; its panic goes on here.
fn join<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
