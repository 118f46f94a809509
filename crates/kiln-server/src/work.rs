//! The work of a job: how much it is, and which other jobs can share it.

use kiln_engine::Request;

use crate::fair_queue::QueuedJob;
use crate::generator::name;
use crate::jobs::Jobs;
use crate::live::LiveJob;

/// An initial image is shrunk to this many pixels, unless the request gives a size.
const MAX_INIT_PIXELS: u64 = 1 << 20;

impl Jobs {
    pub(crate) fn queued_job(&self, live: &LiveJob) -> QueuedJob {
        QueuedJob {
            id: live.id.clone(),
            client: live.client.clone(),
            priority: live.priority,
            group_key: group_key(&live.request),
            batch_key: self.batch_key(live),
            images: image_count(&live.request),
            cost: live.cost,
            ordered: false,
            place: u64::MAX,
        }
    }

    /// [`batch_key`] of a job; `None` for one that must run alone.
    pub(crate) fn batch_key(&self, live: &LiveJob) -> Option<String> {
        (!live.run_alone).then(|| batch_key(&live.request))
    }

    /// Estimated work: pixels times steps, in millions.
    pub(crate) fn cost(&self, request: &Request) -> f64 {
        let models = self.catalogue.models();
        let named = request.model.as_deref().map(name);
        let model = models.iter().find(|m| named.map_or(m.default, |named| *named == m.name));
        let (size, steps) = model.map_or((1024, 4), |m| (m.size, m.steps));
        let init = request.init.as_ref().filter(|_| request.width.or(request.height).is_none());
        let init = init.and_then(|init| self.input_pixels(name(&init.path), "init").ok());
        let pixels = match (request.upscale, init) {
            (Some(scale), Some(init)) => init as f64 * f64::from(scale).powi(2),
            (None, Some(init)) => init.min(MAX_INIT_PIXELS) as f64,
            (_, None) => f64::from(request.width.unwrap_or(size)) * f64::from(request.height.unwrap_or(size)),
        };
        let steps = request.steps.unwrap_or(match request.sigmas.len() {
            0 => steps,
            levels => levels as u32,
        });
        let work = pixels * f64::from(steps) * f64::from(image_count(request));
        // Every step processes the references, too.
        (work * (1.0 + request.images().count() as f64) / 1e6).max(1e-3)
    }

    /// Estimates how long this much work takes, from recent jobs.
    pub(crate) fn estimate_seconds(&self, cost: f64) -> u64 {
        const GUESS: f64 = 2.0;
        let seconds = self.metrics.recent_seconds_per_cost().map_or(GUESS, |each| each * cost);
        seconds.ceil().clamp(1.0, 3600.0) as u64
    }
}

/// Equal for two jobs that can run one after the other without loading anything.
pub(crate) fn group_key(request: &Request) -> String {
    let loras: Vec<_> = request.loras.iter().map(|lora| (&lora.path, lora.weight)).collect();
    let size = (request.width, request.height, request.references.len(), request.init.is_some());
    format!("{:?}", (&request.model, loras, request.dora_rule, &request.vae, size))
}

/// Equal for two jobs that can be generated in one batch, as far as the request tells; the generator checks again.
pub(crate) fn batch_key(request: &Request) -> String {
    let levels = (&request.sigmas, request.schedule, request.rho);
    let sampling = (request.steps, request.guidance, levels, request.cache);
    let start = (request.mask.is_some(), request.strength, request.max_tokens, &request.text_layers);
    format!("{} {sampling:?} {start:?}", group_key(request))
}

/// The number of images a request asks for.
pub(crate) fn image_count(request: &Request) -> u32 {
    u32::try_from(request.image_count()).unwrap_or(u32::MAX)
}
