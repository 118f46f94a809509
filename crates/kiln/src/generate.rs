//! `kiln generate`: from the options to images on disk.

mod prompts;
mod size;
mod upscale;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use kiln_base::lock;
use kiln_catalog::{ModelLocation, user_cache};
use kiln_engine::{
    BatchLimit, Embedded, Engine, Error, Event, GeneratedImage, LocalFiles, Model, Plan, Precision, Recipe,
};
use kiln_engine::{Request, Settings, Setup, Sink, Task};
use kiln_filters::{ImageCheck, Refusal};
use kiln_image::{Format, RgbImage};
use kiln_tensor::{DType, HostTensor};

use crate::args::{GenerateArgs, UpscaleArgs};
use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorContext, ErrorKind};
use crate::hub::offer::OfferOptions;
use crate::output::{self, ImageName, Output, SaveOptions};
use crate::preview::Screen;
use crate::progress::{ProgressEvent, Reporter};
use crate::upsample::Upsampling;
use crate::{hub, models, settings};
use prompts::PromptFile;
use size::SizeOptions;

/// More steps than anyone needs: probably a seed.
const MANY_STEPS: u32 = 200;

/// Runs the command. A returned error is already reported.
pub fn run(args: GenerateArgs) -> Result<(), CliError> {
    let cancel = CancelFlag::install();
    let mut reporter = Reporter::new(&args);
    let prepared = prepare(args, &mut reporter, &cancel);
    let (result, mut reporter) = match prepared {
        Ok(run) => run.generate(reporter, cancel),
        Err(error) => (Err(error), reporter),
    };
    result.map_err(|error| {
        // A failed write of events cancels the run; report the cause instead.
        let error = match reporter.take_write_error() {
            Some(error) => output::stdout_error("events", &error),
            None => error.or_general_hint(),
        };
        reporter.fail(&error);
        error
    })
}

/// Runs `kiln upscale`. A returned error is already reported.
pub fn run_upscale(args: UpscaleArgs) -> Result<(), CliError> {
    run(upscale::generate_args(args))
}

/// Planned requests with their device and the destination of their images.
struct Run {
    args: GenerateArgs,
    /// The check that images must pass before they are written.
    check: Option<ImageCheck>,
    /// What files say of how their images were generated.
    embedded: Embedded,
    /// A plan for each request: one, or one for each line of a file.
    plans: Vec<Arc<Plan>>,
    setup: Setup,
    output: Output,
}

