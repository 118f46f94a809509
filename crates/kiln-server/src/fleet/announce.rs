//! What each process of a fleet announces about itself, every few seconds, in `node.ID`.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::link::Link;
use crate::jobs::generator::{LoadedModel, LoraInfo, ModelInfo};
use crate::jobs::store::now;
use crate::jobs::{Jobs, WeakJobs};

/// A model of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeModel {
    /// Its name, sizes, steps and guidance.
    #[serde(flatten)]
    pub info: ModelInfo,
    /// The fingerprint of its weights.
    pub hash: Option<String>,
}

/// A gateway or worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Whether it generates.
    pub worker: bool,
    /// The version of Kiln.
    pub version: String,
    /// The models it can generate with.
    pub models: Vec<NodeModel>,
    /// Models that it has and can't generate with, each with the reason.
    #[serde(default)]
    pub unusable: Vec<(String, String)>,
    /// The loaded models, each with its device and that device's free memory.
    pub loaded: Vec<LoadedModel>,
    /// Its LoRAs.
    pub loras: Vec<LoraInfo>,
    /// Its VAEs.
    pub vaes: Vec<String>,
    /// Free memory of the machine, in bytes.
    pub free_memory: Option<u64>,
    /// Seconds per megapixel and step, over recent jobs.
    pub speed: Option<f64>,
    /// The jobs that it runs or has planned.
    pub jobs: Vec<String>,
    /// Share of the last seconds during which it generated, from 0 to 1.
    pub busy: f32,
    /// Whether it is stopping.
    pub draining: bool,
    /// When it started, in milliseconds since 1970.
    pub started: i64,
}

impl NodeRecord {
    fn new(announcer: &Announcer, jobs: &Jobs) -> NodeRecord {
        let Announcer { link, worker, started, busy, .. } = announcer;
        let (worker, started, busy) = (*worker, *started, *busy);
        let withdrawn = (announcer.withdrawn)();
        let mut models = if worker { jobs.catalogue.models() } else { Vec::new() };
        models.retain(|model| withdrawn.iter().all(|(name, _)| *name != model.name));
        let unusable = if worker { jobs.catalogue.unusable_models() } else { Vec::new() };
        let model = |info: ModelInfo| NodeModel { hash: jobs.catalogue.model_hash(&info.name), info };
        NodeRecord {
            id: link.id.clone(),
            name: link.config.name.clone(),
            worker,
            version: env!("CARGO_PKG_VERSION").into(),
            models: models.into_iter().map(model).collect(),
            unusable: withdrawn.into_iter().chain(unusable).collect(),
            loaded: jobs.loaded_models(),
            loras: if worker { jobs.catalogue.lora_details() } else { Vec::new() },
            vaes: if worker { jobs.catalogue.vaes() } else { Vec::new() },
            free_memory: free_memory(),
            speed: jobs.metrics.recent_seconds_per_cost(),
            jobs: if worker {
                jobs.active().iter().map(|live| live.id.clone()).collect()
            } else {
                Vec::new()
            },
            busy,
            draining: *jobs.closing.borrow(),
            started,
        }
    }
}

/// Memory that is still available to programs, in bytes; only on Linux.
fn free_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kb| kb * 1024)
}

/// How often a node announces itself: a few times before it counts as gone.
pub(super) fn interval(link: &Link) -> Duration {
    (link.config.ack_wait / 8).clamp(Duration::from_millis(50), Duration::from_secs(5))
}

/// Announces this process at intervals.
pub(super) struct Announcer {
    link: Arc<Link>,
    worker: bool,
    started: i64,
    busy: f32,
    /// The models that were announced.
    known: Vec<NodeModel>,
    /// The revision of the last announcement.
    revision: u64,
    /// The models to leave out, each with the reason.
    withdrawn: Box<dyn Fn() -> Vec<(String, String)> + Send>,
}

impl Announcer {
    pub(super) fn new(link: &Arc<Link>, worker: bool) -> Announcer {
        Announcer {
            link: Arc::clone(link),
            worker,
            started: now(),
            busy: 0.0,
            known: Vec::new(),
            revision: 0,
            withdrawn: Box::new(Vec::new),
        }
    }

    /// Leaves these models out, each with the reason.
    pub(super) fn leave_out(
        self,
        withdrawn: impl Fn() -> Vec<(String, String)> + Send + 'static,
    ) -> Announcer {
        Announcer { withdrawn: Box::new(withdrawn), ..self }
    }

    /// Announces this process until the server is gone, and does other work in between; blocks.
    pub(super) fn run(mut self, jobs: &WeakJobs, mut work: impl FnMut(&Jobs)) {
        let interval = interval(&self.link);
        while let Some(jobs) = jobs.upgrade() {
            self.announce(&jobs);
            work(&jobs);
            drop(jobs);
            std::thread::sleep(interval);
        }
    }

    /// Announces this process once.
    pub(super) fn announce(&mut self, jobs: &Jobs) {
        let generates = self.worker && jobs.stats().running > 0;
        self.busy = 0.8 * self.busy + 0.2 * f32::from(u8::from(generates));
        let link = &self.link;
        let record = NodeRecord::new(self, jobs);
        let models = if self.known == record.models { &[][..] } else { &record.models };
        let written = link.wait(async {
            for model in models {
                // Kept while no worker runs: a job for the model waits until one starts.
                link.put(&format!("model.{}", super::link::token(&model.info.name)), model).await?;
            }
            link.put(&format!("node.{}", link.id), &record).await
        });
        match written {
            Ok(revision) => {
                // In a new bucket the numbers start again, and the models are to be told again.
                self.known = if revision > self.revision { record.models } else { Vec::new() };
                self.revision = revision;
            }
            Err(error) => tracing::warn!(%error, "can't announce this process to the fleet"),
        }
    }
}
