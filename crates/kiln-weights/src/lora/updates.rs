//! LoRAs resolved against the layers of a model.
//! A LoRA whose names or shapes don't fit is rejected here, in one call, before any weight is loaded.

use std::collections::BTreeMap;
use std::sync::Arc;

use kiln_tensor::packed::StackedRows;
use kiln_tensor::{DType, LoraDelta};

use super::applied::AppliedLora;
use super::{DoraRule, LayerShape, Lora, LoraBase, LoraOptions, LoraReport, WeightPatch};
use crate::source_tensor::RowBlock;
use crate::{Error, Result, WeightSource};

/// Where the rule matters and none was chosen.
const DORA_NOTE: &str = "it is a DoRA: its weight mixes the changed layers with the unchanged ones, and LoRAs add up, as \
                         `--dora-rule comfyui`; diffusers scales the update (`--dora-rule diffusers`)";

/// The updates of a model's layers by some LoRAs. [`Vars::with_loras`](crate::Vars::with_loras) applies them.
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
    rule: DoraRule,
    /// Rows and columns of the model's layers, by name.
    sizes: BTreeMap<String, [usize; 2]>,
    loras: Vec<AppliedLora>,
}

impl LoraUpdates {
    /// Matches LoRAs, each with the user's factor, with a model of these layers, whose weights are in `source`. Several
    /// LoRAs add up.
    ///
    /// Names and shapes are checked here, before any weight is loaded. Errors are a LoRA made for another model,
    /// keys that are not LoRA keys, modules without a layer, matrices that don't fit theirs. Nothing is computed
    /// yet, so this takes milliseconds.
    pub fn resolve<L: Into<Arc<Lora>>>(
        source: &WeightSource,
        layers: &[LayerShape],
        loras: impl IntoIterator<Item = (L, f32)>,
        options: LoraOptions,
    ) -> Result<(LoraUpdates, Vec<LoraReport>)> {
        let LoraOptions { partial, dtype, dora_rule } = options;
        let rule = dora_rule.unwrap_or_default();
        let loras: Vec<(Arc<Lora>, f32)> = loras.into_iter().map(|(l, weight)| (l.into(), weight)).collect();
        let sizes: BTreeMap<String, [usize; 2]> =
            layers.iter().map(|layer| (layer.name.clone(), [layer.rows, layer.cols])).collect();
        let model = sizes.get("x_embedder").map(|[dim, _]| LoraBase::Width(*dim));
        loras.iter().try_for_each(|(lora, _)| lora.check(model, partial))?;
        let several = loras.len() > 1;
        let loras = loras.into_iter().map(|(lora, weight)| AppliedLora::new(lora, weight, rule, &sizes));
        let loras = loras.collect::<Result<Vec<_>>>()?;
        let reports = loras.iter().map(|lora| {
            let mut report = lora.report(source.path(), partial)?;
            if dora_rule.is_none() && lora.depends_on_rule(several) {
                report.notes.push(DORA_NOTE.into());
            }
            Ok(report)
        });
        let reports = reports.collect::<Result<_>>()?;
        Ok((LoraUpdates { source: source.clone(), dtype, rule, sizes, loras }, reports))
    }

    /// The updates that are added to the output of these layers, whose rows are stacked.
    pub(crate) fn deltas(&self, stack: &[LayerShape]) -> Result<Vec<LoraDelta>> {
        stack.iter().try_for_each(|layer| self.check(layer))?;
        let mut deltas = Vec::new();
        for (i, lora) in self.loras.iter().enumerate() {
            let later = |layer: &LayerShape| self.later_factors(i, layer);
            deltas.extend(lora.deltas(stack, &|layer| self.base(layer), &later, self.dtype)?);
        }
        Ok(deltas)
    }

    /// The factors by which LoRAs behind number `index` multiply what it adds to the rows of a layer; `None` means 1.
    fn later_factors(&self, index: usize, layer: &LayerShape) -> Result<Option<Vec<f32>>> {
        let mut product: Option<Vec<f32>> = None;
        if self.rule == DoraRule::Diffusers {
            for lora in &self.loras[index + 1..] {
                lora.multiply_factors(layer, &|layer| self.base(layer), &mut product)?;
            }
        }
        Ok(product)
    }

    /// Whether a LoRA patches the weight of this layer itself.
    pub(crate) fn patches(&self, layer: &LayerShape) -> bool {
        self.loras.iter().any(|lora| lora.patches(layer))
    }

    /// The patch of a layer's weight, and the dtype of the patched values; `None` if no LoRA patches it.
    pub(crate) fn patch(&self, layer: &LayerShape) -> Result<Option<(Arc<WeightPatch>, DType)>> {
        self.check(layer)?;
        let mut patch = WeightPatch::default();
        for lora in &self.loras {
            lora.add_to_patch(layer, &|layer| self.base(layer), &mut patch)?;
        }
        if patch.is_empty() {
            return Ok(None);
        }
        // A weight that is stored as f32 keeps that precision.
        let stored = self.source.entry(&format!("{}.weight", layer.name));
        let exact = stored.is_some_and(|(stored, _)| stored == DType::F32);
        Ok(Some((Arc::new(patch), if exact { DType::F32 } else { self.dtype })))
    }

    /// Rejects a layer whose shape is not the one the LoRAs were resolved for.
    fn check(&self, layer: &LayerShape) -> Result<()> {
        let expected = [layer.rows, layer.cols];
        match self.sizes.get(&layer.name) {
            Some(size) if *size != expected => Err(Error::Shape {
                file: self.source.path().to_owned(),
                tensor: format!("{}.weight", layer.name),
                found: (*size).into(),
                expected: expected.into(),
            }),
            _ => Ok(()),
        }
    }

    /// The weight of a layer without LoRAs.
    fn base(&self, layer: &LayerShape) -> Result<StackedRows> {
        let name = format!("{}.weight", layer.name);
        let row_blocks = self.source.row_blocks(&name, [layer.rows, layer.cols].into())?;
        let packed = row_blocks.into_iter().map(RowBlock::into_packed).collect::<kiln_tensor::Result<_>>();
        let unusable = |source| Error::Tensor { file: self.source.path().to_owned(), tensor: name, source };
        packed.map(StackedRows).map_err(unusable)
    }
}