/// Plans the request and chooses the device, before any weights are read.
fn prepare(mut args: GenerateArgs, reporter: &mut Reporter, cancel: &CancelFlag) -> Result<Run, CliError> {
    if args.json && args.output.as_deref() == Some(Path::new("-")) {
        return Err(
            CliError::usage("--json and -o - both write to standard output").hint("give a file with -o")
        );
    }
    let check = args.check.check()?;
    let embedded = Embedded {
        recipe: !args.no_recipe,
        ai_mark: !args.no_ai_mark,
        aigc_label: None,
        credentials: args.sign.credentials()?,
        watermark: args.watermark.payload(),
    };
    if check.is_some() && args.preview.take().is_some() {
        reporter.note("--preview has no effect: images are not shown before the check");
    }
    let recipe = args.from.as_deref().map(Recipe::read).transpose()?;
    let mut components = args.components.paths();
    let mut request = std::mem::take(&mut args.request);
    if request.model.is_none() && components.transformer.is_none() && recipe.is_none() {
        let has_more_prompts = !args.more_prompts.is_empty() || args.prompt_file.is_some();
        let note = hub::offer::take_model(&mut request, has_more_prompts)?;
        note.iter().for_each(|note| reporter.note(note));
    }
    request.prompts.append(&mut args.more_prompts);
    prompts::read_standard_input(&mut request)?;
    let mut file = args.prompt_file.as_deref().map(PromptFile::read).transpose()?.unwrap_or_default();
    if file.has_options() && !request.prompts.is_empty() {
        return Err(CliError::usage("a file of prompts with options can't be combined with other prompts")
            .hint("put all prompts into the file"));
    }
    request.prompts.append(&mut file.prompts);
    // A recipe's prompt is literal.
    let has_own_prompts = !request.prompts.is_empty() || file.has_options();
    let size = SizeOptions::take(args.size, args.aspect, &mut request)?;
    if let Some(steps) = request.steps.filter(|steps| *steps > MANY_STEPS) {
        reporter.note(&format!("{steps} steps are many: -s is the number of steps, -S the seed"));
    }
    if let Some(recipe) = &recipe {
        request = recipe.request(&request)?;
        if request.model.is_none() && components.transformer.is_none() {
            request.model = Some(recipe.model.path.clone().into());
            recipe.model.overrides.fill_missing(&mut components);
        }
        args.machine.dtype.get_or_insert(Precision::from_name(&recipe.dtype));
    }
    upscale::fill_from_recipe(&mut request, &mut components);
    // Last: a recipe takes precedence over the environment and the user's settings.
    let is_default = request.model.is_none();
    request.model = request.model.take().or_else(models::default_model);
    args.machine.fill_missing(settings::get());
    if recipe.is_none() {
        request.cache = request.cache.or(settings::get().cache);
    }
    let random_seed = request.ensure_seed().map_err(|e| CliError::new(e).hint("choose a seed with -S"))?;
    let location = match (&request.model, &components.transformer) {
        (None, Some(transformer)) => ModelLocation::Path(transformer.clone()),
        (model, _) => {
            let options = OfferOptions { yes: args.yes, quiet: args.quiet || args.json };
            let location = hub::offer::resolve(model.as_deref(), options, cancel);
            if is_default && model.is_some() {
                location.with_context(|| format!("using the default model, {}", models::default_source()))?
            } else {
                location?
            }
        }
    };
    if location == ModelLocation::BuiltIn && request.model.is_none() {
        reporter.note("no model given, using the built-in Ember (choose another with -m)");
    }
    let model = Arc::new(location.open_with(&components)?);
    if let Some(remark) = model.variant_remark() {
        reporter.note(&format!("using the model as {}: {remark}; set it with --variant", model.variant));
    }
    size.apply(&mut request, &model);
    let mut requests = file.requests(request)?;
    if has_own_prompts {
        for request in &mut requests {
            let unknown = kiln_engine::wildcards::expand(request, args.wildcards.as_deref())?;
            if let Some(name) = unknown {
                reporter.note(&format!(
                    "`__{name}__` stays as it is: name the folder of `{name}.txt` with --wildcards"
                ));
            }
        }
    }
    let mut engine_settings = args.machine.settings()?;
    let mut plans = plan_requests(&model, &requests)?;
    let images = plans.iter().map(|plan| plan.images).sum();
    // Before what takes long.
    let output = Output::check(args.output.as_deref(), images)?;
    for plan in &plans {
        plan.check_encoding(output.encoding(plan.request.output_compression))?;
    }
    let with_images = requests.iter().any(|request| !request.references.is_empty());
    if let Some(temperature) = args.upsample.temperature() {
        let upsampling = Upsampling::new(&args.upsample.source, &model, with_images)?;
        rewrite_prompts(&upsampling, &mut requests, temperature, &engine_settings, reporter, cancel)?;
        plans = plan_requests(&model, &requests)?;
    }
    engine_settings.text_cache = if args.no_cache { None } else { user_cache::texts()? };
    let largest = plans.iter().max_by_key(|plan| plan.memory_estimate(DType::F32).peak());
    let setup = Setup::new(&model, &engine_settings, largest.map(|plan| &**plan))?;
    setup.notes().iter().for_each(|note| reporter.note(note));
    let has_quality = plans.iter().any(|plan| plan.request.output_compression.is_some());
    if has_quality && output.format() == Format::Png {
        reporter.note("--quality has no effect: PNG files are lossless");
    }
    if args.no_ai_mark {
        reporter.note("the file won't say that a model made the image (see docs/provenance.md)");
    }
    if let Some(payload) = embedded.watermark {
        reporter.note(&format!("images get the invisible watermark {payload}, which changes pixels"));
    }
    if let Some(credentials) = &embedded.credentials {
        reporter.note(&format!("files are signed as {}", credentials.signer.name()));
    }
    for file in plans.iter().flat_map(|plan| plan.request.images()) {
        let bytes = kiln_engine::read_image_bytes(&file.path).unwrap_or_default();
        let note = embedded.input_note(&file.path.display().to_string(), &bytes);
        note.iter().for_each(|note| reporter.note(note));
    }
    if let Some(path) = &args.latents_out {
        output.check_latents(path, images)?;
        check_same_size(&plans)?;
    }
    let run = Run { args, check, embedded, plans, setup, output };
    run.report_start(random_seed, reporter);
    if let (Some(recipe), Some(plan)) = (&recipe, run.plans.first()) {
        let info = run.setup.info();
        let new_recipe = Recipe::new(plan, 0, info.dtype, &info.backend)?;
        recipe.differences(&new_recipe).iter().for_each(|difference| reporter.warn(difference));
    }
    run.plans.iter().take(1).for_each(|plan| report_plan(plan, reporter));
    Ok(run)
}

