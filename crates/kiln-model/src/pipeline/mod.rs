//! Requests to pictures: encode text and references, denoise, decode.

mod crowd;
mod denoise;
mod memory;
mod noise;
mod placement;
mod plan;
mod request;
mod text;
mod together;

use std::borrow::Cow;
use std::path::PathBuf;
use std::thread::ScopedJoinHandle;

use kiln_image::Picture;
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{LinearForm, Lora, LoraOptions, LoraReport, LoraUpdates, WeightSource};

use crate::tokenizer::PromptTokenizer;
use crate::transformer::Transformer;
use crate::{Autoencoder, Error, Event, ModelFolder, Observer, Result, TextCache};
pub use crowd::Member;
use denoise::{Origin, ReferenceTokens};
pub(crate) use memory::Gib;
pub use memory::MemoryNeed;
pub use placement::{Placement, WeightBytes};
pub use plan::Resolved;
use plan::{Prepared, Start};
pub use request::{Noise, Prompt, Request, Rng, Task};
use text::Texter;
pub use together::Together;

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct Options {
    /// What activations are computed in: f32 or bf16.
    pub dtype: DType,
    /// The form of the transformer's linear layers: as stored, or in 8 bits. The text encoder's stay as they are.
    pub form: LinearForm,
    /// An autoencoder to use instead of the folder's: a folder or a file.
    pub vae: Option<PathBuf>,
    /// LoRAs for the transformer, with their weights.
    pub loras: Vec<(PathBuf, f32)>,
    /// Whether LoRAs may have modules that match nothing in the transformer.
    pub lora_partial: bool,
    /// Bytes that a request may need beside the weights before it is refused.
    pub memory_limit: Option<u64>,
    /// Pictures of one request that are painted at once where the backend gains from it; 1 is one after the other.
    pub most_together: usize,
    /// Which weights stay on the device; all when absent.
    pub placement: Option<Placement>,
    /// Where encoded texts are kept and looked for. With it, the text encoder is loaded only when it is needed.
    pub text_cache: Option<TextCache>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            dtype: DType::F32,
            form: LinearForm::Float,
            vae: None,
            loras: Vec::new(),
            lora_partial: false,
            memory_limit: None,
            most_together: 1,
            placement: None,
            text_cache: None,
        }
    }
}

/// A loaded model.
pub struct Pipeline<B: Backend> {
    backend: B,
    folder: ModelFolder,
    options: Options,
    fingerprint: String,
    tokenizer: PromptTokenizer,
    texter: Option<Texter<B>>,
    transformer: Transformer<B>,
    /// What the transformer was loaded from.
    weights: WeightSource,
    autoencoder: Autoencoder<B>,
}

/// Text tokens of every prompt, and of the negative prompt where one is needed.
struct Texts<B: Backend> {
    prompts: Vec<B::Tensor>,
    negative: Option<B::Tensor>,
}

/// A finished picture.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The picture.
    pub picture: Picture,
    /// Its final normalised tokens, f32 `[h/16 · w/16, 128]`.
    pub latents: HostTensor,
    /// Its number in the request, from 0; pictures of one prompt follow each other.
    pub index: usize,
}

impl<B: Backend> Pipeline<B> {
    /// Loads every part of the folder and checks it against its configuration.
    pub fn load(
        backend: B,
        folder: &ModelFolder,
        options: &Options,
        observer: &mut dyn Observer<B>,
    ) -> Result<Self> {
        // The tokenizer's names and the autoencoder's kernels are put in order, which takes about as long as all the
        // rest: each on a thread of its own.
        let loaded = std::thread::scope(|scope| {
            let tokenizer = scope.spawn(|| match &folder.tokenizer {
                Some(files) => PromptTokenizer::open(files),
                None => PromptTokenizer::built_in(),
            });
            let autoencoder = scope.spawn(|| load_autoencoder(&backend, folder, options));
            Self::load_others(&backend, folder, options, observer).and_then(|others| {
                observer.event(Event::Loading { part: "tokenizer" })?;
                let tokenizer = join(tokenizer)?;
                observer.event(Event::Loading { part: "vae" })?;
                Ok((others, tokenizer, join(autoencoder)?))
            })
        });
        let ((texter, transformer, weights), tokenizer, autoencoder) = loaded?;
        let (folder, options, fingerprint) = (folder.clone(), options.clone(), weights.fingerprint()?);
        Ok(Pipeline {
            backend,
            folder,
            options,
            fingerprint,
            tokenizer,
            texter,
            transformer,
            weights,
            autoencoder,
        })
    }

