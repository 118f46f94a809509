//! Checks whether a LoRA fits a model, as far as names and shapes tell.

use kiln_tensor::Shape;

use super::targets::{MappedRows, RowRuns};
use super::unused;
use super::update::Update;
use super::{LayerShape, Lora, LoraBase, LoraModule, LoraProblem};
use crate::{Error, Result};

/// The axis of a DoRA's magnitudes.
#[derive(Clone, Copy, Debug)]
pub(super) enum MagnitudeAxis {
    /// One per row of the module.
    Rows,
    /// One per column of the layer.
    Columns,
}

impl Lora {
    pub(super) fn error(&self, problem: LoraProblem) -> Error {
        Error::Lora { file: self.path().to_owned(), problem: Box::new(problem) }
    }

    /// Rejects a LoRA made for another model and, unless `partial`, one with unused keys.
    pub(super) fn check(&self, model: Option<LoraBase>, partial: bool) -> Result<()> {
        if let (Some(made_for), Some(model)) = (self.base(), model)
            && made_for != model
        {
            return Err(self.error(LoraProblem::WrongBase { made_for, model }));
        }
        match unused::problem(&self.unused) {
            Some(problem) if !partial => Err(self.error(problem)),
            _ => Ok(()),
        }
    }

    /// What every model refuses in it, unless only what fits is used.
    pub fn problem(&self) -> Option<Error> {
        let unknown = || {
            let keys = self.modules.iter().filter(|m| !m.is_known).map(|m| m.stem.clone());
            let (keys, total) = (keys.collect::<Vec<_>>(), self.modules.len());
            (!keys.is_empty()).then_some(LoraProblem::UnknownModules { keys, total })
        };
        let flux1 = (self.base() == Some(LoraBase::Flux1)).then_some(LoraProblem::Flux1);
        let problem = flux1.or_else(|| unused::problem(&self.unused)).or_else(unknown);
        problem.map(|problem| self.error(problem))
    }

    /// The rows of a layer that a module changes, if the module has the size that `mapped` expects.
    pub(super) fn row_runs(
        &self,
        module: &LoraModule,
        layer: &LayerShape,
        mapped: Option<MappedRows>,
    ) -> Result<RowRuns> {
        let found = module.update.size();
        let expected = mapped.as_ref().map(|rows| [rows.expected, layer.cols]);
        if let Some(rows) = mapped
            && found == expected
        {
            return Ok(rows.runs);
        }
        if let (Update::LowRank { down, up }, Some([rows, cols])) = (&module.update, expected)
            && down.size()[0] == rows
            && up.size()[1] == cols
        {
            return Err(self.error(LoraProblem::Swapped {
                down: down.key.clone(),
                down_shape: down.tensor.shape().clone(),
                up: up.key.clone(),
                up_shape: up.tensor.shape().clone(),
            }));
        }
        let wrong_rows = found.map(|f| f[0]) != expected.map(|e| e[0]);
        let expected = expected.unwrap_or([layer.rows, layer.cols]);
        // Of two low-rank matrices, report the wrong one and the shape that fits.
        let (key, found, expected) = match (&module.update, wrong_rows) {
            (Update::LowRank { up, .. }, true) => (&up.key, up.size(), [expected[0], up.size()[1]]),
            (Update::LowRank { down, .. }, false) => (&down.key, down.size(), [down.size()[0], expected[1]]),
            _ => (&module.stem, found.unwrap_or([usize::MAX; 2]), expected),
        };
        Err(self.error(LoraProblem::Shape {
            key: key.clone(),
            found: Shape::from(found),
            expected: Shape::from(expected),
            module: layer.name.clone(),
            rows: layer.rows,
            cols: layer.cols,
        }))
    }

    /// The axis of the magnitudes of a module that changes these layers: its rows, or its columns, whose norms can only be
    /// computed if the layers consist of the module's rows.
    pub(super) fn magnitude_axis(
        &self,
        module: &LoraModule,
        layers: &[(LayerShape, RowRuns)],
    ) -> Result<Option<MagnitudeAxis>> {
        let Some(magnitude) = module.magnitude.as_ref().filter(|_| !layers.is_empty()) else {
            return Ok(None);
        };
        let [rows, cols] = module.update.size().unwrap_or_default();
        let consist = layers.iter().map(|(layer, _)| layer.rows).sum::<usize>() == rows;
        match magnitude.tensor.shape().dims() {
            &[found] | &[found, 1] if found == rows => Ok(Some(MagnitudeAxis::Rows)),
            &[1, found] if found == cols && consist => Ok(Some(MagnitudeAxis::Columns)),
            _ => Err(self.error(LoraProblem::UnexpectedShape {
                key: magnitude.key.clone(),
                found: magnitude.tensor.shape().clone(),
                expected: "a magnitude for every row of its module, or for every column of whole layers",
            })),
        }
    }
}
