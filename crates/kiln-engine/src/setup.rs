//! From a model and settings to an engine: which device, what to compute in, which weights stay where.

use std::sync::Arc;

use kiln_ops::Backend;
use kiln_tensor::DType;
use kiln_weights::LinearForm;

use crate::backend::{AnyBackend, DeviceInfo, WithBackend};
use crate::engine::{About, Engine};
use crate::error::{Error, Result, While};
use crate::local::LocalEngine;
use crate::memory::{Gib, MemoryNeed};
use crate::model::{Model, VaeFile};
use crate::pipeline::LoadOptions;
use crate::placement::{Placement, WeightBytes};
use crate::plan::Plan;
use crate::settings::{Precision, Settings};
use crate::sink::Sink;

/// A device that was chosen for a model, before anything is loaded.
pub struct Setup {
    model: Arc<Model>,
    backend: AnyBackend,
    about: About,
    options: LoadOptions,
    preview_vae: Option<Arc<VaeFile>>,
    memory_limit: Option<u64>,
    notes: Vec<String>,
}

impl Setup {
    /// Chooses the device and what to compute in. With a plan, there is room for that one request, or an error; without, for
    /// requests of the usual size with two references.
    pub fn new(model: &Arc<Model>, settings: &Settings, plan: Option<&Plan>) -> Result<Setup> {
        let (backend, why) = AnyBackend::for_model(settings, model.file_bytes())?;
        let mut notes: Vec<String> = why.into_iter().collect();
        if settings.precision == Precision::Fp8 && !backend.has_fp8() {
            let what = format!("{} has no products of 8-bit floats", backend.device());
            let hint =
                "GPUs from Ada on have them: say --device cuda; on a CPU, --dtype int8 is of that size";
            return Err(Error::Device { what, hint: Some(hint.into()) });
        }
        let (precision, form) = precision(model, settings.precision, &backend);
        let dtype = precision.dtype();
        let memory_limit = memory_limit(model, plan, dtype, form, &backend)?;
        let mut placement = None;
        if let Some(vram) = backend.vram() {
            let need = match plan {
                Some(plan) => plan.memory_need(dtype),
                None => {
                    let others = model.default_tokens() + 2 * model.reference_tokens();
                    model.memory_need([model.default_size; 2], others, dtype)
                }
            };
            placement = Some(place(model.weight_bytes(form), &need, vram)?).filter(|p| !p.is_whole());
            notes.extend(placement.map(|placement| placement.to_string()));
        }
        if let Some(plan) = plan {
            plan.check_memory(dtype, memory_limit)?;
        }
        let open = |path| model.vae_file(path).while_doing(|| "opening --preview-vae".into());
        let preview_vae = settings.preview_vae.as_deref().map(open).transpose()?;
        Ok(Setup {
            model: Arc::clone(model),
            about: About { device: backend.device(), backend: backend.name(), dtype: precision.name() },
            backend,
            options: LoadOptions {
                dtype,
                form,
                vae: plan.and_then(|plan| plan.vae.clone()),
                loras: plan.map_or_else(Vec::new, |plan| plan.loras.clone()),
                lora_partial: plan.is_some_and(|plan| plan.lora_partial),
                placement,
                text_cache: settings.text_cache.clone(),
            },
            preview_vae,
            memory_limit,
            notes,
        })
    }

    /// What will compute.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// What the user should know: why a GPU is not used, which weights take turns.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What will be computed in.
    pub fn dtype(&self) -> DType {
        self.options.dtype
    }

    /// The form of the transformer's linear layers.
    pub fn form(&self) -> LinearForm {
        self.options.form
    }

    /// Bytes that a request may need beside the weights.
    pub fn memory_limit(&self) -> Option<u64> {
        self.memory_limit
    }

    /// Loads the model; `sink` hears of it and may stop it.
    pub fn load(self, sink: &dyn Sink) -> Result<Box<dyn Engine>> {
        let Setup { model, backend, about, options, preview_vae, .. } = self;
        backend.with(Load { model, about, options, preview_vae, sink })
    }
}

struct Load<'a> {
    model: Arc<Model>,
    about: About,
    options: LoadOptions,
    preview_vae: Option<Arc<VaeFile>>,
    sink: &'a dyn Sink,
}

