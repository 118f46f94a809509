//! Measures a whole image through the engine: request, plan, generation, pixels.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use kiln_engine::{
    BatchLimit, Error, FileRef, ImageCollector, InputImage, InputResolver, InputTensors, LocalFiles, Plan,
    Request, Settings,
};
use kiln_engine::{Setup, Task};
use kiln_image::RgbImage;

use super::plan::{BenchPlan, TUNING_RUNS};
use super::report::{BenchReport, PhaseResult};
use crate::args::BenchArgs;
use crate::error::CliError;

pub const PROMPT: &str = "A red fox sits on a mossy rock beside a mountain lake at dawn, low sun behind thin mist, \
    pine trees and snow on the far shore, every hair of its coat sharp, soft light, photograph, 85 mm lens";
const SEED: u64 = 7;
const STEPS: u32 = 4;

/// Returns the measured request.
pub fn request(args: &BenchArgs, (width, height): (usize, usize)) -> Request {
    Request {
        width: Some(width as u32),
        height: Some(height as u32),
        steps: Some(STEPS),
        seed: vec![SEED],
        max_tokens: args.max_tokens,
        loras: args.loras.clone(),
        references: (0..args.refs).map(|i| FileRef::from(format!("reference {i}"))).collect(),
        ..Request::new(PROMPT)
    }
}

/// Measures the time from the request to the pixels of its image, with everything loaded.
pub fn measure(
    args: &BenchArgs,
    settings: &Settings,
    plan: &BenchPlan,
    report: &mut BenchReport,
) -> Result<(), CliError> {
    let model = plan.source.model(3)?;
    if model.text_encoder.is_none() || model.vae.is_none() {
        report.note("skipped the whole image: the model lacks a component");
        return Ok(());
    }
    let request = request(args, (plan.width, plan.height));
    let inputs = SyntheticImages([plan.width as u32, plan.height as u32]);
    let first = Plan::new(&model, &request, &inputs)?;
    let setup = Setup::new(&model, settings, Some(&first))?;
    setup.notes().iter().for_each(|note| report.note(note.clone()));
    report.begin("loading the model");
    let engine = setup.load(&ImageCollector::default())?;
    let run = || -> Result<(), CliError> {
        let plan = Arc::new(Plan::new(&model, &request, &inputs)?);
        let sink = Arc::new(ImageCollector::default());
        engine.generate(&[Task { plan, sink: sink.clone() }], &BatchLimit::ONE);
        engine.finish();
        sink.take()?.pop().map(drop).ok_or_else(|| CliError::new("the engine returned no image"))
    };
    let phase = format!("text to image, {STEPS} steps");
    report.begin(&phase);
    for _ in 0..1 + TUNING_RUNS.min(plan.repeat) {
        run()?;
    }
    let before = engine.counters().graph_replays;
    let mut seconds = Vec::with_capacity(plan.repeat);
    for _ in 0..plan.repeat {
        let start = Instant::now();
        run()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let counters = engine.counters();
    let memory = Some(counters.peak_memory).filter(|bytes| *bytes > 0);
    let measured = PhaseResult::new(&phase, seconds, memory, Vec::new(), 0);
    report.phase(PhaseResult { graph_replays: counters.graph_replays - before, ..measured });
    Ok(())
}

/// Reference images of this width and height with synthetic pixels.
struct SyntheticImages([u32; 2]);

impl InputResolver for SyntheticImages {
    fn image(&self, name: &Path) -> kiln_engine::Result<InputImage> {
        let [width, height] = self.0;
        let pixels = (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let image = Arc::new(RgbImage::new(width, height, pixels)?);
        Ok(InputImage { image, file: FileRef::from(name.to_path_buf()) })
    }

    fn lora(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        LocalFiles.lora(name)
    }

    fn vae(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        LocalFiles.vae(name)
    }

    fn tensors(&self, _: &Path) -> kiln_engine::Result<InputTensors> {
        Err(Error::request("`kiln bench` does not read tensor files"))
    }
}
