//! One LoRA applied to the layers of a model.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use kiln_tensor::packed::StackedRows;
use kiln_tensor::{DType, HostTensor, LoraDelta};

use super::dora::{self, UpdatedWeight};
use super::fit::MagnitudeAxis;
use super::patch::{NormScale, UpdateValues, WeightPatch};
use super::targets::RowRuns;
use super::update::Update;
use super::{DoraRule, LayerShape, Lora, LoraModule, LoraProblem, LoraReport, low_rank};
use crate::{Error, Result};

/// A LoRA with its updates of each layer of a model, checked to fit.
#[derive(Debug)]
pub(super) struct AppliedLora {
    lora: Arc<Lora>,
    weight: f32,
    rule: DoraRule,
    /// By layer.
    updates: BTreeMap<String, Vec<LayerUpdate>>,
    /// What is known of each module.
    modules: Vec<AppliedModule>,
}

/// A module of a LoRA that is applied to a model.
#[derive(Debug, Default)]
struct AppliedModule {
    /// Whether the model has all layers that it changes.
    matched: bool,
    /// The layers that it changes, with the rows that go there.
    layers: Vec<(LayerShape, RowRuns)>,
    /// Its update as `[down, up]`, once expanded.
    expanded: OnceLock<[HostTensor; 2]>,
    /// The factors of a DoRA per column, whose norms run over all of its layers; once computed.
    column_scale: OnceLock<Arc<NormScale>>,
}

/// The rows of a module that update a layer.
#[derive(Debug)]
struct LayerUpdate {
    /// Index of the module.
    module: usize,
    runs: RowRuns,
    /// The axis of a DoRA's magnitudes.
    axis: Option<MagnitudeAxis>,
    /// The factors of a DoRA per row, once computed.
    row_scale: OnceLock<Arc<NormScale>>,
}

/// Reads the weight of a layer without LoRAs.
type ReadBase<'a> = &'a dyn Fn(&LayerShape) -> Result<StackedRows>;
/// Returns a factor for each row of a layer; `None` means 1.
type RowFactors<'a> = &'a dyn Fn(&LayerShape) -> Result<Option<Vec<f32>>>;

impl AppliedLora {
    /// Applies a LoRA to layers of these rows and columns.
    pub fn new(
        lora: Arc<Lora>,
        weight: f32,
        rule: DoraRule,
        sizes: &BTreeMap<String, [usize; 2]>,
    ) -> Result<Self> {
        let modules = lora.modules.iter().enumerate().map(|(index, module)| {
            // A module without targets has a name that no model has.
            let targets = lora.targets.iter().filter(|(_, target)| *target == index);
            let layers = targets.map(|(target, _)| {
                let Some(&[rows, cols]) = sizes.get(&target.layer) else { return Ok(None) };
                let layer = LayerShape { name: target.layer.clone(), rows, cols };
                let runs = lora.row_runs(module, &layer, target.mapping.for_layer(rows, cols))?;
                Ok(Some((layer, runs)))
            });
            let layers: Option<Vec<_>> = layers.collect::<Result<_>>()?;
            let layers = layers.unwrap_or_default();
            Ok(AppliedModule { matched: !layers.is_empty(), layers, ..AppliedModule::default() })
        });
        let modules: Vec<AppliedModule> = modules.collect::<Result<_>>()?;
        let mut updates = BTreeMap::<String, Vec<LayerUpdate>>::new();
        for (index, (module, applied)) in lora.modules.iter().zip(&modules).enumerate() {
            let axis = lora.magnitude_axis(module, &applied.layers)?;
            if let (DoraRule::Diffusers, Some(MagnitudeAxis::Columns), Some(magnitude)) =
                (rule, axis, &module.magnitude)
            {
                return Err(lora.error(LoraProblem::DoraOfColumns { key: magnitude.key.clone() }));
            }
            // Weight 0 switches a LoRA off: skip its computation. PEFT still gives a DoRA's layers their magnitudes.
            let is_off = weight == 0.0 && !(rule == DoraRule::Diffusers && axis.is_some());
            if is_off || (module.scale.value == 0.0 && axis.is_none()) {
                continue;
            }
            for (layer, runs) in &applied.layers {
                let update =
                    LayerUpdate { module: index, runs: runs.clone(), axis, row_scale: OnceLock::new() };
                updates.entry(layer.name.clone()).or_default().push(update);
            }
        }
        Ok(AppliedLora { lora, weight, rule, updates, modules })
    }

    /// Whether the rules for DoRAs give different results; `several` if there are other LoRAs.
    pub fn depends_on_rule(&self, several: bool) -> bool {
        let is_dora = self.lora.modules.iter().any(|module| module.magnitude.is_some());
        is_dora && (several || self.weight != 1.0)
    }