impl WithBackend for Load<'_> {
    type Result = Result<Box<dyn Engine>>;

    fn with<B: Backend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Result<Box<dyn Engine>> {
        let Load { model, about, options, preview_vae, sink } = self;
        let path = model.path.display();
        let engine = LocalEngine::load(backend, device.watch, &model, &options, about, preview_vae, sink)
            .while_doing(|| format!("loading the model `{path}`"))?;
        Ok(Box::new(engine))
    }
}

/// What to compute in where that is left open, and the form of the linear layers.
fn precision(model: &Model, asked: Precision, backend: &AnyBackend) -> (Precision, LinearForm) {
    let threads = backend.threads();
    // Weights that can't be opened are refused when they are loaded.
    let own = model.transformer.weights();
    let own = own.map_or(LinearForm::Float, |source| source.own_form(threads, backend.has_fp8()));
    let precision = match (asked, own) {
        (Precision::Auto, LinearForm::Int8 { .. }) => Precision::Int8,
        (Precision::Auto, _) if backend.suitable_dtype(model) == DType::BF16 => Precision::Bf16,
        (Precision::Auto, _) => Precision::F32,
        (asked, _) => asked,
    };
    let form = match precision {
        Precision::Int8 => LinearForm::Int8 { threads },
        Precision::Fp8 => LinearForm::Fp8,
        Precision::Bf16 if own == LinearForm::StoredFp8 => own,
        _ => LinearForm::Float,
    };
    (precision, form)
}

/// Bytes that a request may need, without those that 8-bit weights and LoRAs take beside their files.
fn memory_limit(
    model: &Model,
    plan: Option<&Plan>,
    dtype: DType,
    form: LinearForm,
    backend: &AnyBackend,
) -> Result<Option<u64>> {
    let Some(limit) = backend.memory_limit() else { return Ok(None) };
    let rounded = matches!(form, LinearForm::Int8 { .. });
    let reserve = |limit: u64, needed: u64, what: &str, hint: &str| {
        limit.checked_sub(needed).ok_or_else(|| Error::Device {
            what: format!("{what} take {}, but only {} are free", Gib(needed), Gib(limit)),
            hint: Some(hint.into()),
        })
    };
    let (integers, hint) = match (rounded, backend.copies_integers()) {
        (false, _) => (0, ""),
        (true, true) => (
            model.transformer.weights().map_or(0, |source| source.bytes_in_integers()),
            "--dtype bf16 uses the weights straight out of their file",
        ),
        (true, false) => (
            model.transformer.weights().map_or(0, |source| source.bytes_to_round()),
            "write it once with `kiln quantize`: such a model is used straight out of its file",
        ),
    };
    let limit = reserve(limit, integers, "the transformer's weights in 8 bits", hint)?;
    let loras = plan.iter().flat_map(|plan| &plan.loras);
    let loras = loras.map(|lora| lora.lora.extra_bytes(dtype.size(), rounded)).fold(0, u64::saturating_add);
    let hint = "a plain LoRA takes next to nothing; --dtype bf16 or int8 makes the others smaller";
    reserve(limit, loras, "the layers under the LoRAs", hint).map(Some)
}

/// Which weights stay within `limit` bytes of a GPU's memory.
pub fn place(weights: WeightBytes, need: &MemoryNeed, limit: u64) -> Result<Placement> {
    Placement::new(weights, need, limit).map_err(|least| {
        // Rounded up: who says that number again must not be refused.
        let least = least.div_ceil(100 << 20) * 100;
        let what = format!("{} of the GPU's memory are too little for this image", Gib(limit));
        let hint = format!(
            "--vram-limit {least}M would do; a smaller size (-W, -H) takes less, --device cpu nothing"
        );
        Error::Device { what, hint: Some(hint) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_too_small_is_refused_with_one_that_does() {
        let weights =
            WeightBytes { text_encoder: 6 << 30, transformer: 7 << 30, largest: 170 << 20, written_out: 0 };
        let need = MemoryNeed { transformer: 500 << 20, autoencoder: 1600 << 20 };
        let Error::Device { what, hint: Some(hint) } = place(weights, &need, 1 << 30).unwrap_err() else {
            panic!("another kind of error");
        };
        assert!(what.starts_with("1.0 GiB of the GPU's memory are too little"), "{what}");
        let megabytes = hint.split_whitespace().nth(1).unwrap().trim_end_matches('M');
        let enough = megabytes.parse::<u64>().unwrap() << 20;
        assert_eq!(place(weights, &need, enough).unwrap().transformer, 0);
        assert!(place(weights, &need, enough - (100 << 20)).is_err(), "{megabytes} MB is more than it takes");
    }
}
