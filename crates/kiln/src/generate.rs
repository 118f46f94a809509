//! `kiln generate`: from the options to pictures on disk.

use std::cell::RefCell;
use std::path::Path;

use kiln_model::{Generated, MemoryNeed, ModelFolder, Options, Pipeline, Resolved, Variant};
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::LinearForm;

use crate::args::GenerateArgs;
use crate::backend::{self, Chosen};
use crate::cancel::Cancel;
use crate::failure::{Failure, Kind, While};
use crate::job::Job;
use crate::models::Found;
use crate::order::{Chance, Order, Precision, Words};
use crate::output::{self, Output};
use crate::progress::{Reporter, Shared, Told};
use crate::recipe::{OtherParts, Recipe, Replay};
use crate::{cache, hints, models, preview, values};

/// Runs the command; a failure is already told.
pub fn run(args: GenerateArgs) -> Result<(), Failure> {
    let cancel = Cancel::on_ctrl_c();
    let mut reporter = Reporter::new(&args, cancel);
    prepare_and_paint(args, &mut reporter).map_err(|failure| {
        // A reader that went away ends the run as a cancellation; the cause is the pipe.
        let failure = match reporter.take_trouble() {
            Some(error) => output::stdout_failed("events", &error),
            None => failure,
        };
        reporter.fail(&failure);
        failure
    })
}

fn prepare_and_paint(mut args: GenerateArgs, reporter: &mut Reporter) -> Result<(), Failure> {
    let random_seed = args.seed.is_empty() && args.noise.is_none() && args.from.is_none();
    let recipe = args.from.as_deref().map(Recipe::read).transpose()?;
    let replay = recipe.as_ref().map_or(Replay::default(), |recipe| recipe.fill(&mut args));
    // Last: what a picture was made with says more than what is usual.
    args.model = args.model.take().or_else(models::usual);
    if args.json && args.output.as_deref() == Some(Path::new("-")) {
        return Err(Failure::usage("--json and -o - both want standard output").hint("name a file with -o"));
    }
    let mut order = Order::new(&args, replay)?;
    let found = match (&order.model, &order.parts.transformer) {
        (None, Some(transformer)) => Found::Path(transformer.clone()),
        (asked, _) => Found::find(asked.as_deref())?,
    };
    if found == Found::BuiltIn && order.model.is_none() {
        reporter.note(
            "no model was named: painting with Ember, the small one inside the program; -m names another",
        );
    }
    let folder = open_model(&found, &order)?;
    let weights = backend::weight_bytes(&folder);
    let (backend, why) = Chosen::for_model(&args.machine, order.device, weights)?;
    if let Some(why) = why {
        reporter.note(&why);
    }
    if order.precision == Precision::Fp8 && !backend.has_fp8() {
        return Err(Failure::new(format!("{} has no products of 8-bit floats", backend.device()))
            .hint("GPUs from Ada on have them: say --device cuda; on a CPU, --dtype int8 is of that size"));
    }
    let form = settle(&mut order, &folder, &backend);
    let texts = if args.no_cache { None } else { cache::texts() };
    let mut job = Job::read(&order, &folder, backend.memory_limit(), texts)?;
    set_form(&mut job.options, form, &folder, &backend)?;
    reserve_for_loras(&mut job.options)?;
    if backend.vram().is_some() {
        let size = resolve(&job, &folder)?;
        let others = job.request.max_tokens + REFERENCE_TOKENS * job.request.references.len();
        let need = MemoryNeed::new(&folder, [size.width, size.height], others, job.options.dtype);
        job.options.placement = backend::place(&backend, &folder, form, &need)?;
        if let Some(placement) = job.options.placement {
            reporter.note(&placement.to_string());
        }
    }
    let output = Output::check(args.output.as_deref(), job.pictures.len())?;
    args.latents_out.as_deref().map_or(Ok(()), |path| output.check_latents(path, job.pictures.len()))?;
    let device = backend.device();
    let run = Run { args, order, device, found, folder, job, output, recipe, random_seed };
    match backend {
        Chosen::Cpu(backend) => run.paint(backend, reporter),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => run.paint(*backend, reporter),
    }
}

