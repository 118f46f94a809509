//! Whether a LoRA fits a model: all that names and shapes tell.

use kiln_tensor::Shape;

use super::merge::Runs;
use super::names::Rows;
use super::update::Update;
use super::{LayerShape, Lora, LoraBase, LoraProblem, Module};
use crate::{Error, Result};

/// What a DoRA has lengths of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Axis {
    /// Every row of the module.
    Rows,
    /// Every column of the layer.
    Columns,
}

impl Lora {
    pub(super) fn error(&self, problem: LoraProblem) -> Error {
        Error::Lora { file: self.path().to_owned(), problem: Box::new(problem) }
    }

    /// Refuses a LoRA made for another model, and keys that are of no use unless that is `partial`ly allowed.
    pub(super) fn check(&self, model: Option<LoraBase>, partial: bool) -> Result<()> {
        if let (Some(made_for), Some(model)) = (self.base(), model)
            && made_for != model
        {
            return Err(self.error(LoraProblem::Base { made_for, model }));
        }
        if partial {
            return Ok(());
        }
        match (self.text.first(), self.unknown.is_empty()) {
            (Some(key), _) => Err(self.error(LoraProblem::TextEncoder { key: key.clone() })),
            (None, false) => Err(self.error(LoraProblem::UnknownKeys { keys: self.unknown.clone() })),
            (None, true) => Ok(()),
        }
    }

    /// Which rows of a module go to which of a layer, where `fitting` is what such a module would have.
    pub(super) fn runs(&self, module: &Module, layer: &LayerShape, fitting: Option<Rows>) -> Result<Runs> {
        let found = module.update.size();
        let expected = fitting.as_ref().map(|rows| [rows.expected, layer.cols]);
        if let (Some(rows), true) = (fitting, found.is_some() && found == expected) {
            return Ok(rows.runs);
        }
        let wrong_rows = found.map(|f| f[0]) != expected.map(|e| e[0]);
        let expected = expected.unwrap_or([layer.rows, layer.cols]);
        // Of two thin matrices, say which is wrong and what it should be.
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

    /// What a DoRA's lengths are of: the module's rows, or its columns, which are known only where all of its rows are.
    pub(super) fn axis(&self, module: &Module, layer: &LayerShape, runs: &Runs) -> Result<Option<Axis>> {
        let Some(lengths) = &module.magnitude else { return Ok(None) };
        let rows = module.update.size().map_or(0, |[rows, _]| rows);
        let covered: usize = runs.iter().map(|(from, _)| from.len()).sum();
        match lengths.tensor.shape().dims() {
            &[found] | &[found, 1] if found == rows => Ok(Some(Axis::Rows)),
            &[1, found] if found == layer.cols && covered == rows && rows == layer.rows => {
                Ok(Some(Axis::Columns))
            }
            _ => Err(self.error(LoraProblem::NotThatShape {
                key: lengths.key.clone(),
                found: lengths.tensor.shape().clone(),
                expected: "a length for every row of its module",
            })),
        }
    }
}
