//! Kiln against diffusers: every case of the golden set, on any backend.
//!
//! A set is a folder with `tiny/` (checkpoints whose shared parts are stored once) and `reference/` (for every case a
//! JSON file with its parameters, a safetensors file with the intermediates diffusers had, and its images). A small
//! set is part of the repository; a larger one is run as well where `KILN_GOLDEN` names it.
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
mod recorder;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::pipeline::{Generated, LoadOptions, Member, Pipeline, Unfinished};
use kiln_engine::{BatchLimit, LocalFiles, Model, Plan, Request};
use kiln_ops::Backend;
use kiln_tensor::DType;
use kiln_weights::WeightSource;
use libtest_mimic::{Failed, Trial};

use case::Case;
pub use checkpoint::Checkpoint;
pub use inputs::MadeUpInputs;
use recorder::Recorder;

/// How far a backend may be from diffusers in f32.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// What the model computes in.
    pub dtype: DType,
    /// Relative L2 distance of every compared tensor.
    pub relative: f64,
    /// Largest difference of any latent.
    pub absolute: f64,
    /// Largest difference of an image's 8-bit values.
    pub levels: u8,
    /// Whether tensors inside the transformer's calls are compared, too: a call that is looked into can't be replayed.
    pub inside: bool,
}

impl Tolerance {
    /// diffusers in f32 is itself 1e-6 from f64 on these models; an f32 engine that sums in another order, as much.
    pub const F32: Tolerance =
        Tolerance { dtype: DType::F32, relative: 1e-5, absolute: 1e-4, levels: 1, inside: true };

    /// diffusers in bf16 is itself 9e-2 from f64 on these random models, which amplify every rounding.
    pub const BF16: Tolerance =
        Tolerance { dtype: DType::BF16, relative: 0.15, absolute: 2.0, levels: 96, inside: true };
}

/// The golden set in this repository; `KILN_TESTDATA` says where it is for a test that was built elsewhere.
pub fn in_tree() -> PathBuf {
    match std::env::var_os("KILN_TESTDATA") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata"),
    }
}

/// The sets to run: the repository's, and the one `KILN_GOLDEN` names.
pub fn sets() -> Vec<PathBuf> {
    std::iter::once(in_tree()).chain(std::env::var_os("KILN_GOLDEN").map(PathBuf::from)).collect()
}

/// One trial for every case of every set, named `case::backend`.
pub fn trials<B: Backend + 'static>(
    name: &str,
    backend: impl Fn() -> B + Send + Sync + 'static,
    tolerance: Tolerance,
) -> Vec<Trial> {
    let backend = Arc::new(backend);
    let mut trials = Vec::new();
    for (i, set) in sets().into_iter().enumerate() {
        let cases = case::list(&set);
        assert!(!cases.is_empty(), "no golden cases in `{}`", set.display());
        for file in cases {
            let (backend, set) = (backend.clone(), set.clone());
            let stem = file.file_stem().unwrap_or_default().to_string_lossy();
            let full = if i == 0 { "" } else { "full/" };
            trials.push(Trial::test(format!("{full}{stem}::{name}"), move || {
                run(backend(), &set, &file, tolerance).map_err(Failed::from)
            }));
        }
    }
    trials
}

/// Runs one case and compares everything its dump holds.
fn run<B: Backend>(backend: B, set: &Path, file: &Path, tolerance: Tolerance) -> Result<(), String> {
    let case = Case::read(set, file)?;
    let checkpoint = Checkpoint::assemble(set, case.model())?;
    let model = Arc::new(Model::open(checkpoint.path()).map_err(|e| e.to_string())?);
    compare_with(backend, set, file, tolerance, &model)
}

/// Runs the repository's case of this name on a model of the same weights, however it is stored.
pub fn run_case<B: Backend>(
    backend: B,
    case: &str,
    tolerance: Tolerance,
    model: &Arc<Model>,
) -> Result<(), String> {
    let set = in_tree();
    let file = set.join("reference").join(format!("{case}.json"));
    compare_with(backend, &set, &file, tolerance, model)
}

fn compare_with<B: Backend>(
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
    let request = case.request(set, &dump_file)?;
    let plan = |request: &Request| Plan::new(model, request, &LocalFiles).map_err(|e| text(&e));
    let other = plan(&Request { seed: vec![1], ..request.clone() })?;
    let plan = plan(&request)?;
    case.check_plan(&plan)?;

    let options = LoadOptions { dtype: tolerance.dtype, loras: plan.loras.clone(), ..LoadOptions::default() };
    let pipeline = Pipeline::load(backend, model, &options, &mut ()).map_err(|e| text(&e))?;
    let mut recorder = Recorder::new(pipeline.backend(), tolerance.inside);
    let images = pipeline.generate(&plan, &mut recorder).map_err(|e| text(&e))?;

    let mut compared = compare::tensors(&recorder, &dump, &tolerance)?;
    compared += compare::texts(&recorder, &prompts, &case.prompt_names(), &tolerance)?;
    if compared < 4 {
        return Err(format!("only {compared} tensors of the dump were compared"));
    }
    let beside = beside_another(&pipeline, &plan, &other)?;
    for made in [&images, &beside] {
        if made.len() != plan.images {
            return Err(format!("{} images were made, expected {}", made.len(), plan.images));
        }
    }
    for generated in images.iter().chain(&beside) {
        let expected = case.image(file, generated.index);
        compare::image(&generated.picture, &expected, &tolerance)?;
    }
    Ok(())
}

/// The plan's images, made at once with those of a plan that differs in its noise.
fn beside_another<B: Backend>(
    pipeline: &Pipeline<B>,
    plan: &Plan,
    other: &Plan,
) -> Result<Vec<Generated>, String> {
    let mut images = Vec::new();
    let mut ends = Vec::new();
    let mut keep = |image: Unfinished<B>| {
        images.push(image.finish(pipeline.backend(), plan)?);
        Ok(())
    };
    let members = &mut [
        Member { plan, observer: &mut (), done: &mut keep },
        Member { plan: other, observer: &mut (), done: &mut |_| Ok(()) },
    ];
    let all = BatchLimit { images: usize::MAX, rows: Some(usize::MAX), memory: None };
    pipeline.run(members, &all, &mut |_, end| ends.push(end));
    if ends.len() != 2 {
        return Err(format!("{} of 2 requests ended", ends.len()));
    }
    ends.into_iter().collect::<Result<Vec<()>, _>>().map_err(|e| e.to_string())?;
    Ok(images)
}
