//! `kiln generate`: from the options to images on disk.

use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use kiln_base::lock;
use kiln_engine::{BatchLimit, Error, Event, Image, LocalFiles, Plan, Precision, Recipe, Request};
use kiln_engine::{Setup, Sink, Task};
use kiln_tensor::HostTensor;

use crate::args::GenerateArgs;
use crate::cancel::Cancel;
use crate::failure::{Failure, Kind, While};
use crate::models::Found;
use crate::output::{self, Output};
use crate::progress::{Report, Reporter};
use crate::{cache, hints, models, preview};

/// Images of one request that are made at once, where that is faster; more make no more of a difference.
pub const MAX_BATCH: usize = 4;
/// Bytes of standard input that are read for a prompt: far more than any model looks at, and an end to endless ones.
const MAX_PROMPT: u64 = 1 << 20;

/// Runs the command; a failure is already reported.
pub fn run(args: GenerateArgs) -> Result<(), Failure> {
    let cancel = Cancel::on_ctrl_c();
    let mut reporter = Reporter::new(&args);
    let prepared = prepare(args, &mut reporter);
    let (result, mut reporter) = match prepared {
        Ok(run) => run.generate(reporter, cancel),
        Err(failure) => (Err(failure), reporter),
    };
    result.map_err(|failure| {
        // A reader that went away ends the run as a cancellation; the cause is the pipe.
        let failure = match reporter.take_write_error() {
            Some(error) => output::stdout_failed("events", &error),
            None => failure,
        };
        reporter.fail(&failure);
        failure
    })
}

/// A request that is understood, the device that was chosen for it, and where its images go.
struct Run {
    args: GenerateArgs,
    plan: Arc<Plan>,
    setup: Setup,
    output: Output,
}

/// Understands the request and chooses the device, before any weight is touched.
fn prepare(mut args: GenerateArgs, reporter: &mut Reporter) -> Result<Run, Failure> {
    if args.json && args.output.as_deref() == Some(Path::new("-")) {
        return Err(Failure::usage("--json and -o - both want standard output").hint("name a file with -o"));
    }
    let recipe = args.from.as_deref().map(Recipe::read).transpose()?;
    let mut parts = args.parts.parts();
    let mut request = std::mem::take(&mut args.request);
    read_standard_input(&mut request)?;
    if let Some(recipe) = &recipe {
        request = recipe.request(&request)?;
        if request.model.is_none() && parts.transformer.is_none() {
            request.model = Some(recipe.model.path.clone().into());
            recipe.model.parts.fill(&mut parts);
        }
        args.machine.dtype.get_or_insert(Precision::by_name(&recipe.dtype));
    }
    // Last: what an image was made with says more than what is usual.
    request.model = request.model.take().or_else(models::usual);
    let random_seed = request.ensure_seed().map_err(|e| Failure::new(e).hint("choose a seed with -S"))?;
    let found = match (&request.model, &parts.transformer) {
        (None, Some(transformer)) => Found::Path(transformer.clone()),
        (asked, _) => Found::find(asked.as_deref())?,
    };
    if found == Found::BuiltIn && request.model.is_none() {
        reporter.note("no model given, using the built-in Ember (choose another with -m)");
    }
    let model = Arc::new(found.open_with(&parts)?);
    let plan = Plan::new(&model, &request, &LocalFiles).map_err(|error| match error {
        Error::MissingPart { part, .. } => Failure::from(error).hint(hints::missing_part(&model, part)),
        error => error.into(),
    })?;
    let plan = Arc::new(plan);
    let mut settings = args.machine.settings();
    settings.text_cache = if args.no_cache { None } else { cache::texts() };
    let setup = Setup::new(&model, &settings, Some(&plan))?;
    setup.notes().iter().for_each(|note| reporter.note(note));
    let output = Output::check(args.output.as_deref(), plan.images)?;
    if let Some(path) = &args.latents_out {
        output.check_latents(path, plan.images)?;
    }
    let run = Run { args, plan, setup, output };
    run.report_start(random_seed, reporter);
    if let Some(recipe) = &recipe {
        let about = run.setup.about();
        let again = Recipe::new(&run.plan, 0, about.dtype, &about.backend)?;
        recipe.differences(&again).iter().for_each(|difference| reporter.warn(difference));
    }
    run.report_plan(reporter);
    Ok(run)
}

