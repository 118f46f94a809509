//! What a worker can run, and which jobs it leaves to others.

use super::replica::Replica;
use crate::jobs::Jobs;
use crate::jobs::generator::name;
use crate::jobs::job::Job;

/// What this worker can run.
#[derive(Clone, Debug, Default)]
pub(super) struct Capabilities {
    /// Models, each with its hash.
    pub(super) models: Vec<(String, Option<String>)>,
    pub(super) loras: Vec<String>,
    pub(super) vaes: Vec<String>,
}

impl Capabilities {
    /// Returns what a worker can run; the withdrawn models, each with the reason, are left out.
    pub(super) fn new(jobs: &Jobs, withdrawn: &[(String, String)]) -> Capabilities {
        let models = jobs.catalogue.models().into_iter().map(|model| model.name);
        let models = models.filter(|model| withdrawn.iter().all(|(name, _)| name != model));
        Capabilities {
            models: models.map(|name| (name.clone(), jobs.catalogue.model_hash(&name))).collect(),
            loras: jobs.catalogue.loras(),
            vaes: jobs.catalogue.vaes(),
        }
    }

    /// Whether the worker of this id may run a job: it has what the job names, and the job did not fail there.
    pub(super) fn may_run(&self, job: &Job, id: &str, replica: &Replica) -> bool {
        let Some((_, own_hash)) = self.models.iter().find(|(name, _)| *name == job.fleet.model) else {
            return false;
        };
        let mut loras = job.request.loras.iter().map(|lora| name(&lora.path));
        let mut vaes = job.request.vae.iter().map(|vae| name(&vae.path));
        if !loras.all(|lora| self.loras.iter().any(|own| own == lora))
            || !vaes.all(|vae| self.vaes.iter().any(|own| own == vae))
        {
            return false;
        }
        let others = replica.nodes();
        let others = others.iter().filter(|node| node.worker && !node.draining && node.id != id);
        let mut others = others.filter_map(|node| {
            let model = node.models.iter().find(|model| model.info.name == job.fleet.model)?;
            Some((node, model))
        });
        // Other weights under the same name: the job is left to workers with those that the gateway meant.
        if job.fleet.hash.is_some() && job.fleet.hash != *own_hash {
            return !others.any(|(_, model)| model.hash == job.fleet.hash);
        }
        // A worker that it failed on tries it again only if no other worker can.
        let failed_on = |id: &str| job.fleet.failed_on.iter().any(|failed| failed == id);
        !failed_on(id) || !others.any(|(node, _)| !failed_on(&node.id))
    }
}
