//! `kiln generate`: from the options to images on disk.

use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use kiln_base::lock;
use kiln_engine::{BatchLimit, Error, Event, GeneratedImage, LocalFiles, Plan, Precision, Recipe, Request};
use kiln_engine::{Setup, Sink, Task};
use kiln_tensor::HostTensor;

use crate::args::GenerateArgs;
use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorContext, ErrorKind};
use crate::hub::offer::OfferOptions;
use crate::models::ModelLocation;
use crate::output::{self, Output};
use crate::progress::{ProgressEvent, Reporter};
use crate::{cache, hints, hub, models, preview, settings};

/// Largest batch of images generated together where that is faster; larger batches gain nothing more.
pub const MAX_BATCH: usize = 4;
/// Largest prompt read from standard input, in bytes: far more than any model sees, and a bound for endless input.
const MAX_PROMPT: u64 = 1 << 20;

/// Runs the command. A returned error is already reported.
pub fn run(args: GenerateArgs) -> Result<(), CliError> {
    let cancel = CancelFlag::on_ctrl_c();
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
            None => error,
        };
        reporter.fail(&error);
        error
    })
}

/// A planned request with its device and the destination of its images.
struct Run {
    args: GenerateArgs,
    plan: Arc<Plan>,
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
    let recipe = args.from.as_deref().map(Recipe::read).transpose()?;
    let mut components = args.components.paths();
    let mut request = std::mem::take(&mut args.request);
    read_standard_input(&mut request)?;
    if let Some(recipe) = &recipe {
        request = recipe.request(&request)?;
        if request.model.is_none() && components.transformer.is_none() {
            request.model = Some(recipe.model.path.clone().into());
            recipe.model.overrides.fill_missing(&mut components);
        }
        args.machine.dtype.get_or_insert(Precision::from_name(&recipe.dtype));
    }
    // Last: a recipe takes precedence over the environment and the user's settings.
    let from_prompt = request.model.is_none().then(|| hub::offer::model_among(&request.prompts)).flatten();
    let is_default = request.model.is_none();
    request.model = request.model.take().or_else(models::default_model);
    args.machine.fill_missing(settings::get());
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
    if let Some(name) = from_prompt {
        reporter.note(&format!("`{name}` is taken as a prompt; choose the model with -m {name}"));
    }
    if location == ModelLocation::BuiltIn && request.model.is_none() {
        reporter.note("no model given, using the built-in Ember (choose another with -m)");
    }
    let model = Arc::new(location.open_with(&components)?);
    if let Some(remark) = model.variant_remark() {
        reporter.note(&format!("using the model as {}: {remark}", model.variant));
    }
    let plan = Plan::new(&model, &request, &LocalFiles).map_err(|error| match error {
        Error::MissingComponent { component, .. } => {
            CliError::from(error).hint(hints::missing_component(&model, component))
        }
        error => error.into(),
    })?;
    let plan = Arc::new(plan);
    let mut engine_settings = args.machine.settings();
    engine_settings.text_cache = if args.no_cache { None } else { cache::texts() };
    let setup = Setup::new(&model, &engine_settings, Some(&plan))?;
    setup.notes().iter().for_each(|note| reporter.note(note));
    let output = Output::check(args.output.as_deref(), plan.images)?;
    if let Some(path) = &args.latents_out {
        output.check_latents(path, plan.images)?;
    }
    let run = Run { args, plan, setup, output };
    run.report_start(random_seed, reporter);
    if let Some(recipe) = &recipe {
        let info = run.setup.info();
        let new_recipe = Recipe::new(&run.plan, 0, info.dtype, &info.backend)?;
        recipe.differences(&new_recipe).iter().for_each(|difference| reporter.warn(difference));
    }
    run.report_plan(reporter);
    Ok(run)
}

/// Reads a prompt of `-` from standard input. A prompt from a recipe is always literal.
fn read_standard_input(request: &mut Request) -> Result<(), CliError> {
    let mut piped = request.prompts.iter_mut().filter(|text| *text == "-");
    if let Some(text) = piped.next() {
        *text = standard_input()?;
        if piped.next().is_some() {
            return Err(CliError::usage("only one prompt can come from standard input, found `-` twice"));
        }
    }
    Ok(())
}

fn standard_input() -> Result<String, CliError> {
    let error =
        |problem: String| CliError::new(format!("can't read the prompt from standard input: {problem}"));
    let mut bytes = Vec::new();
    let mut input = std::io::stdin().lock().take(MAX_PROMPT + 1);
    input.read_to_end(&mut bytes).map_err(|e| error(e.to_string()))?;
    if bytes.len() as u64 > MAX_PROMPT {
        return Err(error(format!("it is longer than {}", crate::values::bytes(MAX_PROMPT)))
            .hint("the models see about a page of text; shorten the prompt"));
    }
    let text = String::from_utf8(bytes).map_err(|e| error(e.to_string()).hint("it must be UTF-8 text"))?;
    // Shells end the input with a newline that is not part of the prompt.
    let trimmed = text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t));
    Ok(trimmed.to_owned())
}

impl Run {
    fn report_start(&self, random_seed: bool, reporter: &mut Reporter) {
        let (plan, info) = (&self.plan, self.setup.info());
        reporter.report(&ProgressEvent::Started {
            version: env!("CARGO_PKG_VERSION"),
            model: plan.model.path.display().to_string(),
            variant: plan.model.variant.to_string(),
            device: &info.device,
            backend: &info.backend,
            dtype: info.dtype.to_owned(),
            prompts: plan.request.prompts.iter().map(String::as_str).collect(),
            seeds: (0..plan.images).map(|i| plan.image(i).seed).collect(),
            random_seed,
        });
    }

