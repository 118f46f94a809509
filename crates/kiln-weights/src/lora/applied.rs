//! One LoRA over the layers of a model.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use kiln_tensor::{DType, Delta, HostTensor};

use super::dora::{self, Base, Lengths};
use super::fit::Axis;
use super::merge::{Gains, Merged, Runs, Values};
use super::update::Update;
use super::{LayerShape, Lora, LoraReport, Module, thin};
use crate::{Error, Result};

/// A LoRA with what it has for each layer of a model, checked to fit.
#[derive(Debug)]
pub(super) struct Applied {
    lora: Arc<Lora>,
    weight: f32,
    /// By layer.
    pieces: BTreeMap<String, Vec<Piece>>,
    /// For each module whether the model has all layers that it changes.
    matched: Vec<bool>,
    /// For each module its update as two thin matrices, down and up, once they were made.
    thin: Vec<OnceLock<[HostTensor; 2]>>,
}

/// Rows of a module that go to rows of a layer.
#[derive(Debug)]
struct Piece {
    /// Number of the module.
    number: usize,
    runs: Runs,
    /// Of a DoRA.
    axis: Option<Axis>,
    /// What the DoRA multiplies with, once that was measured.
    gains: OnceLock<Arc<Gains>>,
}

/// Gives the values of a layer.
type BaseOf<'a> = &'a dyn Fn(&LayerShape) -> Result<Base>;

impl Applied {
    /// Over layers of these rows and columns.
    pub fn new(lora: Arc<Lora>, weight: f32, sizes: &BTreeMap<String, [usize; 2]>) -> Result<Self> {
        let mut pieces = BTreeMap::<String, Vec<Piece>>::new();
        // A module without targets has a name that no model knows.
        let mut matched = vec![None; lora.modules.len()];
        for (target, number) in &lora.targets {
            let size = sizes.get(&target.layer);
            matched[*number] = Some(matched[*number].unwrap_or(true) && size.is_some());
            let Some(&[rows, cols]) = size else { continue };
            let layer = LayerShape { name: target.layer.clone(), rows, cols };
            let module = &lora.modules[*number];
            let runs = lora.runs(module, &layer, target.place.rows(rows, cols))?;
            let axis = lora.axis(module, &layer, &runs)?;
            // Weight 0 switches a LoRA off; there is no need to compute with it.
            if weight != 0.0 && (module.scale != 0.0 || axis.is_some()) {
                let piece = Piece { number: *number, runs, axis, gains: OnceLock::new() };
                pieces.entry(layer.name).or_default().push(piece);
            }
        }
        let thin = lora.modules.iter().map(|_| OnceLock::new()).collect();
        let matched = matched.into_iter().map(|all| all == Some(true)).collect();
        Ok(Applied { lora, weight, pieces, matched, thin })
    }

