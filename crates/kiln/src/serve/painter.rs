//! Paints orders: each goes the way of `kiln generate`, with the model kept loaded between them.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use kiln_cpu::CpuBackend;
use kiln_model::{Error, Generated, ModelFolder, Pipeline, Resolved, TextCache};
use kiln_ops::Backend;
use kiln_server::{Painted, Painter, Phase, Progress, Trouble, Watch, Work};
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
use crate::recipe::Replay;
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
        generate::set_form(&mut options, form, &folder)?;
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

    fn paint(&mut self, work: &Work<'_>, watch: &mut dyn Watch) -> Result<(), Trouble> {
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
        let Some(Loaded { folder, form, machine, .. }) = &mut self.loaded else {
            return Err(Trouble::server("model_failed", "no model is loaded"));
        };
        let memory = match machine {
            Machine::Cpu(_) => machine::memory_limit(),
            #[cfg(feature = "cuda")]
            Machine::Cuda(easel) => easel.pipeline.backend().memory_free().ok().map(|bytes| bytes as u64),
        };
        let mut job = Job::read(&order, folder, memory, self.texts.clone()).map_err(|f| refusal(&f))?;
        job.options.form = *form;
        let resolved = generate::resolve(&job, folder).map_err(|f| refusal(&f))?;
        let task = Task { order: &order, job: &job, folder, resolved: &resolved, model: found.recorded() };
        match machine {
            Machine::Cpu(easel) => easel.paint(&task, watch),
            #[cfg(feature = "cuda")]
            Machine::Cuda(easel) => easel.paint(&task, watch),
        }
    }

    fn reset(&mut self) {
        self.loaded = None;
    }
}

/// An order that is understood, and all that belongs to it.
struct Task<'a> {
    order: &'a Order,
    job: &'a Job,
    folder: &'a ModelFolder,
    resolved: &'a Resolved,
    model: String,
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

    fn paint(&mut self, task: &Task<'_>, watch: &mut dyn Watch) -> Result<(), Trouble> {
        let (job, folder, resolved) = (task.job, task.folder, task.resolved);
        let base =
            job.recipe_base(task.order, folder, resolved, task.model.clone(), self.pipeline.backend().name());
        let base = base.map_err(|f| trouble(f, "model_failed"))?;
        let mut rejected = None;
        let watch = RefCell::new(watch);
        let previews = RefCell::new(&mut self.previews);
        let mut follow = Follow::painting(&watch, &previews, &self.pipeline, folder.variant, resolved);
        let result = self.pipeline.generate_each(&job.request, &mut follow, &mut |done: Generated| {
            if matches!(job.request.task, kiln_model::Task::Generate) {
                previews.borrow_mut().learn(&done);
            }
            let painted = Painted {
                index: done.index as u32,
                picture: done.picture,
                seed: job.pictures[done.index].seed,
                recipe: job.recipe(&base, done.index).to_json(),
            };
            watch.borrow_mut().painted(painted).map_err(|trouble| {
                rejected = Some(trouble);
                Error::Cancelled
            })
        });
        match (result, rejected) {
            (_, Some(trouble)) => Err(trouble),
            (Ok(()), None) => Ok(()),
            (Err(error), None) => Err(failed(error)),
        }
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
