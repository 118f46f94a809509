//! Paints orders: each goes the way of `kiln generate`, with the model kept loaded between them.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;

use kiln_cpu::CpuBackend;
use kiln_model::{Error, Generated, Member, ModelFolder, Pipeline, Resolved, TextCache, Together};
use kiln_ops::Backend;
use kiln_server::{Painted, Painter, Part, Phase, Progress, Trouble, Watch, Work};
use kiln_weights::LinearForm;

use super::catalogue::Models;
use super::observe::Follow;
use super::preview::Previews;
use crate::args::{GenerateArgs, ServeArgs};
use crate::backend::Chosen;
use crate::failure::{Failure, Kind};
use crate::job::Job;
use crate::models::Found;
use crate::order::{Order, Precision};
use crate::recipe::{Recipe, Replay};
use crate::values::LoraArg;
use crate::{backend, cache, generate, machine};

/// The one who paints, and the model in use.
pub struct Studio {
    args: ServeArgs,
    models: Arc<Models>,
    texts: Option<TextCache>,
    loaded: Option<Loaded>,
}

/// A model that is ready.
struct Loaded {
    found: Found,
    loras: Vec<LoraArg>,
    folder: ModelFolder,
    precision: Precision,
    form: LinearForm,
    machine: Machine,
}

enum Machine {
    Cpu(Box<Easel<CpuBackend>>),
    #[cfg(feature = "cuda")]
    Cuda(Box<Easel<kiln_cuda::CudaBackend>>),
}

/// A pipeline and what shows how it gets on.
struct Easel<B: Backend> {
    pipeline: Pipeline<B>,
    previews: Previews<B>,
}

impl Studio {
    pub fn new(args: ServeArgs, models: Arc<Models>, data: &Path) -> Studio {
        // Requests with the same words share their encoding, wherever it is kept.
        let texts = match args.no_cache {
            true => None,
            false => cache::texts().or_else(|| Some(TextCache::new(data.join("texts")))),
        };
        Studio { args, models, texts, loaded: None }
    }

    /// The order as `kiln generate` would get it.
    fn args(&self, work: &Work<'_>) -> Result<GenerateArgs, Trouble> {
        let order = work.order;
        let lora = |l: &kiln_server::LoraOrder| {
            let gone =
                || Trouble::order("lora_not_found", format!("the LoRA `{}` is no longer there", l.name));
            Ok(LoraArg { path: self.models.lora(&l.name).ok_or_else(gone)?, weight: l.weight })
        };
        let side = |side: Option<u32>| side.map(|side| side as usize);
        Ok(GenerateArgs {
            prompts: vec![order.prompt.clone()],
            negative: order.negative_prompt.clone(),
            batch: Some(order.pictures() as usize),
            seed: order.seed.into_iter().collect(),
            width: side(order.width),
            height: side(order.height),
            steps: side(order.steps),
            guidance: order.guidance,
            loras: order.loras.iter().map(lora).collect::<Result<_, _>>()?,
            references: work.references.clone(),
            init: work.init.clone(),
            mask: work.mask.clone(),
            strength: order.strength,
            mask_padding: order.mask_padding,
            vae: self.args.vae.clone(),
            machine: self.args.machine.clone(),
            ..GenerateArgs::default()
        })
    }

    fn find(&self, name: Option<&str>) -> Result<Found, Trouble> {
        let gone = || Trouble::order("model_not_found", "the model is no longer there");
        self.models.find(name).ok_or_else(gone)
    }