/// The most tokens that a reference takes.
pub(crate) const REFERENCE_TOKENS: usize = 4096;

/// Opens the folder, and checks for parts that this order can't do without.
pub(crate) fn open_model(found: &Found, order: &Order) -> Result<ModelFolder, Failure> {
    let folder = found.open_with(&order.parts)?;
    let missing = |part: &str, hint: String| {
        let path = folder.path.display();
        match &folder.searched[..] {
            [] => Err(Failure::new(format!("the model `{path}` has no `{part}/config.json`")).hint(hint)),
            places => {
                let part = part.replace('_', " ");
                let places: Vec<_> = places.iter().map(|p| format!("`{}`", p.display())).collect();
                Err(Failure::new(format!("there is no {part} for `{path}` in {}", places.join(", ")))
                    .hint(hint))
            }
        }
    };
    if folder.vae.is_none() && order.vae.is_none() {
        let hint = match folder.searched.is_empty() {
            true => "download that part, or name another autoencoder with --vae FILE".to_owned(),
            false => format!(
                "{}put FLUX.2's autoencoder (flux2-vae.safetensors or ae.safetensors) there, or name it with --vae FILE",
                hints::pull(&folder)
            ),
        };
        return missing("vae", hint);
    }
    if folder.text_encoder.is_none() && matches!(order.words, Words::Prompts { .. }) {
        let hint = match folder.variant {
            Variant::Dev => {
                "Kiln can't run dev's text encoder yet: give prompt embeddings with --embeds FILE".to_owned()
            }
            _ if folder.searched.is_empty() => {
                "download that part, or give prompt embeddings with --embeds FILE".to_owned()
            }
            _ => hints::text_encoder(&folder),
        };
        return missing("text_encoder", hint);
    }
    Ok(folder)
}

/// Decides what to compute in where the order leaves it open, and gives the form of the linear layers.
pub(crate) fn settle(order: &mut Order, folder: &ModelFolder, backend: &Chosen) -> LinearForm {
    let threads = backend.threads();
    // Weights that can't be opened are told of when they are loaded.
    let own = folder.transformer.weights();
    let own = own.map_or(LinearForm::Float, |source| source.own_form(threads, backend.has_fp8()));
    if order.precision == Precision::Auto {
        order.precision = match (own, backend.suitable_dtype(folder)) {
            (LinearForm::Int8 { .. }, _) => Precision::Int8,
            (_, DType::BF16) => Precision::Bf16,
            _ => Precision::F32,
        };
    }
    match order.precision {
        Precision::Int8 => LinearForm::Int8 { threads },
        Precision::Fp8 => LinearForm::Fp8,
        Precision::Bf16 if own == LinearForm::StoredFp8 => own,
        _ => LinearForm::Float,
    }
}

/// Asks for the linear layers in this form, if there is memory to make it.
pub(crate) fn set_form(
    options: &mut Options,
    form: LinearForm,
    folder: &ModelFolder,
    backend: &Chosen,
) -> Result<(), Failure> {
    options.form = form;
    let (Some(limit), true) = (options.memory_limit, matches!(form, LinearForm::Int8 { .. })) else {
        return Ok(());
    };
    let copies = backend.copies_integers();
    let needed = folder.transformer.weights().map_or(0, |source| match copies {
        true => source.bytes_in_integers(),
        false => source.bytes_to_round(),
    });
    options.memory_limit = Some(limit.checked_sub(needed).ok_or_else(|| {
        let (needed, limit) = (values::bytes(needed), values::bytes(limit));
        Failure::new(format!("the transformer in 8 bits takes {needed}, but only {limit} are free")).hint(
            match copies {
                true => "--dtype bf16 uses the weights straight out of their file",
                false => "write it once with `kiln quantize`: such a model is used straight out of its file",
            },
        )
    })?);
    Ok(())
}

