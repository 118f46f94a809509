//! A session beside a training on the same device: whether both fit into its memory, and the weights that they share.
//!
//! Estimates count a text encoder as if it had yet to be loaded, and never what a session could unload: where memory is
//! scarce, one makes way for the other.

use std::sync::Arc;

use kiln_base::lock;
use kiln_weights::LinearPrecision;

use super::{Entry, Session};
use crate::device_lease::{DeviceLease, TrainingNeeds, fits};
use crate::error::Result;
use crate::plan::Plan;
use crate::setup::{choose_precision, estimate};
use crate::shared_device::SharedDevice;

impl Session {
    /// Shares the device of the loaded models with a training, and the transformer if it is the training's, too. `None` if
    /// nothing is loaded there or if both don't fit.
    pub fn share(&self, training: &TrainingNeeds<'_>) -> Result<Option<SharedDevice>> {
        let loaded = self.read();
        let mut best = None;
        for Entry { engine, .. } in
            loaded.iter().filter(|entry| entry.engine.info().device == training.device)
        {
            let device = engine.share()?;
            let found = device.has_transformer(training.model, training.precision);
            if found || best.is_none() {
                best = Some((device, found, engine));
            }
        }
        let Some((device, found, engine)) = best else { return Ok(None) };
        let weights = if found { 0 } else { training.weights };
        let models = loaded.iter().map(|entry| entry.engine.model());
        let texts: u64 = models.map(|model| model.weight_bytes(training.precision).text_encoder).sum();
        let job = estimate(engine.model(), None, engine.dtype()).peak();
        let held = weights + training.state + texts;
        let fits = fits(held, [job, training.activations], engine.free_memory(), device.vram().is_none());
        Ok(fits.then_some(device))
    }

    /// Tells that a training holds some of the device, until [`Session::end_lease`]; models are loaded beside it.
    pub fn begin_lease(&self, lease: DeviceLease) {
        *lock(&self.lease) = Some(lease);
    }

    /// Tells that no training holds any of the device.
    pub fn end_lease(&self) {
        *lock(&self.lease) = None;
    }

    /// Whether a plan runs beside a training, which can go on after it. On a CPU, where weights stay in their files, it
    /// always does.
    pub fn has_room(&self, plan: &Plan) -> bool {
        let Some(DeviceLease { device, activations }) = lock(&self.lease).clone() else { return true };
        let Some(vram) = device.vram() else { return true };
        let model = &plan.model;
        let (precision, linear) = choose_precision(model, self.settings.precision, &device.backend);
        let is_loaded = self.read().iter().any(|entry| Arc::ptr_eq(entry.engine.model(), model));
        let weights = model.weight_bytes(linear);
        let shared = is_loaded || device.has_transformer(model, linear);
        let transformer = if shared { 0 } else { weights.transformer };
        let int8 = matches!(linear, LinearPrecision::Int8 { .. });
        let dtype = precision.dtype();
        let loras = plan.loras.iter().map(|lora| lora.lora.extra_bytes(dtype.size(), int8)).sum::<u64>();
        let held = transformer + weights.text_encoder + weights.dequantized + loras;
        fits(held, [plan.memory_estimate(dtype).peak(), activations], Some(vram), false)
    }
}