    /// The text encoder (unless it may not be needed), the transformer and its weights.
    fn load_others(
        b: &B,
        folder: &ModelFolder,
        options: &Options,
        observer: &mut dyn Observer<B>,
    ) -> Result<(Option<Texter<B>>, Transformer<B>, WeightSource)> {
        let dtype = options.dtype;
        let cache = &options.text_cache;
        let texter = folder.text_encoder.as_ref();
        let texter = texter.map(|part| Texter::new(b, part, options, cache.clone(), observer)).transpose()?;

        observer.event(Event::Loading { part: "transformer" })?;
        if let Some(Placement { weights, transformer, .. }) = options.placement {
            b.keep_weights(transformer, weights.transformer);
        }
        let source = folder.transformer.weights()?;
        let (updates, reports) = resolve_loras(&source, folder, options, &options.loras)?;
        let rounds = matches!(options.form, LinearForm::Int8 { .. }) && source.bytes_to_round() > 0;
        let mut told = |done, total| match rounds {
            true => observer.event(Event::Rounded { done, total }),
            false => Ok(()),
        };
        let config = &folder.transformer.config;
        let vars = source.root().with_form(options.form).with_loras(&updates);
        let transformer = Transformer::load_blocks(b, &vars, config, dtype, &mut told)?;
        for report in reports {
            observer.event(Event::Lora { report: report.to_string() })?;
        }
        Ok((texter, transformer, source))
    }

    /// Takes these LoRAs, with their weights, instead of those it has; the model stays loaded. After an error everything
    /// is as before.
    ///
    /// It takes milliseconds; longer only where a DoRA has its layers measured, or a GPU needs changed weights.
    pub fn set_loras(&mut self, loras: &[(PathBuf, f32)]) -> Result<Vec<LoraReport>> {
        let (updates, reports) = resolve_loras(&self.weights, &self.folder, &self.options, loras)?;
        let vars = self.weights.root().with_form(self.options.form).with_loras(&updates);
        self.transformer.set_loras(&self.backend, &vars)?;
        self.options.loras = loras.to_vec();
        Ok(reports)
    }

    /// The folder it was loaded from.
    pub fn folder(&self) -> &ModelFolder {
        &self.folder
    }

    /// The backend it runs on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// What makes pictures of latents, and latents of pictures.
    pub fn autoencoder(&self) -> &Autoencoder<B> {
        &self.autoencoder
    }

    /// Identity of the transformer's weights, for recipes.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Checks a request and fills in its defaults, without doing any of the work.
    ///
    /// [`ModelFolder::resolve`] does so before the model is loaded; here the prompts are counted as well.
    pub fn resolve(&self, request: &Request) -> Result<Resolved> {
        Ok(self.plan(request)?.0)
    }

    /// Loads what this request needs and is not loaded yet: the text encoder, unless every text is in the cache.
    ///
    /// [`Pipeline::generate`] does so itself when it comes to that; doing it before finds damaged files early.
    pub fn prepare(&self, request: &Request, observer: &mut dyn Observer<B>) -> Result<()> {
        let (plan, _) = self.plan(request)?;
        let texts = texts(&request.prompt, plan.two_calls(self.folder.variant));
        if texts.is_empty() {
            return Ok(());
        }
        let tokens = text::tokenize(&self.tokenizer, &texts, request.max_tokens)?;
        self.texter()?.prepare(&self.backend, &tokens, observer)
    }

