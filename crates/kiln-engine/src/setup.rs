//! From a model and settings to an engine: chooses the device, the precision and the weights' residency.

use std::sync::Arc;

use kiln_ops::Backend;
use kiln_tensor::DType;
use kiln_weights::LinearPrecision;

use crate::backend::{AnyBackend, BackendVisitor, DeviceInfo};
use crate::engine::{Engine, EngineInfo};
use crate::error::{Error, ErrorContext, ErrorKind, Field, Hint, Result};
use crate::hint;
use crate::local_engine::LocalEngine;
use crate::machine;
use crate::memory::{HumanBytes, MemoryEstimate};
use crate::model::{Model, VaeFile};
use crate::pipeline::LoadOptions;
use crate::plan::Plan;
use crate::residency::{WeightResidency, plan_residency};
use crate::settings::{Precision, Settings};
use crate::shared_device::SharedDevice;
use crate::sink::Sink;

/// The device and options chosen for a model, before anything is loaded.
pub struct Setup {
    model: Arc<Model>,
    backend: AnyBackend,
    info: EngineInfo,
    options: LoadOptions,
    preview_vae: Option<Arc<VaeFile>>,
    memory_limit: Option<u64>,
    notes: Vec<String>,
}

impl Setup {
    /// Chooses the device and the precision, with enough memory for `plan`; without a plan, for images of the default
    /// size with two references.
    pub fn new(model: &Arc<Model>, settings: &Settings, plan: Option<&Plan>) -> Result<Setup> {
        let fits = |vram| fits_gpu(model, settings.precision, plan, vram);
        let (backend, note) = AnyBackend::for_model(settings, fits)?;
        Setup::on(model, settings, plan, backend, note, None)
    }

    /// [`Setup::new`] without a plan, on a device that a training uses, too.
    pub(crate) fn shared(model: &Arc<Model>, settings: &Settings, device: &SharedDevice) -> Result<Setup> {
        Setup::on(model, settings, None, device.backend.clone(), None, Some(device))
    }

    fn on(
        model: &Arc<Model>,
        settings: &Settings,
        plan: Option<&Plan>,
        backend: AnyBackend,
        note: Option<String>,
        shared: Option<&SharedDevice>,
    ) -> Result<Setup> {
        let mut notes: Vec<String> = note.into_iter().chain(model.unused_tensor_notes()).collect();
        if settings.precision == Precision::Fp8 && !backend.has_fp8() {
            let what = format!("{} has no fp8 matmuls", backend.device());
            return Err(Error::refused(ErrorKind::Device, what).with_hint(hint![
                "use ", Field::Device.to("cuda"), " with an Ada GPU or a newer one, which have them";
                "use ", Field::Dtype.to("int8"), ", which takes as little memory"
            ]));
        }
        let (precision, linear_precision) = choose_precision(model, settings.precision, &backend);
        let dtype = precision.dtype();
        let memory_limit = memory_limit(model, plan, dtype, linear_precision, &backend)?;
        if backend.vram().is_none() {
            let free = backend.memory_limit().zip(model.transformer.weights().ok());
            notes.extend(free.and_then(|(free, weights)| {
                let step = estimate(model, plan, dtype).transformer;
                paging_note(weights.bytes(), weights.int8_bytes_to_quantize(), step, free)
            }));
            notes.extend(machine::slow_cpu().filter(|_| settings.isa.is_none()));
        }
        let mut residency = None;
        if let Some(vram) = backend.vram() {
            let estimate = estimate(model, plan, dtype);
            let mut weights = model.weight_bytes(linear_precision);
            if shared.is_some_and(|device| device.has_transformer(model, linear_precision)) {
                weights.transformer = 0;
            }
            let planned = plan_residency(weights, &estimate, vram)?;
            residency = Some(planned).filter(|residency| !residency.is_full());
            notes.extend(residency.map(|residency| residency.to_string()));
        }
        if let Some(plan) = plan {
            plan.check_memory(dtype, memory_limit)?;
        }
        let open = |path| model.vae_file(path).with_context(|| "opening the previews' VAE".into());
        let preview_vae = settings.preview_vae.as_deref().map(open).transpose()?;
        Ok(Setup {
            model: Arc::clone(model),
            info: EngineInfo { device: backend.device(), backend: backend.name(), dtype: precision.name() },
            backend,
            options: LoadOptions {
                dtype,
                linear_precision,
                vae: plan.and_then(|plan| plan.vae.clone()),
                loras: plan.map_or_else(Vec::new, |plan| plan.loras.clone()),
                lora_partial: plan.is_some_and(|plan| plan.lora_partial),
                residency,
                text_cache: settings.text_cache.clone(),
                shared: shared.cloned(),
            },
            preview_vae,
            memory_limit,
            notes,
        })
    }