    /// Loads what an order needs, unless it is what is loaded.
    fn load(&mut self, found: &Found, order: &mut Order, watch: &mut dyn Watch) -> Result<(), Failure> {
        if let Some(loaded) = self.loaded.as_mut().filter(|loaded| loaded.found == *found) {
            order.precision = loaded.precision;
            return loaded.set_loras(&order.loras, watch);
        }
        // First, so that two models are never in memory.
        self.loaded = None;
        watch.progress(Progress { phase: Phase::Load, ..Progress::default() });
        let folder = generate::open_model(found, order)?;
        let weights = backend::weight_bytes(&folder);
        let (backend, why) = Chosen::for_model(&self.args.machine, order.device, weights)?;
        if let Some(why) = why {
            watch.note(&why);
        }
        let form = generate::settle(order, &folder, &backend);
        let mut options = kiln_model::Options {
            dtype: order.precision.dtype(),
            vae: order.vae.clone(),
            memory_limit: backend.memory_limit(),
            text_cache: self.texts.clone(),
            ..kiln_model::Options::default()
        };
        generate::set_form(&mut options, form, &folder, &backend)?;
        // Looked at anew for each order.
        options.memory_limit = None;
        // Orders differ: there is room for one of the usual size with two references.
        let (side, others) = (folder.default_size, folder.default_tokens() + 2 * generate::REFERENCE_TOKENS);
        let need = kiln_model::MemoryNeed::new(&folder, [side; 2], others, options.dtype);
        options.placement = backend::place(&backend, &folder, form, &need)?;
        if let Some(placement) = options.placement {
            watch.note(&placement.to_string());
        }
        let preview = self.args.preview_vae.as_deref();
        let machine = match backend {
            Chosen::Cpu(backend) => {
                Machine::Cpu(Box::new(Easel::load(backend, &folder, &options, preview, watch)?))
            }
            #[cfg(feature = "cuda")]
            Chosen::Cuda(backend) => {
                Machine::Cuda(Box::new(Easel::load(*backend, &folder, &options, preview, watch)?))
            }
        };
        let (found, loras, precision) = (found.clone(), Vec::new(), order.precision);
        let loaded = self.loaded.insert(Loaded { found, loras, folder, precision, form, machine });
        loaded.set_loras(&order.loras, watch)
    }
}

impl Studio {
    /// Loads what an order needs, and reads its files.
    fn prepare(&mut self, work: &Work<'_>, watch: &mut dyn Watch) -> Result<Task, Trouble> {
        let found = self.find(work.order.model.as_deref())?;
        let mut order = Order::new(&self.args(work)?, Replay::default()).map_err(|f| refusal(&f))?;
        let before = order.loras.clone();
        self.load(&found, &mut order, watch).map_err(|failure| match (&self.loaded, failure.kind) {
            // The model is there: what does not fit is a LoRA.
            (Some(loaded), Kind::Failed) if loaded.loras != before => {
                Trouble::order("lora_unfit", failure.message)
            }
            _ => trouble(failure, "model_failed"),
        })?;
        let Some(Loaded { folder, form, machine, .. }) = &self.loaded else {
            return Err(Trouble::server("model_failed", "no model is loaded"));
        };
        let memory = self.together(machine).memory;
        let mut job = Job::read(&order, folder, memory, self.texts.clone()).map_err(|f| refusal(&f))?;
        job.options.form = *form;
        let resolved = generate::resolve(&job, folder).map_err(|f| refusal(&f))?;
        Ok(Task { order, job, resolved, model: found.recorded() })
    }

    /// How many pictures may be painted at once, with the memory that is free now.
    fn together(&self, machine: &Machine) -> Together {
        let memory = match machine {
            Machine::Cpu(_) => machine::memory_limit(),
            #[cfg(feature = "cuda")]
            Machine::Cuda(easel) => easel.pipeline.backend().memory_free().ok().map(|bytes| bytes as u64),
        };
        Together { most: self.args.max_batch as usize, rows: None, memory }
    }
}

impl Loaded {
    /// Lays these LoRAs over the model instead of those it has.
    fn set_loras(&mut self, loras: &[LoraArg], watch: &mut dyn Watch) -> Result<(), Failure> {
        if self.loras == loras {
            return Ok(());
        }
        let files: Vec<_> = loras.iter().map(|lora| (lora.path.clone(), lora.weight)).collect();
        let reports = match &mut self.machine {
            Machine::Cpu(easel) => easel.pipeline.set_loras(&files)?,
            #[cfg(feature = "cuda")]
            Machine::Cuda(easel) => easel.pipeline.set_loras(&files)?,
        };
        reports.iter().for_each(|report| watch.note(&report.to_string()));
        self.loras = loras.to_vec();
        Ok(())
    }
}