/// Leaves room for what a LoKr, LoHa or DoRA needs beside its file.
fn reserve_for_loras(options: &mut Options) -> Result<(), Failure> {
    let Some(limit) = options.memory_limit else { return Ok(()) };
    let rounded = matches!(options.form, LinearForm::Int8 { .. });
    let mut needed = 0u64;
    for (path, _) in &options.loras {
        // What is wrong with it is told when its fingerprint is taken.
        let lora = kiln_weights::Lora::open(path);
        let bytes = lora.map_or(0, |lora| lora.extra_bytes(options.dtype.size(), rounded));
        needed = needed.saturating_add(bytes);
    }
    options.memory_limit = Some(limit.checked_sub(needed).ok_or_else(|| {
        let (needed, limit) = (values::bytes(needed), values::bytes(limit));
        Failure::new(format!("the layers under the LoRAs take {needed}, but only {limit} are free"))
            .hint("a plain LoRA takes next to nothing; --dtype bf16 or int8 makes the others smaller")
    })?);
    Ok(())
}

/// Fills in what the order leaves open, and refuses what can't be.
pub(crate) fn resolve(job: &Job, folder: &ModelFolder) -> Result<Resolved, Failure> {
    let (request, options) = (&job.request, &job.options);
    folder.resolve(request, options).map_err(|error| {
        let smallest = MemoryNeed::new(folder, [16, 16], request.max_tokens, options.dtype);
        match error {
            // The size asked for is not the cause.
            kiln_model::Error::Memory { limit, .. } if smallest.peak() > limit => {
                Failure { hint: Some(hints::too_wide(folder)), ..error.into() }
            }
            error => error.into(),
        }
    })
}

/// All that one run needs to know.
struct Run {
    args: GenerateArgs,
    order: Order,
    /// As `--device` takes it.
    device: String,
    found: Found,
    folder: ModelFolder,
    job: Job,
    output: Output,
    recipe: Option<Recipe>,
    random_seed: bool,
}

impl Run {
    fn paint<B: Backend>(&self, backend: B, reporter: &mut Reporter) -> Result<(), Failure> {
        let (job, folder) = (&self.job, &self.folder);
        // Before the weights are touched: a size that can't be is refused at once.
        let resolved = resolve(job, folder)?;
        job.check(&self.order, folder, &resolved)?;
        let name = backend.name();
        let mut base =
            job.recipe_base(&self.order, folder, &resolved, self.found.recorded(), name.clone())?;
        base.model.parts = OtherParts::new(&self.args);
        self.tell_start(&name, reporter);
        if let Some(recipe) = &self.recipe {
            recipe.differences(&job.recipe(&base, 0)).iter().for_each(|d| reporter.warn(d));
        }
        let two_calls = folder.variant == Variant::Base && resolved.guidance.is_some_and(|g| g > 1.0);
        reporter.expect(resolved.pictures, if two_calls { 2 } else { 1 });
        reporter.tell(&Told::Resolved {
            width: resolved.width,
            height: resolved.height,
            pictures: resolved.pictures,
            steps: resolved.steps,
            first_step: resolved.first_step,
            sigmas: resolved.schedule.sigmas(),
            guidance: resolved.guidance,
        });

        self.tell_of_size(&resolved, reporter);
        let pipeline = Pipeline::load(backend, folder, &job.options, reporter)
            .and_then(|pipeline| pipeline.prepare(&job.request, reporter).map(|()| pipeline))
            .while_doing(|| format!("loading the model `{}`", folder.path.display()))?;
        reporter.end_phase();
        let mut saved = Saved { run: self, base: &base, files: Vec::new(), latents: Vec::new() };
        self.generate(&pipeline, reporter, &mut saved)?;
        saved.finish(reporter)
    }

    /// A small model falls apart beyond the sizes it knows.
    fn tell_of_size(&self, resolved: &Resolved, reporter: &mut Reporter) {
        let Some(sides) = self.folder.trained_sides() else { return };
        let (width, height) = (resolved.width, resolved.height);
        if !sides.contains(&width) || !sides.contains(&height) {
            let (from, to) = (sides.start(), sides.end());
            reporter.note(&format!(
                "this model knows sides from {from} to {to}, and {width}x{height} may look odd: -W and -H choose"
            ));
        }
    }