    /// Returns the device and precision.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Returns notes for the user: why a GPU is not used, which weights are streamed.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the dtype of activations.
    pub fn dtype(&self) -> DType {
        self.options.dtype
    }

    /// Returns the precision of the transformer's linear layers.
    pub fn linear_precision(&self) -> LinearPrecision {
        self.options.linear_precision
    }

    /// Returns the bytes available for activations.
    pub fn memory_limit(&self) -> Option<u64> {
        self.memory_limit
    }

    /// Loads the model. `sink` gets progress events and can cancel.
    pub fn load(self, sink: &dyn Sink) -> Result<Box<dyn Engine>> {
        let Setup { model, backend, info, options, preview_vae, .. } = self;
        backend.accept(EngineLoader { model, info, options, preview_vae, sink })
    }
}

struct EngineLoader<'a> {
    model: Arc<Model>,
    info: EngineInfo,
    options: LoadOptions,
    preview_vae: Option<Arc<VaeFile>>,
    sink: &'a dyn Sink,
}

impl BackendVisitor for EngineLoader<'_> {
    type Output = Result<Box<dyn Engine>>;

    fn visit<B: Backend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Result<Box<dyn Engine>> {
        let EngineLoader { model, info, options, preview_vae, sink } = self;
        let path = model.path.display();
        let engine = LocalEngine::load(backend, device.hooks, &model, &options, info, preview_vae, sink)
            .with_context(|| format!("loading the model `{path}`"))?;
        Ok(Box::new(engine))
    }
}

/// Resolves `auto`, and chooses the precision of the transformer's linear layers.
pub(crate) fn choose_precision(
    model: &Model,
    requested: Precision,
    backend: &AnyBackend,
) -> (Precision, LinearPrecision) {
    let threads = backend.threads();
    // Weights that can't be opened are reported when they are loaded.
    let stored = model.transformer.weights();
    let stored = stored.map_or(LinearPrecision::Float, |source| {
        source.preferred_precision(threads, backend.has_fp8(), backend.has_nvfp4())
    });
    let precision = match (requested, stored) {
        (Precision::Auto, LinearPrecision::Int8 { .. }) => Precision::Int8,
        (Precision::Auto, _) if backend.default_dtype(model.transformer.weights().ok()) == DType::BF16 => {
            Precision::Bf16
        }
        (Precision::Auto, _) => Precision::F32,
        (requested, _) => requested,
    };
    let linear_precision = match precision {
        Precision::Int8 => LinearPrecision::Int8 { threads },
        Precision::Fp8 => LinearPrecision::Fp8,
        Precision::Bf16 if matches!(stored, LinearPrecision::Stored { .. }) => stored,
        _ => LinearPrecision::Float,
    };
    (precision, linear_precision)
}

/// Estimates the memory of the plan's images; without a plan, of those of the default size with two references.
pub(crate) fn estimate(model: &Model, plan: Option<&Plan>, dtype: DType) -> MemoryEstimate {
    match plan {
        Some(plan) => plan.memory_estimate(dtype),
        None => {
            let other_tokens = model.default_tokens() + 2 * model.reference_tokens();
            model.memory_estimate([model.default_size; 2], other_tokens, dtype)
        }
    }
}