impl Painter for Studio {
    fn warm_up(&mut self) -> Result<(), Trouble> {
        let found = self.find(None)?;
        let (vae, machine) = (self.args.vae.clone(), self.args.machine.clone());
        let args = GenerateArgs { prompts: vec!["warm".into()], vae, machine, ..GenerateArgs::default() };
        let order = Order::new(&args, Replay::default());
        order
            .and_then(|mut order| self.load(&found, &mut order, &mut Nobody))
            .map_err(|f| trouble(f, "model_failed"))
    }

    fn room(&mut self, order: &kiln_server::Order) -> u32 {
        let found = self.models.find(order.model.as_deref());
        let Some(loaded) = self.loaded.as_ref().filter(|loaded| Some(&loaded.found) == found.as_ref()) else {
            // It has to be loaded first: whoever comes then may come in company.
            return 1;
        };
        let Some(rows) = rows(order, &loaded.folder) else { return 1 };
        let together = self.together(&loaded.machine);
        let room = match &loaded.machine {
            Machine::Cpu(easel) => easel.pipeline.room(rows, &together),
            #[cfg(feature = "cuda")]
            Machine::Cuda(easel) => easel.pipeline.room(rows, &together),
        };
        room as u32
    }

    fn paint(&mut self, parts: &mut [Part<'_>]) {
        // One model at a time, and the same LoRAs: the queue sees to it that they are.
        let needs = |part: &Part<'_>| (part.work.order.model.clone(), part.work.order.loras.clone());
        for parts in parts.chunk_by_mut(|one, other| needs(one) == needs(other)) {
            let mut tasks = Vec::new();
            for part in parts {
                match self.prepare(&part.work, part.watch) {
                    Ok(task) => {
                        let watch: &mut dyn Watch = part.watch;
                        tasks.push((task, watch));
                    }
                    Err(trouble) => part.watch.ended(Err(trouble)),
                }
            }
            let Some(loaded) = &self.loaded else { continue };
            let together = self.together(&loaded.machine);
            let Some(Loaded { folder, machine, .. }) = &mut self.loaded else { continue };
            match machine {
                Machine::Cpu(easel) => easel.paint(tasks, folder, &together),
                #[cfg(feature = "cuda")]
                Machine::Cuda(easel) => easel.paint(tasks, folder, &together),
            }
        }
    }

    fn reset(&mut self) {
        self.loaded = None;
    }
}

/// An order that is understood, and all that belongs to it.
struct Task {
    order: Order,
    job: Job,
    resolved: Resolved,
    model: String,
}

/// Rows of one picture of this order in the transformer; `None` where only its files tell.
fn rows(order: &kiln_server::Order, folder: &ModelFolder) -> Option<usize> {
    if order.init.is_some() && (order.mask.is_some() || order.width.is_none() || order.height.is_none()) {
        return None;
    }
    let side = |side: Option<u32>| side.map_or(folder.default_size, |side| side as usize) / 16;
    let reference = match folder.trained_sides() {
        Some(_) => (folder.default_size / 16).pow(2),
        None => generate::REFERENCE_TOKENS,
    };
    let own = side(order.width).saturating_mul(side(order.height));
    Some(own.saturating_add(folder.default_tokens() + order.references.len() * reference))
}

impl<B: Backend> Easel<B> {
    fn load(
        backend: B,
        folder: &ModelFolder,
        options: &kiln_model::Options,
        preview: Option<&Path>,
        watch: &mut dyn Watch,
    ) -> Result<Easel<B>, Failure> {
        let watch = RefCell::new(watch);
        let pipeline = Pipeline::load(backend, folder, options, &mut Follow::loading(&watch))?;
        let previews = Previews::new(&pipeline, preview, options.dtype)?;
        Ok(Easel { pipeline, previews })
    }