    fn report_plan(&self, reporter: &mut Reporter) {
        let plan = &self.plan;
        reporter.expect(plan.images, plan.calls_per_step);
        reporter.report(&ProgressEvent::Resolved {
            width: plan.width,
            height: plan.height,
            images: plan.images,
            steps: plan.steps,
            first_step: plan.first_step,
            sigmas: plan.schedule.sigmas(),
            guidance: plan.guidance,
        });
        // Small models produce garbage at sizes they were not trained on.
        let Some(sides) = plan.model.trained_sides() else { return };
        let (width, height) = (plan.width, plan.height);
        if !sides.contains(&width) || !sides.contains(&height) {
            let (from, to) = (sides.start(), sides.end());
            reporter.note(&format!(
                "this model was trained on sides from {from} to {to}; {width}x{height} may look bad (change it with -W and -H)"
            ));
        }
    }

    /// Loads the model, generates the images and saves them.
    fn generate(self, reporter: Reporter, cancel: CancelFlag) -> (Result<(), CliError>, Reporter) {
        let Run { args, plan, setup, output } = self;
        let state = SinkState { reporter, files: Vec::new(), latents: Vec::new(), error: None };
        let (images, sink_plan) = (plan.images, Arc::clone(&plan));
        let sink = Arc::new(FileSink { args, plan: sink_plan, output, cancel, state: Mutex::new(state) });
        let loaded = setup.load(&*sink).and_then(|engine| {
            engine.prepare(&plan, &*sink)?;
            Ok(engine)
        });
        match loaded {
            Ok(engine) => {
                sink.state().reporter.end_phase();
                let limit = BatchLimit { images: MAX_BATCH, rows: None, memory: engine.free_memory() };
                let task_sink: Arc<dyn Sink> = sink.clone();
                engine.generate(&[Task { plan, sink: task_sink }], &limit);
                engine.finish();
            }
            Err(error) => {
                let path = plan.model.path.display();
                let error = Err::<(), _>(error).with_context(|| format!("loading the model `{path}`"));
                sink.state().error = error.err();
            }
        }
        let mut state = sink.take_state();
        let result = match state.error.take() {
            None => sink.finish(&mut state),
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

/// Writes each image to its file when it is finished, and reports progress.
struct FileSink {
    args: GenerateArgs,
    plan: Arc<Plan>,
    output: Output,
    cancel: CancelFlag,
    state: Mutex<SinkState>,
}

struct SinkState {
    reporter: Reporter,
    files: Vec<String>,
    latents: Vec<HostTensor>,
    error: Option<CliError>,
}

impl FileSink {
    fn state(&self) -> MutexGuard<'_, SinkState> {
        lock(&self.state)
    }

    /// Takes the state at the end of the run.
    fn take_state(&self) -> SinkState {
        let empty =
            SinkState { reporter: Reporter::silent(), files: Vec::new(), latents: Vec::new(), error: None };
        std::mem::replace(&mut self.state(), empty)
    }

    fn save(&self, done: GeneratedImage) -> Result<(), CliError> {
        let recipe = (!self.args.no_recipe).then(|| done.recipe.to_json());
        let plan = self.plan.image(done.index);
        // Before locking the state: encoding takes a while, and the next image's steps are reported meanwhile.
        let path = self.output.write(&done.image, recipe.as_deref(), &plan, done.index)?;
        let file = path.display().to_string();
        let mut state = self.state();
        state.reporter.end_phase();
        let seconds = state.reporter.seconds();
        state.reporter.report(&ProgressEvent::Image {
            file: file.clone(),
            index: done.index,
            seed: plan.seed,
            width: done.image.width(),
            height: done.image.height(),
            seconds,
        });
        state.files.push(file);
        if self.args.latents_out.is_some() {
            state.latents.push(done.latents);
        }
        if let Some(protocol) = self.args.preview {
            let on_stdout = self.output != Output::Stdout && !self.args.json;
            preview::show(&done.image, protocol, on_stdout);
        }
        Ok(())
    }

    fn finish(&self, state: &mut SinkState) -> Result<(), CliError> {
        if let Some(path) = &self.args.latents_out {
            write_latents(path, &state.latents)
                .with_context(|| "saving the latents".into())
                .map_err(|error| error.hint("choose another path with --latents-out"))?;
            state.reporter.report(&ProgressEvent::Latents { file: path.display().to_string() });
        }
        let seeds: Vec<_> = (0..self.plan.images).map(|i| self.plan.image(i).seed).collect();
        let (images, seconds) = (state.files.len(), state.reporter.seconds());
        state.reporter.report(&ProgressEvent::Done { images, files: &state.files, seeds: &seeds, seconds });
        Ok(())
    }
}

impl Sink for FileSink {
    fn cancelled(&self) -> bool {
        self.cancel.is_set() || self.state().reporter.has_write_error()
    }

    fn event(&self, event: &Event) {
        self.state().reporter.handle(event);
    }

    fn image(&self, image: GeneratedImage) -> kiln_engine::Result<()> {
        self.save(image).map_err(|error| {
            self.state().error = Some(error);
            kiln_engine::Error::CANCELLED
        })
    }

    fn ended(&self, result: kiln_engine::Result<()>) {
        if let Err(error) = result {
            self.state().error.get_or_insert(error.into());
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
    Ok(kiln_weights::save::save(output::resolve_links(path)?, &[("latents", latents)], &Default::default())?)
}