    /// All pictures of a request.
    pub fn generate(&self, request: &Request, observer: &mut dyn Observer<B>) -> Result<Vec<Generated>> {
        let mut pictures = Vec::new();
        self.generate_each(request, observer, &mut |picture| {
            pictures.push(picture);
            Ok(())
        })?;
        Ok(pictures)
    }

    /// Hands over every picture of a request as soon as it is done.
    pub fn generate_each(
        &self,
        request: &Request,
        observer: &mut dyn Observer<B>,
        done: &mut dyn FnMut(Generated) -> Result<()>,
    ) -> Result<()> {
        let (most, memory) = (self.options.most_together, self.options.memory_limit);
        let together = Together { most, rows: None, memory };
        let mut end = Ok(());
        let members = &mut [Member { request, observer, done }];
        self.generate_together(members, &together, &mut |_, result| end = result);
        end
    }

    fn plan<'a>(&self, request: &'a Request) -> Result<(Resolved, Prepared<'a>)> {
        let (mut plan, prepared) = plan::check(&self.folder, request, &self.options)?;
        if let Prompt::Text { prompts, .. } = &request.prompt {
            for prompt in prompts {
                let count = self.tokenizer.count(prompt)?;
                if count > request.max_tokens {
                    let max = request.max_tokens;
                    plan.notes.push(format!("the prompt has {count} tokens and is cut to {max}"));
                }
            }
        }
        Ok((plan, prepared))
    }

    fn encode_text(
        &self,
        request: &Request,
        with_negative: bool,
        observer: &mut dyn Observer<B>,
    ) -> Result<Texts<B>> {
        let texts = texts(&request.prompt, with_negative);
        match &request.prompt {
            Prompt::Text { .. } => {
                let mut prompts = self.encode_prompts(&texts, request.max_tokens, observer)?;
                let negative = if with_negative { prompts.pop() } else { None };
                Ok(Texts { prompts, negative })
            }
            Prompt::Embeddings { prompts, negative } => {
                let upload = |text: &HostTensor| self.upload_embeddings(text);
                let prompts = prompts.iter().map(upload).collect::<Result<_>>()?;
                let negative = match (with_negative, negative) {
                    (false, _) => None,
                    (true, Some(negative)) => Some(upload(negative)?),
                    (true, None) => self.encode_prompts(&texts, request.max_tokens, observer)?.pop(),
                };
                Ok(Texts { prompts, negative })
            }
        }
    }

    fn encode_prompts(
        &self,
        texts: &[&str],
        max_tokens: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<B::Tensor>> {
        let all = text::tokenize(&self.tokenizer, texts, max_tokens)?;
        let texter = self.texter()?;
        let encode = |(i, tokens)| {
            let encoded = texter.encode(&self.backend, tokens, (i, texts.len()), observer)?;
            observer.see("prompt_embeds", &encoded)?;
            Ok(encoded)
        };
        all.iter().enumerate().map(encode).collect()
    }

    fn texter(&self) -> Result<&Texter<B>> {
        self.texter.as_ref().ok_or_else(|| {
            Error::request(format!(
                "`{}` has no text encoder that Kiln can run; give precomputed prompt embeddings",
                self.folder.path.display()
            ))
        })
    }

    fn upload_embeddings(&self, text: &HostTensor) -> Result<B::Tensor> {
        let expected = self.folder.transformer.config.joint_attention_dim;
        let shape = text.shape();
        if shape.rank() != 2 || shape.last() != expected || shape.rows() == 0 {
            return Err(Error::request(format!(
                "the prompt embeddings have shape {shape}, expected [tokens, {expected}]"
            )));
        }
        finite("the prompt's embedding", text)?;
        Ok(self.backend.upload(text, self.options.dtype)?)
    }

    /// Tokens of the references (the source of an inpainting first), and what the picture starts from.
    fn encode_pictures(
        &self,
        plan: &Resolved,
        prepared: &Prepared<'_>,
        observer: &mut dyn Observer<B>,
    ) -> Result<(Option<ReferenceTokens<B>>, Origin<B>)> {
        let b = &self.backend;
        let (width, height) = (plan.width as u32, plan.height as u32);
        let source = match &prepared.start {
            Start::Noise => None,
            Start::Picture(picture) => {
                Some(Cow::Owned(kiln_image::prepare_init(picture, Some(width), Some(height))?))
            }
            Start::Inpaint(inpaint) => Some(Cow::Borrowed(&inpaint.source)),
        };
        let references = prepared.references.iter().map(Cow::Borrowed);
        let pictures: Vec<Cow<'_, Picture>> = source.into_iter().chain(references).collect();
        let mut tokens = Vec::new();
        let mut grids = Vec::new();
        for (index, picture) in pictures.iter().enumerate() {
            observer.event(Event::Reference { index, total: pictures.len() })?;
            let encoded = self.autoencoder.encode(b, picture, observer)?;
            finite("the autoencoder's latent", &b.download(&encoded)?)?;
            observer.see(&format!("ref{index}.normalised_latents"), &encoded)?;
            tokens.push(encoded);
            grids.push([picture.height() as usize / 16, picture.width() as usize / 16]);
        }
        let origin = match &prepared.start {
            Start::Noise => Origin::Noise,
            Start::Picture(_) => {
                grids.remove(0);
                Origin::Picture(tokens.remove(0))
            }
            Start::Inpaint(inpaint) => {
                let mask = HostTensor::from_f32([inpaint.mask.len()], inpaint.mask.clone())?;
                Origin::Masked { tokens: tokens[0].clone(), mask: b.upload(&mask, DType::F32)? }
            }
        };
        let references = if tokens.is_empty() {
            None
        } else {
            let tokens = b.concat_rows(&tokens.iter().collect::<Vec<_>>())?;
            Some(ReferenceTokens { tokens, grids })
        };
        Ok((references, origin))
    }
}