/// Rewrites the prompts of all requests, and shows them.
fn rewrite_prompts(
    upsampling: &Upsampling,
    requests: &mut [Request],
    temperature: f32,
    settings: &Settings,
    reporter: &mut Reporter,
    cancel: &CancelFlag,
) -> Result<(), CliError> {
    upsampling.rewrite(requests, temperature, &LocalFiles, settings, &mut || !cancel.is_set())?;
    let prompts = requests.iter().flat_map(|request| &request.prompts);
    prompts.for_each(|prompt| reporter.note(&format!("the prompt is now: {prompt}")));
    Ok(())
}

fn plan_requests(model: &Arc<Model>, requests: &[Request]) -> Result<Vec<Arc<Plan>>, CliError> {
    let plan = |request| Ok::<_, CliError>(Arc::new(Plan::new(model, request, &LocalFiles)?));
    let plans = requests.iter().enumerate().map(|(i, request)| match requests.len() {
        1 => plan(request),
        count => plan(request).with_context(|| format!("planning prompt {} of {count}", i + 1)),
    });
    plans.collect()
}

/// Refuses latents of several sizes: they go into one tensor.
fn check_same_size(plans: &[Arc<Plan>]) -> Result<(), CliError> {
    let sizes = |plan: &Arc<Plan>| (plan.width, plan.height);
    if plans.iter().any(|plan| sizes(plan) != sizes(&plans[0])) {
        return Err(CliError::usage("--latents-out needs images of one size")
            .hint("leave out width and height in the file of prompts"));
    }
    Ok(())
}

/// Reports the resolved values of a plan.
fn report_plan(plan: &Plan, reporter: &mut Reporter) {
    reporter.expect(plan.images, plan.calls_per_step);
    let [output_width, output_height] = plan.output_size();
    if let Some(inputs) = plan.upscale() {
        let (tiles, width, height) = (inputs.tiles.count(), plan.width, plan.height);
        reporter.note(&format!(
            "upscaling to {output_width}x{output_height} in {tiles} tiles of {width}x{height}"
        ));
    }
    reporter.report(&ProgressEvent::Resolved {
        width: plan.width,
        height: plan.height,
        images: plan.images,
        steps: plan.steps,
        first_step: plan.first_step,
        sigmas: plan.schedule.sigmas(),
        guidance: plan.guidance,
        cache: plan.cache,
    });
}

/// Returns the seeds of all images.
fn seeds(plans: &[Arc<Plan>]) -> Vec<Option<u64>> {
    plans.iter().flat_map(|plan| (0..plan.images).map(|i| plan.image(i).seed)).collect()
}

impl Run {
    fn report_start(&self, random_seed: bool, reporter: &mut Reporter) {
        let (info, Some(first)) = (self.setup.info(), self.plans.first()) else { return };
        let prompts = self.plans.iter().flat_map(|plan| &plan.request.prompts);
        reporter.report(&ProgressEvent::Started {
            version: env!("CARGO_PKG_VERSION"),
            model: first.model.path.display().to_string(),
            variant: first.model.variant.to_string(),
            device: &info.device,
            backend: &info.backend,
            dtype: info.dtype.to_owned(),
            prompts: prompts.map(String::as_str).collect(),
            seeds: seeds(&self.plans),
            random_seed,
        });
    }

    /// Loads the model, generates the images and saves them.
    fn generate(self, reporter: Reporter, cancel: CancelFlag) -> (Result<(), CliError>, Reporter) {
        let Run { args, check, embedded, plans, setup, output } = self;
        cancel.poll();
        let stdout_taken = output == Output::Stdout || args.json;
        let screen = args.preview.and_then(|protocol| Screen::open(protocol, stdout_taken));
        let state = Mutex::new(SinkState { screen, ..SinkState::new(reporter) });
        let shared = Arc::new(Shared { args, check, embedded, output, cancel, state });
        let images: usize = plans.iter().map(|plan| plan.images).sum();
        let mut engine = None;
        let mut first = 0;
        let mut setup = Some(setup);
        for (i, plan) in plans.iter().enumerate() {
            let sink = Arc::new(FileSink { shared: Arc::clone(&shared), plan: Arc::clone(plan), first });
            first += plan.images;
            if i > 0 {
                report_plan(plan, &mut shared.state().reporter);
            }
            if let Err(error) = run_plan(&mut engine, &mut setup, plan, &sink) {
                let path = plan.model.path.display();
                let error = Err::<(), _>(error).with_context(|| format!("loading the model `{path}`"));
                shared.state().error = error.err();
            }
            if shared.state().error.is_some() {
                break;
            }
        }
        drop(engine);
        let mut state = shared.take_state();
        let result = match state.error.take() {
            None if !state.refused.is_empty() => Err(refused(&state.refused, images)),
            None => shared.finish(&mut state, &seeds(&plans)),
            Some(mut error) => {
                if error.kind == ErrorKind::Cancelled && !state.files.is_empty() {
                    error.message = format!("cancelled after {} of {images} images", state.files.len());
                }
                Err(error)
            }
        };
        (result, state.reporter)
    }
}

