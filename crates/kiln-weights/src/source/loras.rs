//! The LoRAs laid over a source.

use std::sync::Arc;

use kiln_tensor::{DType, Delta};

use super::WeightSource;
use crate::lora::{Applied, Base, Layer, Lora, LoraBase, LoraReport, Merged};
use crate::placed::Slab;
use crate::{Error, Result};

impl WeightSource {
    /// Lays a LoRA over the weights, with the user's factor. Several may be added; their updates sum up. Add them
    /// before loading: what was loaded earlier doesn't change.
    pub fn add_lora(&mut self, lora: Lora, weight: f32) {
        self.loras.push(Applied::new(lora, weight));
    }

    /// Takes these LoRAs instead of all that were there.
    pub fn set_loras(&mut self, loras: impl IntoIterator<Item = (Lora, f32)>) {
        self.loras = loras.into_iter().map(|(lora, weight)| Applied::new(lora, weight)).collect();
    }

    /// Whether LoRAs may have modules and keys that nothing takes.
    pub fn set_lora_partial(&mut self, partial: bool) {
        self.lora_partial = partial;
    }

    /// The type of what has to be made for LoRAs that are more than two thin matrices: f32, which is exact, or bf16, which
    /// takes half the memory.
    pub fn set_merged(&mut self, dtype: DType) {
        self.merged = dtype;
    }

    /// The updates of all LoRAs for these linear layers, stacked by rows, as far as they can be added to the output.
    pub(crate) fn deltas(&self, stack: &[(String, usize)], cols: usize) -> Result<Vec<Delta>> {
        let layers = || stack.iter().map(|(name, rows)| Layer { name, rows: *rows, cols });
        let mut deltas = Vec::new();
        for lora in &self.loras {
            deltas.extend(lora.deltas(layers(), &|layer| self.base(layer), self.merged)?);
        }
        Ok(deltas)
    }

    /// Whether a LoRA changes the weight of this layer itself.
    pub(crate) fn merges(&self, module: &str, rows: usize, cols: usize) -> Result<bool> {
        let layer = Layer { name: module, rows, cols };
        for lora in &self.loras {
            if lora.is_merged(layer)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What LoRAs change of the weight of a linear layer itself, and the type of its values then; `None` without such.
    pub(crate) fn merged(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<(Arc<Merged>, DType)>> {
        let layer = Layer { name: module, rows, cols };
        let mut merged = Merged::default();
        for lora in &self.loras {
            lora.merge(layer, &|layer| self.base(layer), &mut merged)?;
        }
        if merged.is_empty() {
            return Ok(None);
        }
        // A weight that is stored as f32 stays so exact.
        let exact = self.entry(&format!("{module}.weight")).is_some_and(|(stored, _)| stored == DType::F32);
        Ok(Some((Arc::new(merged), if exact { DType::F32 } else { self.merged })))
    }

    /// The weight of a layer as it is without LoRAs.
    fn base(&self, layer: Layer<'_>) -> Result<Base> {
        let name = format!("{}.weight", layer.name);
        let slabs = self.slabs(&name, [layer.rows, layer.cols].into())?;
        let packed = slabs.into_iter().map(Slab::into_packed).collect::<kiln_tensor::Result<_>>();
        let unusable = |source| Error::Tensor { file: self.path.clone(), tensor: name, source };
        packed.map(Base).map_err(unusable)
    }

    /// Refuses LoRAs that were made for another model, as far as that can be seen before loading.
    pub fn check_loras(&self) -> Result<()> {
        let dim = self.entry("x_embedder.weight").and_then(|(_, shape)| shape.dims().first().copied());
        let model = dim.map(LoraBase::of_dim);
        self.loras.iter().try_for_each(|lora| lora.check(model, self.lora_partial))
    }

    /// To be called after loading: how many of its modules each LoRA brought in. A LoRA with modules that nothing
    /// took is an error that names them, unless [`WeightSource::set_lora_partial`] allows it and some were taken.
    pub fn finish_loras(&self) -> Result<Vec<LoraReport>> {
        self.check_loras()?;
        self.loras.iter().map(|l| l.finish(&self.path, self.lora_partial)).collect()
    }
}
