//! A device that image jobs and a training use in turns: one backend, and the frozen weights of a model only once.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use kiln_nn::transformer::Transformer;
use kiln_ops::Backend;
use kiln_tensor::DType;
use kiln_weights::LinearPrecision;

use crate::backend::{AnyBackend, DeviceInfo, TrainingVisitor};
use crate::error::Result;
use crate::model::Model;

/// A backend for several users, and perhaps a transformer on it. Clones share both.
#[derive(Clone)]
pub struct SharedDevice {
    pub(crate) backend: AnyBackend,
    transformer: Option<SharedTransformer>,
}

/// A transformer without LoRAs.
#[derive(Clone)]
struct SharedTransformer {
    fingerprint: String,
    precision: LinearPrecision,
    /// A `Transformer<B>` of the backend's type.
    transformer: Arc<dyn Any + Send + Sync>,
}

impl SharedDevice {
    pub(crate) fn new(backend: AnyBackend) -> SharedDevice {
        SharedDevice { backend, transformer: None }
    }

    /// The device of this backend.
    pub fn of<B>(backend: &B, device: &DeviceInfo<B>) -> SharedDevice {
        SharedDevice::new((device.hooks.any)(backend))
    }

    /// Trains on it.
    pub fn accept_training<V: TrainingVisitor>(&self, visitor: V) -> V::Output {
        self.backend.clone().accept_training(visitor)
    }

    /// Adds the model's transformer in this precision, whose weights must all be on the device.
    pub fn with_transformer<B: Backend + 'static>(
        self,
        b: &B,
        model: &Model,
        precision: LinearPrecision,
        transformer: &Transformer<B>,
    ) -> Result<SharedDevice> {
        let vars = model.transformer.weights()?.root().with_precision(precision);
        let frozen = SharedTransformer {
            fingerprint: model.transformer.fingerprint()?.to_owned(),
            precision,
            transformer: Arc::new(transformer.share(b, &vars, transformer.dtype())?),
        };
        Ok(SharedDevice { transformer: Some(frozen), ..self })
    }

    /// Whether it has the transformer of this model in this precision.
    pub fn has_transformer(&self, model: &Model, precision: LinearPrecision) -> bool {
        self.find(model, precision).is_some()
    }

    /// The transformer of this model in this precision, if it is here, with activations of `dtype`: another one on the same
    /// weights. `b` is the device's backend.
    pub fn transformer<B: Backend + 'static>(
        &self,
        b: &B,
        model: &Model,
        precision: LinearPrecision,
        dtype: DType,
    ) -> Result<Option<Transformer<B>>> {
        let transformer = self.find(model, precision);
        let Some(shared) = transformer.and_then(|found| found.transformer.downcast_ref::<Transformer<B>>())
        else {
            return Ok(None);
        };
        let vars = model.transformer.weights()?.root().with_precision(precision);
        Ok(Some(shared.share(b, &vars, dtype)?))
    }

    fn find(&self, model: &Model, precision: LinearPrecision) -> Option<&SharedTransformer> {
        let transformer = self.transformer.as_ref()?;
        // The number of threads that quantize does not change the result.
        let without_threads = |precision| match precision {
            LinearPrecision::Int8 { .. } => LinearPrecision::Int8 { threads: 0 },
            precision => precision,
        };
        let same = without_threads(transformer.precision) == without_threads(precision)
            && model.transformer.fingerprint().ok() == Some(&transformer.fingerprint);
        same.then_some(transformer)
    }

    /// The device, as `--device` takes it.
    pub fn name(&self) -> String {
        self.backend.device()
    }

    /// Available GPU memory in bytes; `None` on the CPU.
    pub fn vram(&self) -> Option<u64> {
        self.backend.vram()
    }
}

impl fmt::Debug for SharedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedDevice({})", self.name())
    }
}
