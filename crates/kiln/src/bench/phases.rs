//! The phases of a picture, each run alone on its own weights, which are dropped before the next.

use std::time::Instant;

use kiln_image::Picture;
use kiln_model::text_encoder::TextEncoder;
use kiln_model::tokenizer::{PromptTokenizer, Tokens};
use kiln_model::transformer::{Call, Item, Layout, Position, References, Transformer};
use kiln_model::vae::Vae;
use kiln_model::{Autoencoder, Placement, Variant};
use kiln_ops::{Backend, Timed};
use kiln_tensor::rng::Generator;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{LinearForm, Lora, LoraOptions, LoraReport, LoraUpdates, Vars, WeightSource};

use super::memory::Watch;
use super::report::{Measured, Report};
use super::source::Source;
use crate::args::PhaseArg;
use crate::failure::{Failure, While};
use crate::values::{self, LoraArg};

/// What is to be measured.
pub struct Plan {
    pub source: Source,
    pub dtype: DType,
    /// The form of the transformer's linear layers.
    pub form: LinearForm,
    pub loras: Vec<LoraArg>,
    pub width: usize,
    pub height: usize,
    pub references: usize,
    /// Pictures that take a step at once.
    pub batch: usize,
    pub text_tokens: usize,
    /// Runs that count; one more goes before them.
    pub repeat: usize,
    pub phases: Vec<PhaseArg>,
    /// Which weights stay on the device.
    pub placement: Option<Placement>,
}

impl Plan {
    /// LoRAs over the transformer's layers.
    fn resolve(
        &self,
        weights: &WeightSource,
        loras: Vec<(Lora, f32)>,
    ) -> Result<(LoraUpdates, Vec<LoraReport>), Failure> {
        let layers = self.source.transformer().linear_layers();
        let options = LoraOptions { partial: false, dtype: self.dtype };
        Ok(LoraUpdates::resolve(weights, &layers, loras, options)?)
    }
}

/// Runs on a device that don't count, after the first: it may time them to find out how they are done best.
const FINDING_OUT: usize = 4;

/// Words of a usual prompt and its template; the rest of the text is padding.
const REAL_TOKENS: usize = 64;

/// What the whole picture is to show, and its seed.
const PROMPT: &str = "A red fox sits on a mossy rock beside a mountain lake at dawn, low sun behind thin mist, \
    pine trees and snow on the far shore, every hair of its coat sharp, soft light, photograph, 85 mm lens";
const SEED: u64 = 7;

/// Measures phase after phase.
pub struct Bench<'a, B: Backend> {
    pub plan: &'a Plan,
    pub b: Timed<B>,
    pub report: Report,
    /// What works behind the caller's back, where something does: then operations are counted in a run of their own.
    pub device: Option<Device<B>>,
}

/// What a device tells of itself.
pub struct Device<B> {
    /// Bytes of its memory that were in use at most.
    pub held: fn(&B) -> u64,
    /// How many calls were replayed so far.
    pub replayed: fn(&B) -> usize,
}