/// The autoencoder that was asked for, or the model's own.
fn load_autoencoder<B: Backend>(b: &B, folder: &ModelFolder, options: &Options) -> Result<Autoencoder<B>> {
    match (&options.vae, &folder.vae) {
        (Some(path), _) => Autoencoder::open(b, path, options.dtype),
        (None, Some(part)) => Autoencoder::load(b, part, options.dtype),
        (None, None) => {
            let what = "there is no `vae` in it, and no other autoencoder was given";
            Err(Error::config(&folder.path, what))
        }
    }
}

/// Opens LoRAs and resolves them against the transformer's layers.
fn resolve_loras(
    source: &WeightSource,
    folder: &ModelFolder,
    options: &Options,
    loras: &[(PathBuf, f32)],
) -> Result<(LoraUpdates, Vec<LoraReport>)> {
    let loras = loras.iter().map(|(path, weight)| Ok((Lora::open(path)?, *weight)));
    let layers = folder.transformer.config.linear_layers();
    let options = LoraOptions { partial: options.lora_partial, dtype: options.dtype };
    Ok(LoraUpdates::resolve(source, &layers, loras.collect::<Result<Vec<_>>>()?, options)?)
}

/// What a thread made; its panic goes on here.
fn join<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The texts that the text encoder has to encode for a prompt, the negative one last.
fn texts(prompt: &Prompt, with_negative: bool) -> Vec<&str> {
    match prompt {
        Prompt::Text { prompts, negative } => {
            let negative = with_negative.then(|| negative.as_deref().unwrap_or(""));
            prompts.iter().map(String::as_str).chain(negative).collect()
        }
        Prompt::Embeddings { negative: None, .. } if with_negative => vec![""],
        Prompt::Embeddings { .. } => Vec::new(),
    }
}

/// Refuses NaN and infinity, which would otherwise end as a black picture.
fn finite(what: &'static str, x: &HostTensor) -> Result<()> {
    match x.to_f32()?.iter().all(|v| v.is_finite()) {
        true => Ok(()),
        false => Err(Error::NotFinite { what }),
    }
}
