//! The phases of an image, each run alone on its own weights, which are dropped before the next.

use std::time::Instant;

use kiln_engine::{DeviceInfo, LoraRef, Model, Part, Placement, Variant};
use kiln_image::Picture;
use kiln_model::text_encoder::TextEncoder;
use kiln_model::tokenizer::Tokens;
use kiln_model::transformer::{Call, Item, Layout, Position, References, Transformer};
use kiln_model::{Autoencoder, ResidencyPlan};
use kiln_ops::{Backend, Timed};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{LinearForm, Lora, LoraOptions, LoraUpdates, WeightSource};

use super::memory::Watch;
use super::report::{Measured, Report};
use super::source::Source;
use crate::args::PhaseArg;
use crate::failure::{Failure, While};
use crate::values;

/// What is to be measured.
pub struct Plan {
    pub source: Source,
    pub dtype: DType,
    /// The form of the transformer's linear layers.
    pub form: LinearForm,
    pub loras: Vec<LoraRef>,
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

/// Runs on a device that don't count, after the first: it may time them to find out how they are done best.
pub(super) const FINDING_OUT: usize = 4;

/// Words of a usual prompt and its template; the rest of the text is padding.
const REAL_TOKENS: usize = 64;

/// Measures phase after phase.
pub struct Bench<'a, B: Backend> {
    pub plan: &'a Plan,
    pub b: Timed<B>,
    pub report: Report,
    /// One that works behind the caller's back has its operations counted in a run of their own.
    pub device: DeviceInfo<B>,
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
        Ok(self.report)
    }

    fn wants(&self, phase: PhaseArg) -> bool {
        self.plan.phases.is_empty() || self.plan.phases.contains(&phase)
    }

    fn grid(&self) -> [usize; 2] {
        [self.plan.height / 16, self.plan.width / 16]
    }

    fn text(&mut self) -> Result<(), Failure> {
        let model = self.plan.source.model(1)?;
        let Some(part) = &model.text_encoder else {
            self.report.note("the text encoder of this model can't be run by Kiln: its phase is left out");
            return Ok(());
        };
        let config = &part.config;
        let encoder = self.load("text encoder", part, |b, weights, dtype, plan| {
            Ok(TextEncoder::load(b, &weights.root(), config, dtype, plan)?)
        })?;
        let weights = part.weights()?;
        let count = self.plan.text_tokens;
        let id = |i: usize| (i * 7919 % config.vocab_size.max(1)) as u32;
        let tokens = Tokens { ids: (0..count).map(id).collect(), real: count.min(REAL_TOKENS) };
        let b = &self.b;
        let measured = self.measure("text encode", weights, || {
            encoder.forward(b, &tokens, (0, 1), &mut ()).map(drop).map_err(Failure::from)
        })?;
        self.report.phase(measured);
        Ok(())
    }

    fn pictures(&mut self) -> Result<(), Failure> {
        let model = self.plan.source.model(1)?;
        let Some(part) = &model.vae else {
            self.report.note("there is no VAE in this model: its phases are left out");
            return Ok(());
        };
        let config = &part.config;
        let vae = self.load("vae", part, |b, weights, dtype, _| {
            Ok(Autoencoder::load(b, weights, Some(config), dtype)?)
        })?;
        let weights = part.weights()?;
        let b = &self.b;
        if self.wants(PhaseArg::Encode) && self.plan.references > 0 {
            let (width, height) = (self.plan.width as u32, self.plan.height as u32);
            let pixels =
                (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let picture = Picture::new(width, height, pixels)?;
            let name = format!("vae encode, {}", values::plural(self.plan.references, "reference"));
            let measured = self.measure(&name, weights, || {
                (0..self.plan.references).try_for_each(|_| Ok(vae.encode(b, &picture, &mut ()).map(drop)?))
            })?;
            self.report.phase(measured);
        }
        if self.wants(PhaseArg::Decode) {
            let [height, width] = self.grid();
            let tokens = b.upload(&noise([height * width, config.token_channels()])?, DType::F32)?;
            let measured = self.measure("vae decode", weights, || {
                Ok(vae.decode(b, &tokens, [height, width], &mut ()).map(drop)?)
            })?;
            self.report.phase(measured);
        }
        Ok(())
    }

    fn steps(&mut self) -> Result<(), Failure> {
        let model = self.plan.source.model(1)?;
        let config = &model.transformer.config;
        let transformer = self.transformer(&model)?;
        let weights = model.transformer.weights()?;
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
        let variant = model.variant;
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
                phases.push(self.measure(&name, weights, || {
                    cache = step(References::Extract(tokens), &first)?.pop().and_then(|answer| answer.cache);
                    Ok(())
                })?);
                if let Some(cache) = &cache {
                    let later = layout(&here)?;
                    phases.push(self.measure(&format!("step, references kept{several}"), weights, || {
                        Ok(step(References::Cached(cache), &later).map(drop)?)
                    })?);
                }
            }
            references => {
                let layout = layout(&[here, there].concat())?;
                phases.push(self.measure(&format!("step{several}"), weights, || {
                    Ok(step(References::Joint(references.as_ref()), &layout).map(drop)?)
                })?);
            }
        }
        phases.into_iter().for_each(|phase| self.report.phase(phase));
        Ok(())
    }

    /// The transformer with its LoRAs, which are taken off and laid over again once, as a server does between images.
    fn transformer(&mut self, model: &Model) -> Result<Transformer<Timed<B>>, Failure> {
        let (part, plan) = (&model.transformer, self.plan);
        let (source, layers) = (part.weights()?, part.config.linear_layers());
        let resolve = |loras: &[LoraRef]| {
            let open = |lora: &LoraRef| Ok::<_, Failure>((Lora::open(&lora.path)?, lora.weight));
            let loras = loras.iter().map(open).collect::<Result<Vec<_>, _>>()?;
            let options = LoraOptions { partial: false, dtype: plan.dtype };
            Ok::<_, Failure>(LoraUpdates::resolve(source, &layers, loras, options)?)
        };
        let (updates, reports) = resolve(&plan.loras)?;
        let vars = source.root().with_form(plan.form).with_loras(&updates);
        let mut transformer = self.load("transformer", part, |b, _, dtype, plan| {
            Ok(Transformer::load(b, &vars, &part.config, dtype, plan)?)
        })?;
        reports.iter().for_each(|report| self.report.note(report.to_string()));
        if plan.loras.is_empty() {
            return Ok(transformer);
        }
        let mut timed = |loras: &[LoraRef], b: &Timed<B>| {
            let start = Instant::now();
            let (updates, _) = resolve(loras)?;
            transformer.set_loras(b, &source.root().with_form(plan.form).with_loras(&updates))?;
            b.synchronize()?;
            Ok::<_, Failure>(1e3 * start.elapsed().as_secs_f64())
        };
        let off = timed(&[], &self.b)?;
        let on = timed(&plan.loras, &self.b)?;
        self.b.take();
        self.report.note(format!("LoRAs taken off in {off:.1} ms, laid over again in {on:.1} ms"));
        Ok(transformer)
    }

    /// Loads a part of the model, which is a phase, too.
    fn load<T, C>(
        &mut self,
        name: &'static str,
        part: &Part<C>,
        load: impl FnOnce(&Timed<B>, &WeightSource, DType, &ResidencyPlan) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.report.begin(&format!("loading the {name}"));
        let start = Instant::now();
        let weights = part.weights()?;
        let plan = match (self.plan.placement.as_ref(), name) {
            (Some(placement), "transformer") => placement.transformer_plan(),
            (Some(placement), "text encoder") => placement.text_encoder_plan(),
            _ => ResidencyPlan::whole(),
        };
        let loaded =
            load(&self.b, weights, self.plan.dtype, &plan).while_doing(|| format!("loading the {name}"))?;
        self.b.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        self.b.take();
        self.report.loaded(name, seconds, weights);
        Ok(loaded)
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
        if self.device.is_asynchronous {
            self.b.pause(true);
            for _ in 0..FINDING_OUT.min(self.plan.repeat) {
                run()?;
                self.b.synchronize()?;
            }
        }
        let replayed = || self.device.counters(self.b.inner()).replayed;
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
        if self.device.is_asynchronous {
            self.b.pause(false);
            run()?;
            counted = 1;
        }
        let own = watch.peak().map(|peak| peak.saturating_sub(made));
        let memory = match self.device.is_asynchronous {
            true => Some(self.device.counters(self.b.inner()).peak_memory),
            false => own,
        };
        Ok(Measured { replayed, ..Measured::new(phase, seconds, memory, self.b.take(), counted) })
    }
}

/// Numbers like those of latents, the same in every run.
fn noise(shape: [usize; 2]) -> Result<HostTensor, Failure> {
    let value = |i: usize| (i.wrapping_mul(2_654_435_761) % 2003) as f32 * 1e-3 - 1.0;
    let values = (0..shape[0] * shape[1]).map(value).collect();
    HostTensor::from_f32(shape, values).map_err(|e| Failure::new(e.to_string()))
}