impl<B: Backend> Bench<'_, B> {
    pub fn run(mut self) -> Result<Report, Failure> {
        if self.wants(PhaseArg::Text) {
            self.text()?;
        }
        // A picture's references are encoded before its steps and it is decoded after them, but the autoencoder is
        // loaded once.
        if self.wants(PhaseArg::Encode) && self.plan.references > 0 || self.wants(PhaseArg::Decode) {
            self.pictures()?;
        }
        if self.wants(PhaseArg::Step) {
            self.steps()?;
        }
        if self.plan.phases.contains(&PhaseArg::Picture) {
            self.whole()?;
        }
        Ok(self.report)
    }

    fn wants(&self, phase: PhaseArg) -> bool {
        self.plan.phases.is_empty() || self.plan.phases.contains(&phase)
    }

    fn grid(&self) -> [usize; 2] {
        [self.plan.height / 16, self.plan.width / 16]
    }

    fn text(&mut self) -> Result<(), Failure> {
        let Some(config) = self.plan.source.text_encoder() else {
            self.report.note("the text encoder of this model can't be run by Kiln: its phase is left out");
            return Ok(());
        };
        let (encoder, weights) =
            self.load("text encoder", |b, vars, dtype| Ok(TextEncoder::load(b, vars, config, dtype)?))?;
        let count = self.plan.text_tokens;
        let id = |i: usize| (i * 7919 % config.vocab_size.max(1)) as u32;
        let tokens = Tokens { ids: (0..count).map(id).collect(), real: count.min(REAL_TOKENS) };
        let b = &self.b;
        let measured = self.measure("text encode", &weights, || {
            encoder.forward(b, &tokens, (0, 1), &mut ()).map(drop).map_err(Failure::from)
        })?;
        self.report.phase(measured);
        Ok(())
    }

    fn pictures(&mut self) -> Result<(), Failure> {
        let Some(config) = self.plan.source.vae() else {
            self.report.note("there is no VAE in this model: its phases are left out");
            return Ok(());
        };
        let (vae, weights) =
            self.load("vae", |b, vars, dtype| Ok(Autoencoder::Full(Vae::load(b, vars, config, dtype)?)))?;
        let b = &self.b;
        if self.wants(PhaseArg::Encode) && self.plan.references > 0 {
            let (width, height) = (self.plan.width as u32, self.plan.height as u32);
            let pixels =
                (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let picture = Picture::new(width, height, pixels)?;
            let name = format!("vae encode, {}", values::plural(self.plan.references, "reference"));
            let measured = self.measure(&name, &weights, || {
                (0..self.plan.references).try_for_each(|_| Ok(vae.encode(b, &picture, &mut ()).map(drop)?))
            })?;
            self.report.phase(measured);
        }
        if self.wants(PhaseArg::Decode) {
            let [height, width] = self.grid();
            let tokens = b.upload(&noise([height * width, config.token_channels()])?, DType::F32)?;
            let measured = self.measure("vae decode", &weights, || {
                Ok(vae.decode(b, &tokens, [height, width], &mut ()).map(drop)?)
            })?;
            self.report.phase(measured);
        }
        Ok(())
    }

    fn steps(&mut self) -> Result<(), Failure> {
        let config = self.plan.source.transformer();
        let (mut transformer, weights) =
            self.load("transformer", |b, vars, dtype| Ok(Transformer::load(b, vars, config, dtype)?))?;
        self.switch(&mut transformer, &weights)?;
        let (b, plan) = (&self.b, self.plan);
        let [height, width] = self.grid();
        let text = b.upload(&noise([plan.text_tokens, config.joint_attention_dim])?, plan.dtype)?;
        let image = b.upload(&noise([height * width, config.in_channels])?, DType::F32)?;
        let references = match plan.references {
            0 => None,
            n => Some(b.upload(&noise([n * height * width, config.in_channels])?, DType::F32)?),
        };
        let words = Position::text(plan.text_tokens);
        let here = Position::grid(0, height, width);
        let there: Vec<Position> =
            (1..=plan.references).flat_map(|i| Position::grid(10 * i as u32, height, width)).collect();
        let layout = |image: &[Position]| transformer.layout(b, &words, image);
        let variant = plan.source.variant();
        let step = |references: References<'_, Timed<B>>, layout: &Layout<Timed<B>>| {
            let guidance = (variant == Variant::Dev).then_some(4.0);
            let item = || Item { text: &text, image: &image, references, layout };
            let items: Vec<_> = (0..plan.batch).map(|_| item()).collect();
            transformer.forward(b, &Call { items: &items, timestep: 0.7, guidance }, &mut ())
        };
        let several = match plan.batch {
            1 => String::new(),
            n => format!(", {n} pictures at once"),
        };
        let mut phases = Vec::new();
        match &references {
            Some(tokens) if variant == Variant::Kv => {
                let first = layout(&[there, here.clone()].concat())?;
                let mut cache = None;
                let name = format!("first step, keeping the references{several}");
                phases.push(self.measure(&name, &weights, || {
                    cache = step(References::Extract(tokens), &first)?.pop().and_then(|answer| answer.cache);
                    Ok(())
                })?);
                if let Some(cache) = &cache {
                    let later = layout(&here)?;
                    phases.push(self.measure(
                        &format!("step, references kept{several}"),
                        &weights,
                        || Ok(step(References::Cached(cache), &later).map(drop)?),
                    )?);
                }
            }
            references => {
                let layout = layout(&[here, there].concat())?;
                phases.push(self.measure(&format!("step{several}"), &weights, || {
                    Ok(step(References::Joint(references.as_ref()), &layout).map(drop)?)
                })?);
            }
        }
        phases.into_iter().for_each(|phase| self.report.phase(phase));
        Ok(())
    }

    /// Takes LoRAs off a loaded transformer and lays them over it again, as a server does between pictures.
    fn switch(
        &mut self,
        transformer: &mut Transformer<Timed<B>>,
        weights: &WeightSource,
    ) -> Result<(), Failure> {
        if self.plan.loras.is_empty() {
            return Ok(());
        }
        let plan = self.plan;
        let mut timed = |loras: Vec<(Lora, f32)>, b: &Timed<B>| {
            let start = Instant::now();
            let (updates, _) = plan.resolve(weights, loras)?;
            transformer.set_loras(b, &weights.root().with_form(plan.form).with_loras(&updates))?;
            b.synchronize()?;
            Ok::<_, Failure>(1e3 * start.elapsed().as_secs_f64())
        };
        let off = timed(Vec::new(), &self.b)?;
        let on = timed(self.loras()?, &self.b)?;
        self.b.take();
        self.report.note(format!("LoRAs taken off in {off:.1} ms, laid over again in {on:.1} ms"));
        Ok(())
    }

    fn loras(&self) -> Result<Vec<(Lora, f32)>, Failure> {
        self.plan.loras.iter().map(|lora| Ok((Lora::open(&lora.path)?, lora.weight))).collect()
    }

    /// All phases one after the other, as a prompt goes through them: its words, its noise, four steps, the picture's bytes.
    fn whole(&mut self) -> Result<(), Failure> {
        const SIGMAS: [f32; 5] = [1.0, 0.9, 0.7, 0.4, 0.0];
        let (Some(words), Some(pictures)) = (self.plan.source.text_encoder(), self.plan.source.vae()) else {
            self.report.note("this model has not all parts: the whole picture is left out");
            return Ok(());
        };
        let config = self.plan.source.transformer();
        let (encoder, _) =
            self.load("text encoder", |b, vars, dtype| Ok(TextEncoder::load(b, vars, words, dtype)?))?;
        let (vae, _) =
            self.load("vae", |b, vars, dtype| Ok(Autoencoder::Full(Vae::load(b, vars, pictures, dtype)?)))?;
        let (transformer, weights) =
            self.load("transformer", |b, vars, dtype| Ok(Transformer::load(b, vars, config, dtype)?))?;
        let (b, count) = (&self.b, self.plan.text_tokens);
        let grid @ [height, width] = self.grid();
        let tokenizer = PromptTokenizer::built_in()?;
        let tokenize = || match tokenizer.encode(PROMPT, count)? {
            // A model with fewer words gets some of its own.
            Tokens { ids, real } if words.vocab_size <= ids.iter().max().map_or(0, |&id| id as usize) => {
                let id = |i: u32| i % words.vocab_size.max(1) as u32;
                Ok::<_, Failure>(Tokens { ids: ids.into_iter().map(id).collect(), real })
            }
            tokens => Ok(tokens),
        };
        let shape = [height * width, config.in_channels];
        let layout = transformer.layout(b, &Position::text(count), &Position::grid(0, height, width))?;
        let measured = self.measure("text to picture, 4 steps", &weights, || {
            let (start, text) = std::thread::scope(|scope| {
                let start = scope.spawn(|| Generator::cpu(SEED).randn(shape[0] * shape[1]));
                let text = encoder.forward(b, &tokenize()?, (0, 1), &mut ())?;
                let start = start.join().map_err(|_| Failure::new("drawing the noise failed"))?;
                Ok::<_, Failure>((
                    HostTensor::from_f32(shape, start).map_err(|e| Failure::new(e.to_string()))?,
                    text,
                ))
            })?;
            let mut image = b.upload(&start, DType::F32)?;
            for pair in SIGMAS.windows(2) {
                let references = References::Joint(None);
                let items = &[Item { text: &text, image: &image, references, layout: &layout }];
                let call = Call { items, timestep: pair[0], guidance: None };
                for answer in transformer.forward(b, &call, &mut ())? {
                    image = b.add_scaled(&image, &answer.velocity, pair[1] - pair[0])?;
                }
            }
            Ok(vae.decode(b, &image, grid, &mut ()).map(drop)?)
        })?;
        self.report.phase(measured);
        Ok(())
    }

    /// Loads a part of the model, which is a phase, too.
    fn load<T>(
        &mut self,
        part: &'static str,
        load: impl FnOnce(&Timed<B>, &Vars<'_>, DType) -> Result<T, Failure>,
    ) -> Result<(T, WeightSource), Failure> {
        self.report.begin(&format!("loading the {part}"));
        let start = Instant::now();
        let weights = self.plan.source.weights(part)?;
        if let Some(Placement { weights, text_encoder, transformer }) = self.plan.placement {
            match part {
                "transformer" => self.b.keep_weights(transformer, weights.transformer),
                "text encoder" => self.b.keep_weights(text_encoder, weights.text_encoder),
                _ => {}
            }
        }
        let (form, loras) = match part {
            "transformer" => (self.plan.form, self.loras()?),
            _ => (LinearForm::Float, Vec::new()),
        };
        let (updates, reports) = self.plan.resolve(&weights, loras)?;
        let vars = weights.root().with_form(form).with_loras(&updates);
        let loaded = load(&self.b, &vars, self.plan.dtype).while_doing(|| format!("loading the {part}"))?;
        reports.iter().for_each(|lora| self.report.note(lora.to_string()));
        self.b.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        self.b.take();
        self.report.loaded(part, seconds, &weights);
        Ok((loaded, weights))
    }

    fn measure(
        &self,
        phase: &str,
        weights: &WeightSource,
        mut run: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Measured, Failure> {
        self.report.begin(phase);
        let made = weights.synthetic_bytes().map_or(0, |(_, made)| made);
        let watch = Watch::start();
        run()?;
        self.b.take();
        if self.device.is_some() {
            self.b.pause(true);
            for _ in 0..FINDING_OUT.min(self.plan.repeat) {
                run()?;
                self.b.synchronize()?;
            }
        }
        let replayed = || self.device.as_ref().map_or(0, |device| (device.replayed)(self.b.inner()));
        let before = replayed();
        let mut seconds = Vec::with_capacity(self.plan.repeat);
        for _ in 0..self.plan.repeat {
            let start = Instant::now();
            run()?;
            self.b.synchronize()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        let replayed = replayed() - before;
        let mut counted = self.plan.repeat;
        if self.device.is_some() {
            self.b.pause(false);
            run()?;
            counted = 1;
        }
        let own = watch.peak().map(|peak| peak.saturating_sub(made));
        let memory = self.device.as_ref().map_or(own, |device| Some((device.held)(self.b.inner())));
        Ok(Measured { replayed, ..Measured::new(phase, seconds, memory, self.b.take(), counted) })
    }
}

/// Numbers like those of latents, the same in every run.
fn noise(shape: [usize; 2]) -> Result<HostTensor, Failure> {
    let value = |i: usize| (i.wrapping_mul(2_654_435_761) % 2003) as f32 * 1e-3 - 1.0;
    let values = (0..shape[0] * shape[1]).map(value).collect();
    HostTensor::from_f32(shape, values).map_err(|e| Failure::new(e.to_string()))
}