    /// Reports how much of it the model uses. Every module must match a layer; with `partial`, at least one.
    pub fn report(&self, base: &Path, partial: bool) -> Result<LoraReport> {
        let lora = &self.lora;
        let unmatched = lora.modules.iter().zip(&self.modules).filter(|(_, applied)| !applied.matched);
        let keys: Vec<String> = unmatched.map(|(module, _)| module.stem.clone()).collect();
        let (file, total) = (lora.path().to_owned(), lora.modules.len());
        let matched = total - keys.len();
        if !keys.is_empty() && (!partial || matched == 0) {
            return Err(Error::LoraUnmatched { file, base: base.to_owned(), keys, total });
        }
        let unmatched = keys.into_iter().chain(lora.unused_keys().map(str::to_owned)).collect();
        Ok(LoraReport {
            file,
            matched,
            total,
            kinds: lora.kinds(),
            rank: lora.rank(),
            weight: self.weight,
            unmatched,
            notes: lora.notes(),
        })
    }

    /// The updates of a layer, with their modules.
    fn updates(&self, layer: &LayerShape) -> impl Iterator<Item = (&LayerUpdate, &LoraModule)> {
        let updates = self.updates.get(&layer.name).into_iter().flatten();
        updates.map(|update| (update, &self.lora.modules[update.module]))
    }

    /// The updates that are added to the output of these stacked layers. Matrices that have to be computed get `dtype`.
    /// `later` returns the factors of a layer's rows by the LoRAs behind this one.
    pub fn deltas(
        &self,
        stack: &[LayerShape],
        base: ReadBase<'_>,
        later: RowFactors<'_>,
        dtype: DType,
    ) -> Result<Vec<LoraDelta>> {
        let mut deltas = Vec::new();
        // Module, its rows, and the row of the stack where they go.
        let mut found: Vec<(usize, Range<usize>, usize)> = Vec::new();
        let mut start = 0;
        for layer in stack {
            let updates: Vec<_> =
                self.updates(layer).filter(|(_, module)| module.is_low_rank()).map(|(u, _)| u).collect();
            let later = if updates.is_empty() { None } else { later(layer)? };
            for update in updates {
                if update.axis.is_some() || later.is_some() {
                    let scale = self.norm_scale(layer, update, base)?.multiplied(later.as_deref());
                    deltas.extend(self.dora_deltas(update, &scale, start, dtype)?);
                    continue;
                }
                for (from, at) in &update.runs {
                    let at = start + at;
                    match found.last_mut() {
                        // q, k and v of one module: one product instead of three.
                        Some((module, rows, row))
                            if *module == update.module
                                && rows.end == from.start
                                && *row + rows.len() == at =>
                        {
                            rows.end = from.end;
                        }
                        _ => found.push((update.module, from.clone(), at)),
                    }
                }
            }
            start += layer.rows;
        }
        for (index, rows, row) in found {
            let module = &self.lora.modules[index];
            let [down, up] = self.down_up(index, dtype)?;
            let up = up.rows(rows).map_err(|source| self.tensor_error(module, source))?;
            deltas.push(LoraDelta { row, down, up, scale: self.scale(module) });
        }
        Ok(deltas)
    }

    /// The file's own scale times the user's factor.
    fn scale(&self, module: &LoraModule) -> f32 {
        (module.scale.value * f64::from(self.weight)) as f32
    }

    /// A low-rank update as `[down, up]`.
    fn down_up(&self, index: usize, dtype: DType) -> Result<[HostTensor; 2]> {
        let module = &self.lora.modules[index];
        if let Update::LowRank { down, up } = &module.update {
            return Ok([down.tensor.clone(), up.tensor.clone()]);
        }
        let cell = &self.modules[index].expanded;
        if let Some(expanded) = cell.get() {
            return Ok(expanded.clone());
        }
        let expanded = low_rank::expand(&module.update, dtype);
        let expanded = expanded.map_err(|source| self.tensor_error(module, source))?;
        let expanded = expanded.unwrap_or_else(|| [HostTensor::zeros([0, 0]), HostTensor::zeros([0, 0])]);
        Ok(cell.get_or_init(|| expanded).clone())
    }

    /// The updates of a DoRA, or of a LoRA before one, whose rows or columns are multiplied as the weight's are.
    fn dora_deltas(
        &self,
        update: &LayerUpdate,
        norm_scale: &NormScale,
        start: usize,
        dtype: DType,
    ) -> Result<Vec<LoraDelta>> {
        let module = &self.lora.modules[update.module];
        let [down, up] = self.down_up(update.module, dtype)?;
        let delta = |(from, at): &(Range<usize>, usize)| {
            let up = up.rows(from.clone())?;
            let (down, up) = match norm_scale {
                NormScale::None => (down.clone(), up),
                NormScale::Rows(scales) => {
                    (down.clone(), multiply(&up, |row, _| scales[at + row])?.to_dtype(dtype)?)
                }
                NormScale::Columns(scales) => {
                    (multiply(&down, |_, column| scales[column])?.to_dtype(dtype)?, up)
                }
            };
            Ok(LoraDelta { row: start + at, down, up, scale: self.scale(module) })
        };
        let deltas = update.runs.iter().map(delta).collect::<kiln_tensor::Result<_>>();
        deltas.map_err(|source| self.tensor_error(module, source))
    }

