//! Measures the phases of an image one by one. Each loads its component's weights and drops them at the end.

use std::ops::Range;
use std::time::Instant;

use kiln_engine::{DeviceInfo, LoraRef, Model, ModelComponent};
use kiln_family::Side;
use kiln_image::RgbImage;
use kiln_nn::language_model::{LanguageModel, Sampler, Sampling};
use kiln_nn::text_encoder::{self, TextEncoder};
use kiln_nn::tokenizer::Tokens;
use kiln_nn::transformer::{BatchItem, Position, References, RopeTables, Transformer, TransformerBatch};
use kiln_nn::{Autoencoder, ResidencyPlan};
use kiln_ops::{Backend, OpTimer};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{Lora, LoraOptions, LoraUpdates, WeightSource};

use super::memory::MemorySampler;
use super::plan::{BenchPlan, TUNING_RUNS};
use super::report::{BenchReport, PhaseResult};
use crate::args::PhaseArg;
use crate::error::{CliError, ErrorContext};
use crate::values;

/// Tokens of a typical prompt and its template; the rest is padding.
const REAL_TOKENS: usize = 64;

/// Measures one phase after the other.
pub struct PhaseBench<'a, B: Backend> {
    pub plan: &'a BenchPlan,
    pub b: B,
    pub report: BenchReport,
    /// On an asynchronous device, operations are timed in a separate run.
    pub device: DeviceInfo<B>,
}

