//! How much work a job is, and how long that takes.

use kiln_engine::Request;

use crate::jobs::Jobs;
use crate::jobs::generator::name;

/// An initial image is shrunk to this many pixels, unless the request gives a size.
const MAX_INIT_PIXELS: u64 = 1 << 20;

impl Jobs {
    /// Estimated work: pixels times steps, in millions.
    pub(crate) fn cost(&self, request: &Request) -> f64 {
        let model = self.catalogue.model_of(request);
        let (size, steps) = model.map_or((1024, 4), |model| (model.size, model.steps));
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
        let work = pixels * f64::from(steps) * request.image_count() as f64;
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