/// Checks that a model runs on a GPU with this much free memory: what does not fit must fit into host memory. The error
/// says why not.
fn fits_gpu(model: &Model, precision: Precision, plan: Option<&Plan>, vram: u64) -> Result<(), String> {
    let linear = if precision == Precision::Fp8 { LinearPrecision::Fp8 } else { LinearPrecision::Float };
    let dtype = if precision == Precision::F32 { DType::F32 } else { DType::BF16 };
    let planned = WeightResidency::new(model.weight_bytes(linear), &estimate(model, plan, dtype), vram);
    let planned = planned.map_err(|smallest| {
        format!("it has {} free, this model needs {}", HumanBytes(vram), HumanBytes(smallest))
    })?;
    match machine::memory_limit() {
        Some(free) if planned.streamed() > free => Err(format!(
            "{} of weights don't fit beside its {}, and only {} of the machine's memory are free",
            HumanBytes(planned.streamed()),
            HumanBytes(vram),
            HumanBytes(free)
        )),
        _ => Ok(()),
    }
}

/// Returns a note if memory can't hold the transformer's weights, which stay in their mapped file, beside the activations of
/// a `step`. `quantizable` is what the layers that are not quantized yet take in int8.
fn paging_note(weights: u64, quantizable: u64, step: u64, free: u64) -> Option<String> {
    if weights.saturating_add(step) <= free {
        return None;
    }
    let advice = match quantizable {
        0 => "a smaller model is faster".to_owned(),
        int8 => format!(
            "its layers take {} in int8 (`kiln quantize`), and a smaller model takes less",
            HumanBytes(int8)
        ),
    };
    Some(format!(
        "the transformer takes {} and a step {}, but only {} of memory are free: every step reads weights from the disk, \
         which is slow; {advice}",
        HumanBytes(weights),
        HumanBytes(step),
        HumanBytes(free)
    ))
}

/// Returns the bytes available for activations: what remains after int8 weights and LoRAs that are copied into memory.
fn memory_limit(
    model: &Model,
    plan: Option<&Plan>,
    dtype: DType,
    linear_precision: LinearPrecision,
    backend: &AnyBackend,
) -> Result<Option<u64>> {
    let Some(limit) = backend.memory_limit() else { return Ok(None) };
    let int8 = matches!(linear_precision, LinearPrecision::Int8 { .. });
    let reserve = |limit: u64, needed: u64, what: &str, hint: Hint| {
        limit.checked_sub(needed).ok_or_else(|| {
            let what = format!("{what} take {}, but only {} are free", HumanBytes(needed), HumanBytes(limit));
            Error::refused(ErrorKind::TooLarge, what).with_hint(hint)
        })
    };
    let (int8_bytes, hint) = match (int8, backend.copies_int8()) {
        (false, _) => (0, hint![""]),
        (true, true) => (
            model.transformer.weights().map_or(0, |source| source.int8_bytes()),
            hint![Field::Dtype.to("bf16"), " uses the weights directly from their file"],
        ),
        (true, false) => (
            model.transformer.weights().map_or(0, |source| source.int8_bytes_to_quantize()),
            hint!["run `kiln quantize` once: a quantized model is used directly from its file"],
        ),
    };
    let limit = reserve(limit, int8_bytes, "the transformer's int8 weights", hint)?;
    let loras = plan.iter().flat_map(|plan| &plan.loras);
    let loras = loras.map(|lora| lora.lora.extra_bytes(dtype.size(), int8)).fold(0, u64::saturating_add);
    let hint = hint![
        "use plain LoRAs, which take almost no memory";
        "use ", Field::Dtype.to("bf16"), " or int8, with which the others take less"
    ];
    reserve(limit, loras, "the layers under the LoRAs", hint).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_of_4_gb_is_told_before_it_reads_weights_from_the_disk() {
        const MIB: u64 = 1 << 20;
        let note =
            |weights, quantizable, free| paging_note(weights * MIB, quantizable * MIB, 600 * MIB, free * MIB);
        assert_eq!(
            note(7392, 3620, 3072).unwrap(),
            "the transformer takes 7.2 GiB and a step 0.6 GiB, but only 3.0 GiB of memory are free: every step reads \
             weights from the disk, which is slow; its layers take 3.5 GiB in int8 (`kiln quantize`), and a smaller model \
             takes less"
        );
        assert!(note(3700, 0, 3072).unwrap().ends_with("which is slow; a smaller model is faster"));
        assert_eq!(note(2400, 0, 3072), None);
        // The weights alone would fit.
        assert!(note(2500, 0, 3072).is_some());
    }
}
