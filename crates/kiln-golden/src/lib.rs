//! Golden tests: Kiln's pipeline on any backend, compared with dumps of diffusers.
//!
//! A golden set is a folder with `tiny/` (checkpoints, whose shared components are stored once) and `reference/` (for
//! every case a JSON file with its parameters, a safetensors file with diffusers' intermediate tensors, and the images).
//! Two small sets are part of the repository, one of them for dev; `KILN_GOLDEN` lists larger ones to run as well.
//!
//! ```no_run
//! use kiln_golden::{Tolerance, trials};
//! use kiln_ops::Reference;
//!
//! let args = libtest_mimic::Arguments::from_args();
//! libtest_mimic::run(&args, trials("reference", Reference::new, Tolerance::F32)).exit();
//! ```
#![forbid(unsafe_code)]

mod case;
mod checkpoint;
mod compare;
mod inputs;
mod recipe;
mod recorder;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::pipeline::{BatchMember, LoadOptions, PendingOutput, Pipeline, PipelineOutput};
use kiln_engine::{BatchLimit, LocalFiles, Model, Plan, Request};
use kiln_ops::Backend;
use kiln_tensor::DType;
use kiln_weights::WeightSource;
use libtest_mimic::{Failed, Trial};

use case::Case;
pub use checkpoint::Checkpoint;
pub use inputs::TestInputs;
use recorder::Recorder;

/// How far results may differ from diffusers in f32.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// The dtype the model computes in.
    pub dtype: DType,
    /// Relative L2 distance of every compared tensor.
    pub relative: f64,
    /// Largest difference of a latent value.
    pub absolute: f64,
    /// Largest difference of an image's 8-bit values.
    pub levels: u8,
    /// Whether tensors inside transformer calls are compared too. Such calls can't be replayed as CUDA graphs.
    pub transformer_tensors: bool,
}

impl Tolerance {
    /// diffusers in f32 is itself 1e-6 off f64 on these models; another order of sums adds as much.
    pub const F32: Tolerance =
        Tolerance { dtype: DType::F32, relative: 1e-5, absolute: 1e-4, levels: 1, transformer_tensors: true };

    /// diffusers in bf16 is itself 9e-2 off f64 on these random models, which amplify every rounding error.
    pub const BF16: Tolerance = Tolerance {
        dtype: DType::BF16,
        relative: 0.15,
        absolute: 2.0,
        levels: 96,
        transformer_tensors: true,
    };
}

/// The golden set of this repository; `KILN_TESTDATA` overrides its folder, for tests built on another machine.
pub fn testdata() -> PathBuf {
    match std::env::var_os("KILN_TESTDATA") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata"),
    }
}

/// The golden sets to run, with the prefix of their cases' names: the repository's and those of `KILN_GOLDEN`.
fn golden_sets() -> Vec<(&'static str, PathBuf)> {
    let own = [("", testdata()), ("dev/", testdata().join("dev"))];
    let more = std::env::var_os("KILN_GOLDEN").unwrap_or_default();
    let more = std::env::split_paths(&more).filter(|path| !path.as_os_str().is_empty());
    own.into_iter().chain(more.map(|path| ("full/", path))).collect()
}

/// One trial per case of every set, named `case::backend`.
pub fn trials<B: Backend + 'static>(
    name: &str,
    backend: impl Fn() -> B + Send + Sync + 'static,
    tolerance: Tolerance,
) -> Vec<Trial> {
    let backend = Arc::new(backend);
    let mut trials = Vec::new();
    for (prefix, set) in golden_sets() {
        let cases = case::list(&set);
        assert!(!cases.is_empty(), "no golden cases in `{}`", set.display());
        for file in cases {
            let (backend, set) = (backend.clone(), set.clone());
            let stem = file.file_stem().unwrap_or_default().to_string_lossy();
            trials.push(Trial::test(format!("{prefix}{stem}::{name}"), move || {
                run(backend(), &set, &file, tolerance).map_err(Failed::from)
            }));
        }
    }
    trials
}