    /// Whether it patches a layer's weight itself.
    pub fn patches(&self, layer: &LayerShape) -> bool {
        self.updates(layer).any(|(_, module)| module.patches_weight())
    }

    /// Adds what it changes in the weight of a layer to `patch`.
    pub fn add_to_patch(
        &self,
        layer: &LayerShape,
        base: ReadBase<'_>,
        patch: &mut WeightPatch,
    ) -> Result<()> {
        for (update, module) in self.updates(layer).filter(|(_, module)| module.patches_weight()) {
            let norm_scale = self.norm_scale(layer, update, base)?;
            match (self.rule, &*norm_scale) {
                (DoraRule::Diffusers, NormScale::Rows(scales)) => patch.multiply_rows(scales),
                _ => patch.add_norm_scale(&norm_scale, self.weight),
            }
            if !module.is_low_rank() {
                let values = self.values(module)?;
                patch.add_update(values, update.runs.clone(), (*norm_scale).clone(), self.scale(module));
            }
        }
        Ok(())
    }

    /// Multiplies the factors of a layer's rows so far by those of its DoRAs.
    pub fn multiply_factors(
        &self,
        layer: &LayerShape,
        base: ReadBase<'_>,
        product: &mut Option<Vec<f32>>,
    ) -> Result<()> {
        for (update, _) in self.updates(layer).filter(|(update, _)| update.axis.is_some()) {
            let norm_scale = self.norm_scale(layer, update, base)?;
            if let NormScale::Rows(scales) = norm_scale.multiplied(product.as_deref()) {
                *product = Some(scales);
            }
        }
        Ok(())
    }

    fn values(&self, module: &LoraModule) -> Result<UpdateValues> {
        UpdateValues::new(&module.update).map_err(|source| self.tensor_error(module, source))
    }

    /// The factors of a DoRA for a layer; [`NormScale::None`] for a module without magnitudes.
    fn norm_scale(
        &self,
        layer: &LayerShape,
        update: &LayerUpdate,
        base: ReadBase<'_>,
    ) -> Result<Arc<NormScale>> {
        let (module, applied) = (&self.lora.modules[update.module], &self.modules[update.module]);
        let (Some(axis), Some(magnitude)) = (update.axis, &module.magnitude) else {
            return Ok(Arc::new(NormScale::None));
        };
        let cell = match axis {
            MagnitudeAxis::Rows => &update.row_scale,
            MagnitudeAxis::Columns => &applied.column_scale,
        };
        if let Some(norm_scale) = cell.get() {
            return Ok(Arc::clone(norm_scale));
        }
        let unusable = |source| {
            let (file, tensor) = (self.lora.path().to_owned(), magnitude.key.clone());
            Error::Tensor { file, tensor, source }
        };
        let (magnitudes, values) = (magnitude.tensor.to_f32().map_err(unusable)?, self.values(module)?);
        let updated = |layer: &LayerShape, runs| {
            // As PEFT and diffusers do it, the norms are those with the user's weight.
            let scale = match self.rule {
                DoraRule::ComfyUi => module.scale.value as f32,
                DoraRule::Diffusers => self.scale(module),
            };
            let base = base(layer)?;
            Ok(UpdatedWeight { base, cols: layer.cols, values: &values, scale, runs })
        };
        let norm_scale = match axis {
            MagnitudeAxis::Rows => updated(layer, &update.runs)?.row_scale(&magnitudes),
            MagnitudeAxis::Columns => {
                let mut squares = vec![0.0; layer.cols];
                for (layer, runs) in &applied.layers {
                    updated(layer, runs)?.add_column_squares(&mut squares);
                }
                dora::column_scale(&magnitudes, &squares)
            }
        };
        Ok(Arc::clone(cell.get_or_init(|| Arc::new(norm_scale))))
    }

    fn tensor_error(&self, module: &LoraModule, source: kiln_tensor::Error) -> Error {
        let [key, _] = module.update.keys();
        Error::Tensor { file: self.lora.path().to_owned(), tensor: key.to_owned(), source }
    }
}

/// Multiplies every element of a matrix by `factor` of its row and column.
fn multiply(matrix: &HostTensor, factor: impl Fn(usize, usize) -> f32) -> kiln_tensor::Result<HostTensor> {
    let cols = matrix.shape().last().max(1);
    let values = matrix.to_f32()?;
    let values = values.iter().enumerate().map(|(i, v)| v * factor(i / cols, i % cols)).collect();
    HostTensor::from_f32(matrix.shape(), values)
}