    /// How much of it the model takes; an error when that is not all, unless `partial` allows it and there is some.
    pub fn report(&self, base: &Path, partial: bool) -> Result<LoraReport> {
        let lora = &self.lora;
        let left = lora.modules.iter().zip(&self.matched).filter(|(_, matched)| !**matched);
        let keys: Vec<String> = left.map(|(module, _)| module.stem.clone()).collect();
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
        })
    }

    /// What it has for a layer, with the modules.
    fn pieces(&self, layer: &LayerShape) -> impl Iterator<Item = (&Piece, &Module)> {
        let pieces = self.pieces.get(&layer.name).into_iter().flatten();
        pieces.map(|piece| (piece, &self.lora.modules[piece.number]))
    }

    /// The updates that are added to the outputs of these layers, which are stacked. What has to be made for them is of
    /// type `dtype`.
    pub fn deltas(&self, stack: &[LayerShape], base: BaseOf<'_>, dtype: DType) -> Result<Vec<Delta>> {
        let mut deltas = Vec::new();
        let mut found: Vec<(usize, Range<usize>, usize)> = Vec::new();
        let mut start = 0;
        for layer in stack {
            for (piece, _) in self.pieces(layer).filter(|(_, module)| module.is_thin()) {
                if piece.axis.is_some() {
                    deltas.extend(self.lengthened(layer, piece, start, base, dtype)?);
                    continue;
                }
                for (from, at) in &piece.runs {
                    let at = start + at;
                    match found.last_mut() {
                        // q, k and v of one module: one product instead of three.
                        Some((number, rows, row))
                            if *number == piece.number
                                && rows.end == from.start
                                && *row + rows.len() == at =>
                        {
                            rows.end = from.end;
                        }
                        _ => found.push((piece.number, from.clone(), at)),
                    }
                }
            }
            start += layer.rows;
        }
        for (number, rows, row) in found {
            let module = &self.lora.modules[number];
            let [down, up] = self.matrices(number, dtype)?;
            let up = up.rows(rows).map_err(|source| self.of_module(module, source))?;
            deltas.push(Delta { row, down, up, scale: self.scale(module) });
        }
        Ok(deltas)
    }

    /// The file's own factor and the user's.
    fn scale(&self, module: &Module) -> f32 {
        (module.scale * f64::from(self.weight)) as f32
    }

    /// A thin update as `[down, up]`.
    fn matrices(&self, number: usize, dtype: DType) -> Result<[HostTensor; 2]> {
        let module = &self.lora.modules[number];
        if let Update::LowRank { down, up } = &module.update {
            return Ok([down.tensor.clone(), up.tensor.clone()]);
        }
        if let Some(made) = self.thin[number].get() {
            return Ok(made.clone());
        }
        let made = thin::matrices(&module.update, dtype).map_err(|source| self.of_module(module, source))?;
        let made = made.unwrap_or_else(|| [HostTensor::zeros([0, 0]), HostTensor::zeros([0, 0])]);
        Ok(self.thin[number].get_or_init(|| made).clone())
    }

    /// The updates of a DoRA, whose rows or columns are multiplied as the weight's are.
    fn lengthened(
        &self,
        layer: &LayerShape,
        piece: &Piece,
        start: usize,
        base: BaseOf<'_>,
        dtype: DType,
    ) -> Result<Vec<Delta>> {
        let module = &self.lora.modules[piece.number];
        let gains = self.gains(layer, piece, base)?;
        let [down, up] = self.matrices(piece.number, dtype)?;
        let delta = |(from, at): &(Range<usize>, usize)| {
            let up = up.rows(from.clone())?;
            let (down, up) = match &*gains {
                Gains::None => (down.clone(), up),
                Gains::Rows(gains) => (down.clone(), times(&up, |row, _| gains[at + row])?.to_dtype(dtype)?),
                Gains::Columns(gains) => (times(&down, |_, column| gains[column])?.to_dtype(dtype)?, up),
            };
            Ok(Delta { row: start + at, down, up, scale: self.scale(module) })
        };
        let deltas = piece.runs.iter().map(delta).collect::<kiln_tensor::Result<_>>();
        deltas.map_err(|source| self.of_module(module, source))
    }

    /// Whether a layer's weight itself is changed.
    pub fn merges(&self, layer: &LayerShape) -> bool {
        self.pieces(layer).any(|(_, module)| !module.leaves_weight())
    }

    /// Takes up what happens to the weight of a layer.
    pub fn merge(&self, layer: &LayerShape, base: BaseOf<'_>, into: &mut Merged) -> Result<()> {
        for (piece, module) in self.pieces(layer).filter(|(_, module)| !module.leaves_weight()) {
            let gains = self.gains(layer, piece, base)?;
            into.gain(&gains, self.weight);
            if !module.is_thin() {
                let values = self.values(module)?;
                into.add(values, piece.runs.clone(), (*gains).clone(), self.scale(module));
            }
        }
        Ok(())
    }

    fn values(&self, module: &Module) -> Result<Values> {
        Values::new(&module.update).map_err(|source| self.of_module(module, source))
    }

    /// What a module's lengths make of a layer; nothing where it has none.
    fn gains(&self, layer: &LayerShape, piece: &Piece, base: BaseOf<'_>) -> Result<Arc<Gains>> {
        if let Some(gains) = piece.gains.get() {
            return Ok(Arc::clone(gains));
        }
        let module = &self.lora.modules[piece.number];
        let gains = match (piece.axis, &module.magnitude) {
            (Some(axis), Some(lengths)) => {
                let unusable = |source| {
                    let (file, tensor) = (self.lora.path().to_owned(), lengths.key.clone());
                    Error::Tensor { file, tensor, source }
                };
                let lengths = lengths.tensor.to_f32().map_err(unusable)?.into_owned();
                let lengths = match axis {
                    Axis::Rows => Lengths::Rows(lengths),
                    Axis::Columns => Lengths::Columns(lengths),
                };
                let (values, scale) = (self.values(module)?, module.scale as f32);
                dora::gains(&base(layer)?, layer.cols, (&values, scale), &piece.runs, &lengths)
            }
            _ => Gains::None,
        };
        Ok(Arc::clone(piece.gains.get_or_init(|| Arc::new(gains))))
    }

    fn of_module(&self, module: &Module, source: kiln_tensor::Error) -> Error {
        let [key, _] = module.update.keys();
        Error::Tensor { file: self.lora.path().to_owned(), tensor: key.to_owned(), source }
    }
}

/// Every element of a matrix times what `factor` has for its row and column.
fn times(matrix: &HostTensor, factor: impl Fn(usize, usize) -> f32) -> kiln_tensor::Result<HostTensor> {
    let cols = matrix.shape().last().max(1);
    let values = matrix.to_f32()?;
    let values = values.iter().enumerate().map(|(i, v)| v * factor(i / cols, i % cols)).collect();
    HostTensor::from_f32(matrix.shape(), values)
}