    /// Paints these orders, at once as far as that is faster, and tells each how it ended.
    fn paint(&mut self, tasks: Vec<(Task, &mut dyn Watch)>, folder: &ModelFolder, together: &Together) {
        let name = self.pipeline.backend().name();
        let mut begun = Vec::new();
        for (task, watch) in tasks {
            let Task { order, job, resolved, model } = &task;
            match job.recipe_base(order, folder, resolved, model.clone(), name.clone()) {
                Ok(base) => {
                    begun.push(Begun { task, base, watch: RefCell::new(watch), rejected: None.into() })
                }
                Err(failure) => watch.ended(Err(trouble(failure, "model_failed"))),
            }
        }
        let previews = RefCell::new(&mut self.previews);
        let mut follows: Vec<_> = begun
            .iter()
            .map(|b| Follow::painting(&b.watch, &previews, &self.pipeline, folder.variant, &b.task.resolved))
            .collect();
        let mut takers: Vec<_> = begun
            .iter()
            .map(|begun| {
                |done: Generated| {
                    if matches!(begun.task.job.request.task, kiln_model::Task::Generate) {
                        previews.borrow_mut().learn(&done);
                    }
                    begun.take(done)
                }
            })
            .collect();
        let mut members: Vec<Member<'_, B>> = begun
            .iter()
            .zip(&mut follows)
            .zip(&mut takers)
            .map(|((begun, observer), done)| Member { request: &begun.task.job.request, observer, done })
            .collect();
        self.pipeline.generate_together(&mut members, together, &mut |member, result| {
            let begun = &begun[member];
            let rejected = begun.rejected.take();
            begun.watch.borrow_mut().ended(rejected.map_or_else(|| result.map_err(failed), Err));
        });
    }
}

/// An order that is being painted.
struct Begun<'w> {
    task: Task,
    base: Recipe,
    watch: RefCell<&'w mut dyn Watch>,
    /// Why a finished picture was not taken.
    rejected: Cell<Option<Trouble>>,
}

impl Begun<'_> {
    /// Hands a finished picture over.
    fn take(&self, done: Generated) -> kiln_model::Result<()> {
        let job = &self.task.job;
        let painted = Painted {
            index: done.index as u32,
            picture: done.picture,
            seed: job.pictures[done.index].seed,
            recipe: job.recipe(&self.base, done.index).to_json(),
        };
        self.watch.borrow_mut().painted(painted).map_err(|trouble| {
            self.rejected.set(Some(trouble));
            Error::Cancelled
        })
    }
}

/// An order that makes no sense, or a file of it that can't be read.
fn refusal(failure: &Failure) -> Trouble {
    match failure.kind {
        Kind::Cancelled => Trouble::cancelled(),
        _ => Trouble::order("invalid_request", failure.message.clone()),
    }
}

fn trouble(failure: Failure, code: &'static str) -> Trouble {
    match failure.kind {
        Kind::Cancelled => Trouble::cancelled(),
        _ => {
            tracing::error!("{failure}");
            Trouble::server(code, failure.message)
        }
    }
}

fn failed(error: Error) -> Trouble {
    match error {
        Error::Cancelled => Trouble::cancelled(),
        Error::Request(_) | Error::Image(_) | Error::Memory { .. } => {
            Trouble::order("invalid_request", error.to_string())
        }
        Error::Ops(kiln_ops::Error::Memory { .. }) => Trouble::server("out_of_memory", error.to_string()),
        Error::NotFinite { .. } => Trouble::server("not_finite", error.to_string()),
        error => Trouble::server("painting_failed", error.to_string()),
    }
}

/// Watches a model being loaded before there is any order.
struct Nobody;

impl Watch for Nobody {
    fn cancelled(&self) -> bool {
        false
    }

    fn progress(&mut self, _: Progress) {}

    fn note(&mut self, text: &str) {
        tracing::info!("{text}");
    }

    fn wants_preview(&self) -> bool {
        false
    }

    fn preview(&mut self, _: kiln_image::Picture) {}

    fn painted(&mut self, _: Painted) -> Result<(), Trouble> {
        Ok(())
    }

    fn ended(&mut self, _: Result<(), Trouble>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_of_the_order_is_told_from_one_of_the_server() {
        use kiln_server::Blame;
        assert_eq!(failed(Error::Request("too wide".into())).blame, Blame::Order);
        assert_eq!(failed(Error::NotFinite { what: "it" }).blame, Blame::Server);
        assert_eq!(failed(Error::Cancelled).blame, Blame::Cancelled);
        assert_eq!(refusal(&Failure::usage("no")).blame, Blame::Order);
        assert_eq!(trouble(Failure::cancelled(), "model_failed").blame, Blame::Cancelled);
    }
}