impl<B: Backend> PhaseBench<'_, B> {
    pub fn run(mut self) -> Result<BenchReport, CliError> {
        self.timer().pause(false);
        if self.wants(PhaseArg::Text) {
            self.text()?;
        }
        if self.plan.phases.contains(&PhaseArg::Token) {
            self.token()?;
        }
        // Encode and decode are measured together, so that the autoencoder is loaded once.
        if self.wants(PhaseArg::Encode) && self.plan.references > 0 || self.wants(PhaseArg::Decode) {
            self.vae()?;
        }
        if self.wants(PhaseArg::Step) {
            self.steps()?;
        }
        Ok(self.report)
    }

    fn timer(&self) -> &OpTimer {
        self.device.timer(&self.b)
    }

    fn wants(&self, phase: PhaseArg) -> bool {
        self.plan.phases.is_empty() || self.plan.phases.contains(&phase)
    }

    fn text(&mut self) -> Result<(), CliError> {
        let model = self.plan.source.model(1)?;
        let Some(component) = &model.text_encoder else {
            self.report.note("skipped the text encoder: the model has none");
            return Ok(());
        };
        let config = &component.config;
        let encoder = self.load("text encoder", component, |b, weights, dtype, plan| {
            Ok(TextEncoder::load(b, &weights.root(), config, dtype, plan)?)
        })?;
        let weights = component.weights()?;
        let count = self.plan.text_tokens;
        let id = |i: usize| (i * 7919 % config.vocab_size.max(1)) as u32;
        let ids: Vec<u32> = (0..count).map(id).collect();
        let measure = |name: &str, real: Range<usize>| {
            let tokens = Tokens { ids: ids.clone(), real };
            self.measure(name, weights, || {
                let encoded = encoder.forward(&self.b, &tokens, config.output_layers(), (0, 1), &mut ());
                encoded.map(drop).map_err(CliError::from)
            })
        };
        let typical = count.min(REAL_TOKENS);
        let measured = match config.encoder().template.padding_side {
            Side::Right => vec![measure("text encode", 0..typical)?],
            // Padding on the left takes no time.
            Side::Left => vec![
                measure(&format!("text encode, {typical} tokens"), count - typical..count)?,
                measure(&format!("text encode, {count} tokens"), 0..count)?,
            ],
        };
        measured.into_iter().for_each(|phase| self.report.phase(phase));
        Ok(())
    }

    /// A token after a text of `text_tokens`, with the choice of the next one.
    fn token(&mut self) -> Result<(), CliError> {
        let model = self.plan.source.model(1)?;
        let component = model.text_encoder.as_ref();
        let rewrites = |c: &&ModelComponent<text_encoder::Config>| c.config.encoder().rewrites_prompts;
        let Some(component) = component.filter(rewrites) else {
            self.report.note("skipped the token: only dev's text encoder rewrites prompts");
            return Ok(());
        };
        let language_model = self.load("text encoder", component, |b, weights, dtype, plan| {
            Ok(LanguageModel::load(b, &weights.root(), &component.config, dtype, plan)?)
        })?;
        let ids: Vec<u32> = (0..self.plan.text_tokens as u32).collect();
        let (mut text, mut logits) =
            language_model.start(&self.b, &language_model.embed(&ids)?, &mut || Ok(()))?;
        let mut sampler = Sampler::new(Sampling::Random { temperature: 0.15, seed: 0 });
        let measured = self.measure("token", component.weights()?, || {
            logits = language_model.next(&self.b, &mut text, sampler.choose(&logits))?;
            Ok(())
        })?;
        self.report.phase(measured);
        Ok(())
    }

    fn vae(&mut self) -> Result<(), CliError> {
        let model = self.plan.source.model(1)?;
        let Some(component) = &model.vae else {
            self.report.note("skipped the VAE phases: the model has no VAE");
            return Ok(());
        };
        let config = &component.config;
        let vae = self.load("vae", component, |b, weights, dtype, _| {
            Ok(Autoencoder::load(b, weights, Some(config), dtype)?)
        })?;
        let weights = component.weights()?;
        let b = &self.b;
        if self.wants(PhaseArg::Encode) && self.plan.references > 0 {
            let (width, height) = (self.plan.width as u32, self.plan.height as u32);
            let pixels =
                (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let image = RgbImage::new(width, height, pixels)?;
            let name = format!("vae encode, {}", values::plural(self.plan.references, "reference"));
            let measured = self.measure(&name, weights, || {
                (0..self.plan.references).try_for_each(|_| Ok(vae.encode(b, &image, &mut ()).map(drop)?))
            })?;
            self.report.phase(measured);
        }
        if self.wants(PhaseArg::Decode) {
            let [height, width] = model.grid([self.plan.width, self.plan.height]);
            let tokens = b.upload(&noise([height * width, config.token_channels()])?, DType::F32)?;
            let measured = self.measure("vae decode", weights, || {
                Ok(vae.decode(b, &tokens, [height, width], &mut ()).map(drop)?)
            })?;
            self.report.phase(measured);
        }
        Ok(())
    }

    fn steps(&mut self) -> Result<(), CliError> {
        let model = self.plan.source.model(1)?;
        let config = &model.transformer.config;
        let transformer = self.transformer(&model)?;
        let weights = model.transformer.weights()?;
        let (b, plan) = (&self.b, self.plan);
        let [height, width] = model.grid([plan.width, plan.height]);
        let text = b.upload(&noise([plan.text_tokens, config.joint_attention_dim])?, plan.dtype)?;
        let image = b.upload(&noise([height * width, config.in_channels])?, DType::F32)?;
        let references = match plan.references {
            0 => None,
            n => Some(b.upload(&noise([n * height * width, config.in_channels])?, DType::F32)?),
        };
        let text_positions = Position::text(plan.text_tokens);
        let image_positions = Position::grid(0, height, width);
        let reference_positions: Vec<Position> =
            (1..=plan.references).flat_map(|i| Position::grid(10 * i as u32, height, width)).collect();
        let rope = |image: &[Position]| transformer.rope_tables(b, &text_positions, image);
        let variant = model.variant;
        let step = |references: References<'_, B>, rope: &RopeTables<B>| {
            let guidance = variant.default_guidance().filter(|_| variant.embeds_guidance());
            let item = || BatchItem { text: &text, image: &image, references, rope };
            let items: Vec<_> = (0..plan.batch).map(|_| item()).collect();
            transformer.forward(b, &TransformerBatch { items: &items, timestep: 0.7, guidance }, &mut ())
        };
        let batch = match plan.batch {
            1 => String::new(),
            n => format!(", batch of {n}"),
        };
        let mut phases = Vec::new();
        match &references {
            Some(tokens) if variant.caches_references => {
                let first = rope(&[reference_positions, image_positions.clone()].concat())?;
                let mut cache = None;
                let name = format!("first step, caching references{batch}");
                phases.push(self.measure(&name, weights, || {
                    cache = step(References::Extract(tokens), &first)?.pop().and_then(|output| output.cache);
                    Ok(())
                })?);
                if let Some(cache) = &cache {
                    let later = rope(&image_positions)?;
                    phases.push(self.measure(&format!("step, cached references{batch}"), weights, || {
                        Ok(step(References::Cached(cache), &later).map(drop)?)
                    })?);
                }
            }
            references => {
                let rope = rope(&[image_positions, reference_positions].concat())?;
                phases.push(self.measure(&format!("step{batch}"), weights, || {
                    Ok(step(References::Joint(references.as_ref()), &rope).map(drop)?)
                })?);
            }
        }
        phases.into_iter().for_each(|phase| self.report.phase(phase));
        Ok(())
    }

    /// Loads the transformer with its LoRAs, then measures removing and applying them, as a server does between jobs.
    fn transformer(&mut self, model: &Model) -> Result<Transformer<B>, CliError> {
        let (component, plan) = (&model.transformer, self.plan);
        let (source, layers) = (component.weights()?, component.config.linear_layers());
        let resolve = |loras: &[LoraRef]| {
            let open = |lora: &LoraRef| Ok::<_, CliError>((Lora::open(&lora.path)?, lora.weight));
            let loras = loras.iter().map(open).collect::<Result<Vec<_>, _>>()?;
            let options = LoraOptions { dtype: plan.dtype, ..LoraOptions::default() };
            Ok::<_, CliError>(LoraUpdates::resolve(source, &layers, loras, options)?)
        };
        let (updates, reports) = resolve(&plan.loras)?;
        let vars = source.root().with_precision(plan.linear_precision).with_loras(&updates);
        let mut transformer = self.load("transformer", component, |b, _, dtype, plan| {
            Ok(Transformer::load(b, &vars, &component.config, dtype, plan)?)
        })?;
        reports.iter().for_each(|report| self.report.note(report.to_string()));
        if plan.loras.is_empty() {
            return Ok(transformer);
        }
        let mut timed = |loras: &[LoraRef], b: &B| {
            let start = Instant::now();
            let (updates, _) = resolve(loras)?;
            transformer
                .set_loras(b, &source.root().with_precision(plan.linear_precision).with_loras(&updates))?;
            b.synchronize()?;
            Ok::<_, CliError>(1e3 * start.elapsed().as_secs_f64())
        };
        let removed = timed(&[], &self.b)?;
        let applied = timed(&plan.loras, &self.b)?;
        self.timer().take();
        self.report.note(format!("LoRAs removed in {removed:.1} ms, applied again in {applied:.1} ms"));
        Ok(transformer)
    }

    /// Loads a component of the model and measures how long that takes.
    fn load<T, C>(
        &mut self,
        name: &'static str,
        component: &ModelComponent<C>,
        load: impl FnOnce(&B, &WeightSource, DType, &ResidencyPlan) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        self.report.begin(&format!("loading the {name}"));
        let start = Instant::now();
        let weights = component.weights()?;
        let plan = match (self.plan.residency.as_ref(), name) {
            (Some(residency), "transformer") => residency.transformer_plan(),
            (Some(residency), "text encoder") => residency.text_encoder_plan(),
            _ => ResidencyPlan::all_on_device(),
        };
        let loaded =
            load(&self.b, weights, self.plan.dtype, &plan).with_context(|| format!("loading the {name}"))?;
        self.b.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        self.timer().take();
        self.report.loaded(name, seconds, weights);
        Ok(loaded)
    }

    fn measure(
        &self,
        phase: &str,
        weights: &WeightSource,
        mut run: impl FnMut() -> Result<(), CliError>,
    ) -> Result<PhaseResult, CliError> {
        self.report.begin(phase);
        let synthetic = weights.synthetic_bytes().map_or(0, |(_, distinct)| distinct);
        let sampler = MemorySampler::start();
        run()?;
        self.timer().take();
        if self.device.is_asynchronous {
            self.timer().pause(true);
            for _ in 0..TUNING_RUNS.min(self.plan.repeat) {
                run()?;
                self.b.synchronize()?;
            }
        }
        let graph_replays = || self.device.counters(&self.b).graph_replays;
        let before = graph_replays();
        let mut seconds = Vec::with_capacity(self.plan.repeat);
        for _ in 0..self.plan.repeat {
            let start = Instant::now();
            run()?;
            self.b.synchronize()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        let graph_replays = graph_replays() - before;
        let mut counted = self.plan.repeat;
        if self.device.is_asynchronous {
            self.timer().pause(false);
            run()?;
            counted = 1;
        }
        let process_memory = sampler.peak().map(|peak| peak.saturating_sub(synthetic));
        let memory = if self.device.is_asynchronous {
            Some(self.device.counters(&self.b).peak_memory)
        } else {
            process_memory
        };
        Ok(PhaseResult {
            graph_replays,
            ..PhaseResult::new(phase, seconds, memory, self.timer().take(), counted)
        })
    }
}

/// Returns values in the range of latents, the same in every run.
pub(super) fn noise(shape: [usize; 2]) -> Result<HostTensor, CliError> {
    let value = |i: usize| (i.wrapping_mul(2_654_435_761) % 2003) as f32 * 1e-3 - 1.0;
    let values = (0..shape[0] * shape[1]).map(value).collect();
    HostTensor::from_f32(shape, values).map_err(|e| CliError::new(e.to_string()))
}