/// Runs one case and compares everything in its dump.
fn run<B: Backend + 'static>(
    backend: B,
    set: &Path,
    file: &Path,
    tolerance: Tolerance,
) -> Result<(), String> {
    let case = Case::read(set, file)?;
    let checkpoint = Checkpoint::assemble(set, case.model())?;
    let model = Arc::new(Model::open(checkpoint.path()).map_err(|e| e.to_string())?);
    run_and_compare(backend, set, file, tolerance, &model)
}

/// Runs a case of the repository's set on a model with the same weights, stored in any way.
pub fn run_case<B: Backend + 'static>(
    backend: B,
    case: &str,
    tolerance: Tolerance,
    model: &Arc<Model>,
) -> Result<(), String> {
    let set = testdata();
    let file = set.join("reference").join(format!("{case}.json"));
    run_and_compare(backend, &set, &file, tolerance, model)
}

fn run_and_compare<B: Backend + 'static>(
    backend: B,
    set: &Path,
    file: &Path,
    tolerance: Tolerance,
    model: &Arc<Model>,
) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let case = Case::read(set, file)?;
    let dump_file = file.with_extension("safetensors");
    let dump = WeightSource::open(&dump_file).map_err(|e| text(&e))?;
    let prompts = WeightSource::open(set.join("reference/prompts.safetensors")).map_err(|e| text(&e))?;
    let scratch = tempfile::tempdir().map_err(|e| text(&e))?;
    let embeddings = case.embeddings(&dump_file, &prompts, scratch.path())?;
    let request = case.request(set, embeddings)?;
    let plan = |request: &Request| Plan::new(model, request, &LocalFiles).map_err(|e| text(&e));
    let other = plan(&Request { seed: vec![1], ..request.clone() })?;
    let plan = plan(&request)?;
    case.check_plan(&plan)?;

    let options = LoadOptions { dtype: tolerance.dtype, loras: plan.loras.clone(), ..LoadOptions::default() };
    let pipeline = Pipeline::load(backend, model, &options, &mut ()).map_err(|e| text(&e))?;
    let mut recorder = Recorder::new(pipeline.backend(), tolerance.transformer_tensors);
    let images = pipeline.generate(&plan, &mut recorder).map_err(|e| text(&e))?;

    let mut compared = compare::tensors(&recorder, &dump, &tolerance)?;
    compared += compare::texts(&recorder, &prompts, &case, &tolerance)?;
    if compared < 4 {
        return Err(format!("only {compared} tensors of the dump were compared"));
    }
    let batched = generate_batched(&pipeline, &plan, &other)?;
    for outputs in [&images, &batched] {
        if outputs.len() != plan.images {
            return Err(format!("{} images generated, expected {}", outputs.len(), plan.images));
        }
    }
    for generated in images.iter().chain(&batched) {
        let expected = case.image(file, generated.index);
        compare::image(&generated.image, &expected, &tolerance)?;
    }
    Ok(())
}

/// Generates the plan's images in one batch with those of a plan that differs in its noise.
fn generate_batched<B: Backend>(
    pipeline: &Pipeline<B>,
    plan: &Plan,
    other: &Plan,
) -> Result<Vec<PipelineOutput>, String> {
    let mut images = Vec::new();
    let mut results = Vec::new();
    let mut keep = |image: PendingOutput<B>| {
        images.push(image.finish(pipeline.backend(), plan)?);
        Ok(())
    };
    let members = &mut [
        BatchMember { plan, observer: &mut (), output: &mut keep },
        BatchMember { plan: other, observer: &mut (), output: &mut |_| Ok(()) },
    ];
    let all = BatchLimit { images: usize::MAX, rows: Some(usize::MAX), memory: None };
    pipeline.run(members, &all, &mut |_, result| results.push(result));
    if results.len() != 2 {
        return Err(format!("{} of 2 requests ended", results.len()));
    }
    results.into_iter().collect::<Result<Vec<()>, _>>().map_err(|e| e.to_string())?;
    Ok(images)
}