    fn tell_start(&self, backend: &str, reporter: &mut Reporter) {
        let prompts = match &self.order.words {
            Words::Prompts { texts, .. } => texts.iter().map(String::as_str).collect(),
            Words::Embeds { .. } => Vec::new(),
        };
        reporter.tell(&Told::Started {
            version: env!("CARGO_PKG_VERSION"),
            model: self.folder.path.display().to_string(),
            variant: self.folder.variant.to_string(),
            device: &self.device,
            backend,
            dtype: self.order.precision.name().to_owned(),
            prompts,
            seeds: self.job.pictures.iter().map(|p| p.seed).collect(),
            random_seed: self.random_seed && matches!(self.order.chance, Chance::Seed(_)),
        });
    }

    fn generate<B: Backend>(
        &self,
        pipeline: &Pipeline<B>,
        reporter: &mut Reporter,
        saved: &mut Saved<'_>,
    ) -> Result<(), Failure> {
        let mut trouble = None;
        // Told by turns: while a picture is painted, and when it is saved.
        let reporter = RefCell::new(reporter);
        let mut watcher = Shared(&reporter);
        let result = pipeline.generate_each(&self.job.request, &mut watcher, &mut |picture| {
            saved.save(picture, &mut reporter.borrow_mut()).map_err(|failure| {
                trouble = Some(failure);
                kiln_model::Error::Cancelled
            })
        });
        match (result, trouble) {
            (_, Some(failure)) => Err(failure),
            (result, None) => result.map_err(|e| self.explain(e.into(), saved.files.len())),
        }
    }

    /// A cancelled batch says what it leaves.
    fn explain(&self, mut failure: Failure, saved: usize) -> Failure {
        if failure.kind == Kind::Cancelled && saved > 0 {
            failure.message = format!("cancelled after {saved} of {} pictures", self.job.pictures.len());
        }
        failure
    }
}

/// What is on disk so far.
struct Saved<'a> {
    run: &'a Run,
    base: &'a Recipe,
    files: Vec<String>,
    latents: Vec<HostTensor>,
}

impl Saved<'_> {
    fn save(&mut self, done: Generated, reporter: &mut Reporter) -> Result<(), Failure> {
        reporter.end_phase();
        let run = self.run;
        let plan = &run.job.pictures[done.index];
        let recipe = run.job.recipe(self.base, done.index).to_json();
        let recipe = (!run.args.no_recipe).then_some(recipe.as_str());
        let path = run.output.write(&done.picture, recipe, plan, done.index)?;
        let file = path.display().to_string();
        reporter.tell(&Told::Picture {
            file: file.clone(),
            picture: done.index,
            seed: plan.seed,
            width: done.picture.width(),
            height: done.picture.height(),
            seconds: reporter.seconds(),
        });
        self.files.push(file);
        if run.args.latents_out.is_some() {
            self.latents.push(done.latents);
        }
        if let Some(how) = run.args.preview {
            let on_stdout = run.output != Output::Stdout && !run.args.json;
            preview::show(&done.picture, how, on_stdout);
        }
        Ok(())
    }

    fn finish(self, reporter: &mut Reporter) -> Result<(), Failure> {
        if let Some(path) = &self.run.args.latents_out {
            write_latents(path, &self.latents)
                .while_doing(|| "saving the latents".into())
                .map_err(|failure| failure.hint("choose another place with --latents-out"))?;
            reporter.tell(&Told::Latents { file: path.display().to_string() });
        }
        let seeds: Vec<_> = self.run.job.pictures.iter().map(|p| p.seed).collect();
        let (pictures, seconds) = (self.files.len(), reporter.seconds());
        reporter.tell(&Told::Done { pictures, files: &self.files, seeds: &seeds, seconds });
        Ok(())
    }
}

/// `latents`, f32 `[pictures, tokens, channels]`.
fn write_latents(path: &Path, latents: &[HostTensor]) -> Result<(), Failure> {
    let bad = |e: kiln_tensor::Error| Failure::new(e.to_string());
    let mut values = Vec::new();
    let mut shape = vec![latents.len()];
    for (i, one) in latents.iter().enumerate() {
        values.extend_from_slice(&one.to_f32().map_err(bad)?);
        if i == 0 {
            shape.extend(one.shape().dims());
        }
    }
    let latents = HostTensor::from_f32(shape, values).map_err(bad)?;
    Ok(kiln_weights::save::save(output::behind_links(path)?, &[("latents", latents)], &Default::default())?)
}