/// Generates the images of a plan; loads the model before the first one. Fails if something can't be loaded.
fn run_plan(
    engine: &mut Option<Box<dyn Engine>>,
    setup: &mut Option<Setup>,
    plan: &Arc<Plan>,
    sink: &Arc<FileSink>,
) -> kiln_engine::Result<()> {
    if let Some(setup) = setup.take() {
        *engine = Some(setup.load(&**sink)?);
    }
    let Some(engine) = engine else { return Ok(()) };
    engine.set_loras(&plan.loras, plan.lora_partial)?;
    engine.prepare(plan, &**sink)?;
    sink.shared.state().reporter.end_phase();
    let limit = BatchLimit { images: Settings::MAX_BATCH, rows: None, memory: engine.free_memory() };
    let sink: Arc<dyn Sink> = sink.clone();
    engine.generate(&[Task { plan: Arc::clone(plan), sink }], &limit);
    engine.finish();
    Ok(())
}

/// What all plans of a run share.
struct Shared {
    args: GenerateArgs,
    check: Option<ImageCheck>,
    embedded: Embedded,
    output: Output,
    cancel: CancelFlag,
    state: Mutex<SinkState>,
}

/// Writes each image of a plan to its file when it is finished, and reports progress.
struct FileSink {
    shared: Arc<Shared>,
    plan: Arc<Plan>,
    /// The number of images of the plans before.
    first: usize,
}

struct SinkState {
    reporter: Reporter,
    files: Vec<String>,
    latents: Vec<HostTensor>,
    error: Option<CliError>,
    /// Images that the check refused: each one's index and why.
    refused: Vec<(usize, String)>,
    /// The terminal that shows the images.
    screen: Option<Screen>,
}