/// A prompt of `-` is read from standard input. A prompt out of a recipe is meant literally, whatever it is.
fn read_standard_input(request: &mut Request) -> Result<(), Failure> {
    let mut piped = request.prompts.iter_mut().filter(|text| *text == "-");
    if let Some(text) = piped.next() {
        *text = standard_input()?;
        if piped.next().is_some() {
            return Err(Failure::usage("standard input can be one prompt only, found `-` twice"));
        }
    }
    Ok(())
}

fn standard_input() -> Result<String, Failure> {
    let unreadable = |why: String| Failure::new(format!("can't read the prompt from standard input: {why}"));
    let mut bytes = Vec::new();
    let mut input = std::io::stdin().lock().take(MAX_PROMPT + 1);
    input.read_to_end(&mut bytes).map_err(|e| unreadable(e.to_string()))?;
    if bytes.len() as u64 > MAX_PROMPT {
        return Err(unreadable(format!("it is longer than {}", crate::values::bytes(MAX_PROMPT)))
            .hint("models look at a page of text; give the words that matter"));
    }
    let text =
        String::from_utf8(bytes).map_err(|e| unreadable(e.to_string()).hint("it must be UTF-8 text"))?;
    // The end of the last line is the shell's, not the prompt's.
    let trimmed = text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t));
    Ok(trimmed.to_owned())
}

impl Run {
    fn report_start(&self, random_seed: bool, reporter: &mut Reporter) {
        let (plan, about) = (&self.plan, self.setup.about());
        reporter.report(&Report::Started {
            version: env!("CARGO_PKG_VERSION"),
            model: plan.model.path.display().to_string(),
            variant: plan.model.variant.to_string(),
            device: &about.device,
            backend: &about.backend,
            dtype: about.dtype.to_owned(),
            prompts: plan.request.prompts.iter().map(String::as_str).collect(),
            seeds: (0..plan.images).map(|i| plan.image(i).seed).collect(),
            random_seed,
        });
    }

    fn report_plan(&self, reporter: &mut Reporter) {
        let plan = &self.plan;
        reporter.expect(plan.images, plan.calls_per_step);
        reporter.report(&Report::Resolved {
            width: plan.width,
            height: plan.height,
            pictures: plan.images,
            steps: plan.steps,
            first_step: plan.first_step,
            sigmas: plan.schedule.sigmas(),
            guidance: plan.guidance,
        });
        // A small model falls apart beyond the sizes it knows.
        let Some(sides) = plan.model.trained_sides() else { return };
        let (width, height) = (plan.width, plan.height);
        if !sides.contains(&width) || !sides.contains(&height) {
            let (from, to) = (sides.start(), sides.end());
            reporter.note(&format!(
                "this model knows sides from {from} to {to}, and {width}x{height} may look odd: -W and -H choose"
            ));
        }
    }

