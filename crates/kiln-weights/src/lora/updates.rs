//! LoRAs resolved against the layers of a model.

use std::collections::BTreeMap;
use std::sync::Arc;

use kiln_tensor::{DType, Delta};

use super::applied::Applied;
use super::{Base, Lora, LoraBase, LoraReport, Merged};
use crate::placed::Slab;
use crate::{Error, Result, WeightSource};

/// A linear layer of a model: its name and the shape of its weight, `[rows, cols]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Without `.weight`.
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// How LoRAs are resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraOptions {
    /// Whether a LoRA may have modules and keys that nothing takes, as long as something takes some.
    pub partial: bool,
    /// The type of what has to be made for LoRAs that are more than two thin matrices: f32, which is exact, or bf16, which
    /// takes half the memory.
    pub dtype: DType,
}

impl Default for LoraOptions {
    /// Nothing left out, f32.
    fn default() -> Self {
        LoraOptions { partial: false, dtype: DType::F32 }
    }
}

/// What LoRAs change in the layers of one model. [`Vars::with_loras`](crate::Vars::with_loras) lays it over the weights.
///
/// ```
/// use kiln_tensor::HostTensor;
/// use kiln_weights::{LayerShape, Lora, LoraOptions, LoraUpdates, WeightSource, save};
///
/// let dir = tempfile::tempdir()?;
/// let (model, lora) = (dir.path().join("model.safetensors"), dir.path().join("lora.safetensors"));
/// save::save(&model, &[("proj_out.weight", HostTensor::zeros([6, 4]))], &Default::default())?;
/// let matrices = [("proj_out.lora_A.weight", HostTensor::zeros([2, 4])), ("proj_out.lora_B.weight", HostTensor::zeros([6, 2]))];
/// save::save(&lora, &matrices, &Default::default())?;
///
/// let source = WeightSource::open(&model)?;
/// let layers = [LayerShape { name: "proj_out".into(), rows: 6, cols: 4 }];
/// let loras = [(Lora::open(&lora)?, 0.8)];
/// let (updates, reports) = LoraUpdates::resolve(&source, &layers, loras, LoraOptions::default())?;
/// assert_eq!(reports[0].to_string(), "lora lora.safetensors: 1 of 1 modules, rank 2, weight 0.8");
/// assert_eq!(source.root().with_loras(&updates).linear("proj_out", 6, 4)?.deltas().len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LoraUpdates {
    source: WeightSource,
    dtype: DType,
    /// Rows and columns of the model's layers, by name.
    sizes: BTreeMap<String, [usize; 2]>,
    applied: Vec<Applied>,
}

impl LoraUpdates {
    /// Finds what each LoRA, with the user's factor, changes in a model of these layers, whose weights are in `source`.
    /// Several LoRAs add up.
    ///
    /// Everything that names and shapes tell is checked here, before a weight is loaded: a LoRA made for another model,
    /// keys that are no LoRA keys, modules for which there is no layer, matrices that don't fit theirs. Nothing is computed
    /// yet, so it takes milliseconds.
    pub fn resolve<L: Into<Arc<Lora>>>(
        source: &WeightSource,
        layers: &[LayerShape],
        loras: impl IntoIterator<Item = (L, f32)>,
        options: LoraOptions,
    ) -> Result<(LoraUpdates, Vec<LoraReport>)> {
        let LoraOptions { partial, dtype } = options;
        let loras: Vec<(Arc<Lora>, f32)> = loras.into_iter().map(|(l, weight)| (l.into(), weight)).collect();
        let sizes: BTreeMap<String, [usize; 2]> =
            layers.iter().map(|layer| (layer.name.clone(), [layer.rows, layer.cols])).collect();
        let model = sizes.get("x_embedder").map(|[dim, _]| LoraBase::of_dim(*dim));
        loras.iter().try_for_each(|(lora, _)| lora.check(model, partial))?;
        let applied = loras.into_iter().map(|(lora, weight)| Applied::new(lora, weight, &sizes));
        let applied = applied.collect::<Result<Vec<_>>>()?;
        let reports = applied.iter().map(|lora| lora.report(source.path(), partial));
        let reports = reports.collect::<Result<_>>()?;
        Ok((LoraUpdates { source: source.clone(), dtype, sizes, applied }, reports))
    }

    /// The updates for these layers, stacked by rows, as far as they can be added to the output.
    pub(crate) fn deltas(&self, stack: &[LayerShape]) -> Result<Vec<Delta>> {
        stack.iter().try_for_each(|layer| self.check(layer))?;
        let mut deltas = Vec::new();
        for lora in &self.applied {
            deltas.extend(lora.deltas(stack, &|layer| self.base(layer), self.dtype)?);
        }
        Ok(deltas)
    }

    /// Whether a LoRA changes the weight of this layer itself.
    pub(crate) fn merges(&self, layer: &LayerShape) -> bool {
        self.applied.iter().any(|lora| lora.merges(layer))
    }

    /// What LoRAs change of the weight of a layer itself, and the type of its values then; `None` without such.
    pub(crate) fn merged(&self, layer: &LayerShape) -> Result<Option<(Arc<Merged>, DType)>> {
        self.check(layer)?;
        let mut merged = Merged::default();
        for lora in &self.applied {
            lora.merge(layer, &|layer| self.base(layer), &mut merged)?;
        }
        if merged.is_empty() {
            return Ok(None);
        }
        // A weight that is stored as f32 stays so exact.
        let stored = self.source.entry(&format!("{}.weight", layer.name));
        let exact = stored.is_some_and(|(stored, _)| stored == DType::F32);
        Ok(Some((Arc::new(merged), if exact { DType::F32 } else { self.dtype })))
    }

    /// Refuses a layer that has another shape than the one the LoRAs were resolved for.
    fn check(&self, layer: &LayerShape) -> Result<()> {
        let asked = [layer.rows, layer.cols];
        match self.sizes.get(&layer.name) {
            Some(size) if *size != asked => Err(Error::Shape {
                file: self.source.path().to_owned(),
                tensor: format!("{}.weight", layer.name),
                found: (*size).into(),
                expected: asked.into(),
            }),
            _ => Ok(()),
        }
    }

    /// The weight of a layer as it is without LoRAs.
    fn base(&self, layer: &LayerShape) -> Result<Base> {
        let name = format!("{}.weight", layer.name);
        let slabs = self.source.slabs(&name, [layer.rows, layer.cols].into())?;
        let packed = slabs.into_iter().map(Slab::into_packed).collect::<kiln_tensor::Result<_>>();
        let unusable = |source| Error::Tensor { file: self.source.path().to_owned(), tensor: name, source };
        packed.map(Base).map_err(unusable)
    }
}