impl SinkState {
    fn new(reporter: Reporter) -> SinkState {
        SinkState {
            reporter,
            files: Vec::new(),
            latents: Vec::new(),
            error: None,
            refused: Vec::new(),
            screen: None,
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, SinkState> {
        lock(&self.state)
    }

    /// Takes the state at the end of the run.
    fn take_state(&self) -> SinkState {
        std::mem::replace(&mut self.state(), SinkState::new(Reporter::silent()))
    }

    fn finish(&self, state: &mut SinkState, seeds: &[Option<u64>]) -> Result<(), CliError> {
        if let Some(path) = &self.args.latents_out {
            write_latents(path, &state.latents)
                .with_context(|| "saving the latents".into())
                .map_err(|error| error.hint("choose another path with --latents-out"))?;
            state.reporter.report(&ProgressEvent::Latents { file: path.display().to_string() });
        }
        let (images, seconds) = (state.files.len(), state.reporter.seconds());
        state.reporter.report(&ProgressEvent::Done { images, files: &state.files, seeds, seconds });
        Ok(())
    }
}

/// The error of a run whose images were not all accepted.
fn refused(refused: &[(usize, String)], images: usize) -> CliError {
    let message = match refused {
        [(_, why)] if images == 1 => why.clone(),
        [(index, why), ..] => {
            let count = refused.len();
            format!("{count} of {images} images were refused and not written; number {}: {why}", index + 1)
        }
        [] => "no image was refused".into(),
    };
    let error = CliError { kind: ErrorKind::Refused, ..CliError::new(message) };
    error
        .hint("the program or service of --check-with decides; try another prompt or seed, or ask it by hand")
}

impl FileSink {
    /// Asks the check whether an image may be written; without a check all may. A refused image is remembered.
    fn passes_check(&self, done: &GeneratedImage) -> Result<bool, CliError> {
        let Some(check) = &self.shared.check else { return Ok(true) };
        let prompt = self.plan.image(done.index).prompt.unwrap_or_default();
        let Err(refusal) = check.check(&done.image, &prompt, &|| self.shared.cancel.is_set()) else {
            return Ok(true);
        };
        let reason = match refusal {
            Refusal::Cancelled => return Err(CliError::cancelled()),
            // Whoever runs the command runs the check, too.
            Refusal::Failed(detail) => format!("the image was refused: {detail}"),
            refusal => refusal.message(),
        };
        let index = self.first + done.index;
        let state = &mut *self.shared.state();
        state.reporter.end_phase();
        state.reporter.report(&ProgressEvent::Refused { index, seed: done.seed, reason: &reason });
        state.refused.push((index, reason));
        Ok(false)
    }

    fn save(&self, done: GeneratedImage) -> Result<(), CliError> {
        if !self.passes_check(&done)? {
            return Ok(());
        }
        let Shared { args, output, .. } = &*self.shared;
        let quality = self.plan.request.output_compression;
        let options = SaveOptions {
            quality,
            absolute_paths: args.absolute_paths,
            embedded: self.shared.embedded.clone(),
        };
        let plan = self.plan.image(done.index);
        let name = ImageName { plan: &self.plan, image: &plan, number: self.first + done.index + 1 };
        // Before locking the state: encoding takes a while, and the next image's steps are reported meanwhile.
        let write = || output.write(&done.image, done.recipe.clone(), &name, &options);
        let written =
            if output.may_block() { self.shared.cancel.while_blocked(write) } else { Some(write()) };
        let path = written.unwrap_or_else(|| Err(CliError::cancelled()))?;
        let file = path.display().to_string();
        let mut state = self.shared.state();
        state.reporter.end_phase();
        let SinkState { reporter, screen, .. } = &mut *state;
        if let Some(screen) = screen {
            reporter.draw(|lines| screen.finish(&done.image, lines));
        }
        let seconds = state.reporter.seconds();
        state.reporter.report(&ProgressEvent::Image {
            file: file.clone(),
            index: self.first + done.index,
            seed: plan.seed,
            width: done.image.width(),
            height: done.image.height(),
            computed_steps: self.plan.cache.map(|_| done.steps.computed),
            reused_steps: self.plan.cache.map(|_| done.steps.reused),
            seconds,
        });
        state.files.push(file);
        if args.latents_out.is_some() {
            state.latents.push(done.latents);
        }
        Ok(())
    }
}

impl Sink for FileSink {
    fn cancelled(&self) -> bool {
        self.shared.cancel.is_set() || self.shared.state().reporter.has_write_error()
    }

    fn event(&self, event: &Event) {
        self.shared.state().reporter.handle(event);
    }

    fn wants_preview(&self) -> bool {
        // With `--json`, lines go to standard output between the images.
        self.shared.state().screen.is_some() && !self.shared.args.json
    }

    fn preview(&self, image: RgbImage) {
        let SinkState { reporter, screen, .. } = &mut *self.shared.state();
        if let Some(screen) = screen {
            reporter.draw(|lines| screen.preview(&image, self.plan.output_size(), lines));
        }
    }

    fn image(&self, image: GeneratedImage) -> kiln_engine::Result<()> {
        self.save(image).map_err(|error| {
            self.shared.state().error = Some(error);
            kiln_engine::Error::CANCELLED
        })
    }

    fn ended(&self, result: kiln_engine::Result<()>) {
        if let Err(error) = result {
            // Damaged weights are the most likely cause: name the tensor. A scan of all at every start would cost more.
            let is_not_finite = matches!(error.root(), Error::Model(kiln_nn::Error::NotFinite { .. }));
            let cause = if is_not_finite { self.plan.model.not_finite() } else { None };
            self.shared.state().error.get_or_insert(cause.unwrap_or(error).into());
        }
    }
}

/// Writes the latents of all images as a tensor `latents`, f32 `[images, tokens, channels]`.
fn write_latents(path: &Path, latents: &[HostTensor]) -> Result<(), CliError> {
    let tensor_error = |e: kiln_tensor::Error| CliError::new(e.to_string());
    let mut values = Vec::new();
    let mut shape = vec![latents.len()];
    for (i, one) in latents.iter().enumerate() {
        values.extend_from_slice(&one.to_f32().map_err(tensor_error)?);
        if i == 0 {
            shape.extend(one.shape().dims());
        }
    }
    let latents = HostTensor::from_f32(shape, values).map_err(tensor_error)?;
    output::create_folder(path.parent().unwrap_or(Path::new("")))?;
    let target = output::resolve_links(path)?;
    Ok(kiln_weights::save::save(target, &[("latents", latents)], &Default::default())?)
}