    /// Loads the model, makes the images and saves them.
    fn generate(self, reporter: Reporter, cancel: Cancel) -> (Result<(), Failure>, Reporter) {
        let Run { args, plan, setup, output } = self;
        let state = State { reporter, files: Vec::new(), latents: Vec::new(), failure: None };
        let (images, plan_images) = (plan.images, Arc::clone(&plan));
        let saver = Arc::new(Saver { args, plan: plan_images, output, cancel, state: Mutex::new(state) });
        let loaded = setup.load(&*saver).and_then(|engine| {
            engine.prepare(&plan, &*saver)?;
            Ok(engine)
        });
        match loaded {
            Ok(engine) => {
                saver.state().reporter.end_phase();
                let limit = BatchLimit { images: MAX_BATCH, rows: None, memory: engine.free_memory() };
                let sink: Arc<dyn Sink> = saver.clone();
                engine.generate(&[Task { plan, sink }], &limit);
                engine.finish();
            }
            Err(error) => {
                let path = plan.model.path.display();
                let failure = Err::<(), _>(error).while_doing(|| format!("loading the model `{path}`"));
                saver.state().failure = failure.err();
            }
        }
        let mut state = saver.take_state();
        let result = match state.failure.take() {
            None => saver.finish(&mut state),
            Some(mut failure) => {
                if failure.kind == Kind::Cancelled && !state.files.is_empty() {
                    failure.message = format!("cancelled after {} of {images} images", state.files.len());
                }
                Err(failure)
            }
        };
        (result, state.reporter)
    }
}

/// Saves images as they come, and reports what happens.
struct Saver {
    args: GenerateArgs,
    plan: Arc<Plan>,
    output: Output,
    cancel: Cancel,
    state: Mutex<State>,
}

struct State {
    reporter: Reporter,
    files: Vec<String>,
    latents: Vec<HostTensor>,
    failure: Option<Failure>,
}

impl Saver {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// What is left when all is done.
    fn take_state(&self) -> State {
        let empty =
            State { reporter: Reporter::silent(), files: Vec::new(), latents: Vec::new(), failure: None };
        std::mem::replace(&mut self.state(), empty)
    }

    fn save(&self, done: Image) -> Result<(), Failure> {
        let recipe = (!self.args.no_recipe).then(|| done.recipe.to_json());
        let plan = self.plan.image(done.index);
        // Encoding and writing take their time: meanwhile steps of the next image are reported.
        let path = self.output.write(&done.picture, recipe.as_deref(), &plan, done.index)?;
        let file = path.display().to_string();
        let mut state = self.state();
        state.reporter.end_phase();
        let seconds = state.reporter.seconds();
        state.reporter.report(&Report::Picture {
            file: file.clone(),
            picture: done.index,
            seed: plan.seed,
            width: done.picture.width(),
            height: done.picture.height(),
            seconds,
        });
        state.files.push(file);
        if self.args.latents_out.is_some() {
            state.latents.push(done.latents);
        }
        if let Some(how) = self.args.preview {
            let on_stdout = self.output != Output::Stdout && !self.args.json;
            preview::show(&done.picture, how, on_stdout);
        }
        Ok(())
    }

    fn finish(&self, state: &mut State) -> Result<(), Failure> {
        if let Some(path) = &self.args.latents_out {
            write_latents(path, &state.latents)
                .while_doing(|| "saving the latents".into())
                .map_err(|failure| failure.hint("choose another place with --latents-out"))?;
            state.reporter.report(&Report::Latents { file: path.display().to_string() });
        }
        let seeds: Vec<_> = (0..self.plan.images).map(|i| self.plan.image(i).seed).collect();
        let (pictures, seconds) = (state.files.len(), state.reporter.seconds());
        state.reporter.report(&Report::Done { pictures, files: &state.files, seeds: &seeds, seconds });
        Ok(())
    }
}

impl Sink for Saver {
    fn cancelled(&self) -> bool {
        self.cancel.is_asked() || self.state().reporter.has_write_error()
    }

    fn event(&self, event: &Event) {
        self.state().reporter.handle(event);
    }

    fn image(&self, image: Image) -> kiln_engine::Result<()> {
        self.save(image).map_err(|failure| {
            self.state().failure = Some(failure);
            kiln_engine::Error::CANCELLED
        })
    }

    fn ended(&self, result: kiln_engine::Result<()>) {
        if let Err(error) = result {
            self.state().failure.get_or_insert(error.into());
        }
    }
}

/// `latents`, f32 `[images, tokens, channels]`.
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
