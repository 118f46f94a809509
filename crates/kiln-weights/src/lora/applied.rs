use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use kiln_tensor::{DType, Delta, HostTensor, Shape};

use super::dora::{self, Base, Lengths};
use super::merge::{Gains, Merged, Values};
use super::names::Rows;
use super::update::{Keyed, Update};
use super::{Lora, LoraBase, LoraProblem, Module, thin};
use crate::{Error, Result};

/// A LoRA laid over some weights: knows which of its modules were taken, so that none is dropped in silence.
#[derive(Debug)]
pub(crate) struct Applied {
    lora: Lora,
    weight: f32,
    /// For each target of the LoRA. Atomic, since layers may be loaded by several threads.
    taken: Vec<AtomicBool>,
    /// For each target what its DoRA multiplies with, once that was measured.
    gains: Vec<OnceLock<Arc<Gains>>>,
    /// For each module its update as two thin matrices, down and up, once they were made.
    thin: Vec<OnceLock<[HostTensor; 2]>>,
}

/// Gives the values of a layer.
pub(crate) type BaseOf<'a> = &'a dyn Fn(Layer<'_>) -> Result<Base>;

/// A layer that is asked for: its name, rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a> {
    pub name: &'a str,
    pub rows: usize,
    pub cols: usize,
}

/// Rows of a module that go to rows of a layer.
struct Piece<'l> {
    /// Number of the target.
    target: usize,
    /// Number of the module.
    number: usize,
    module: &'l Module,
    runs: Vec<(Range<usize>, usize)>,
}

impl Applied {
    pub fn new(lora: Lora, weight: f32) -> Self {
        let taken = lora.targets.iter().map(|_| AtomicBool::new(false)).collect();
        let gains = lora.targets.iter().map(|_| OnceLock::new()).collect();
        let thin = lora.modules.iter().map(|_| OnceLock::new()).collect();
        Applied { lora, weight, taken, gains, thin }
    }

    fn error(&self, problem: LoraProblem) -> Error {
        Error::Lora { file: self.lora.path().to_owned(), problem: Box::new(problem) }
    }

    /// Refuses what can be seen before any layer is asked for.
    pub fn check(&self, model: Option<LoraBase>, partial: bool) -> Result<()> {
        if let (Some(made_for), Some(model)) = (self.lora.base(), model)
            && made_for != model
        {
            return Err(self.error(LoraProblem::Base { made_for, model }));
        }
        if partial {
            return Ok(());
        }
        match (self.lora.text.first(), self.lora.unknown.is_empty()) {
            (Some(key), _) => Err(self.error(LoraProblem::TextEncoder { key: key.clone() })),
            (None, false) => Err(self.error(LoraProblem::UnknownKeys { keys: self.lora.unknown.clone() })),
            (None, true) => Ok(()),
        }
    }

    /// What this LoRA has for a layer, checked to fit it.
    fn pieces(&self, layer: Layer<'_>) -> Result<Vec<Piece<'_>>> {
        let targets = &self.lora.targets;
        let first = targets.partition_point(|(target, _)| target.layer.as_str() < layer.name);
        let mut pieces = Vec::new();
        for (at, (target, number)) in targets.iter().enumerate().skip(first) {
            if target.layer != layer.name {
                break;
            }
            let module = &self.lora.modules[*number];
            let fitting = target.place.rows(layer.rows, layer.cols);
            let Rows { runs, .. } = self.fits(module, layer, fitting)?;
            self.taken[at].store(true, Relaxed);
            // Weight 0 switches a LoRA off; there is no need to compute with it.
            if self.weight != 0.0 && (module.scale != 0.0 || module.magnitude.is_some()) {
                pieces.push(Piece { target: at, number: *number, module, runs });
            }
        }
        Ok(pieces)
    }

    fn fits(&self, module: &Module, layer: Layer<'_>, fitting: Option<Rows>) -> Result<Rows> {
        let found = module.update.size();
        let expected = fitting.as_ref().map(|rows| [rows.expected, layer.cols]);
        if let (Some(rows), true) = (fitting, found.is_some() && found == expected) {
            return Ok(rows);
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
            module: layer.name.to_owned(),
            rows: layer.rows,
            cols: layer.cols,
        }))
    }

    /// The updates that are added to the outputs of these layers, which are stacked. What has to be made for them is of
    /// type `dtype`.
    pub fn deltas<'a>(
        &self,
        stack: impl Iterator<Item = Layer<'a>>,
        base: BaseOf<'_>,
        dtype: DType,
    ) -> Result<Vec<Delta>> {
        let mut deltas = Vec::new();
        let mut found: Vec<(usize, &Module, Range<usize>, usize)> = Vec::new();
        let mut start = 0;
        for layer in stack {
            for piece in self.pieces(layer)?.into_iter().filter(|p| p.module.is_thin()) {
                if piece.module.magnitude.is_some() {
                    deltas.extend(self.lengthened(layer, &piece, start, base, dtype)?);
                    continue;
                }
                for (from, at) in piece.runs {
                    let at = start + at;
                    match found.last_mut() {
                        // q, k and v of one module: one product instead of three.
                        Some((number, _, rows, row))
                            if *number == piece.number
                                && rows.end == from.start
                                && *row + rows.len() == at =>
                        {
                            rows.end = from.end;
                        }
                        _ => found.push((piece.number, piece.module, from, at)),
                    }
                }
            }
            start += layer.rows;
        }
        for (number, module, rows, row) in found {
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
        layer: Layer<'_>,
        piece: &Piece<'_>,
        start: usize,
        base: BaseOf<'_>,
        dtype: DType,
    ) -> Result<Vec<Delta>> {
        let module = piece.module;
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
    pub fn is_merged(&self, layer: Layer<'_>) -> Result<bool> {
        Ok(self.pieces(layer)?.iter().any(|p| !p.module.leaves_weight()))
    }

    /// Takes up what happens to the weight of a layer.
    pub fn merge(&self, layer: Layer<'_>, base: BaseOf<'_>, into: &mut Merged) -> Result<()> {
        for piece in self.pieces(layer)?.into_iter().filter(|p| !p.module.leaves_weight()) {
            let gains = self.gains(layer, &piece, base)?;
            into.gain(&gains, self.weight);
            if !piece.module.is_thin() {
                let values = self.values(piece.module)?;
                into.add(values, piece.runs, (*gains).clone(), self.scale(piece.module));
            }
        }
        Ok(())
    }

    fn values(&self, module: &Module) -> Result<Values> {
        Values::new(&module.update).map_err(|source| self.of_module(module, source))
    }

    /// What a module's lengths make of a layer; nothing where it has none.
    fn gains(&self, layer: Layer<'_>, piece: &Piece<'_>, base: BaseOf<'_>) -> Result<Arc<Gains>> {
        let known = &self.gains[piece.target];
        if let Some(gains) = known.get() {
            return Ok(Arc::clone(gains));
        }
        let gains = match &piece.module.magnitude {
            None => Gains::None,
            Some(lengths) => {
                let lengths = self.lengths(layer, piece, lengths)?;
                let (values, scale) = (self.values(piece.module)?, piece.module.scale as f32);
                dora::gains(&base(layer)?, layer.cols, (&values, scale), &piece.runs, &lengths)
            }
        };
        Ok(Arc::clone(known.get_or_init(|| Arc::new(gains))))
    }

    /// DoRA's lengths: of the module's rows, or of its columns, which are known only where all of its rows are.
    fn lengths(&self, layer: Layer<'_>, piece: &Piece<'_>, lengths: &Keyed) -> Result<Lengths> {
        let rows = piece.module.update.size().map_or(0, |[rows, _]| rows);
        let values = lengths.tensor.to_f32().map_err(|source| self.unusable(lengths, source))?.into_owned();
        let covered: usize = piece.runs.iter().map(|(from, _)| from.len()).sum();
        match lengths.tensor.shape().dims() {
            &[found] | &[found, 1] if found == rows => Ok(Lengths::Rows(values)),
            &[1, found] if found == layer.cols && covered == rows && rows == layer.rows => {
                Ok(Lengths::Columns(values))
            }
            _ => Err(self.error(LoraProblem::NotThatShape {
                key: lengths.key.clone(),
                found: lengths.tensor.shape().clone(),
                expected: "a length for every row of its module",
            })),
        }
    }

    fn of_module(&self, module: &Module, source: kiln_tensor::Error) -> Error {
        let [key, _] = module.update.keys();
        Error::Tensor { file: self.lora.path().to_owned(), tensor: key.to_owned(), source }
    }

    fn unusable(&self, keyed: &Keyed, source: kiln_tensor::Error) -> Error {
        Error::Tensor { file: self.lora.path().to_owned(), tensor: keyed.key.clone(), source }
    }

    /// What was taken; an error when something was not, unless that is `partial`ly allowed.
    pub fn finish(&self, base: &Path, partial: bool) -> Result<LoraReport> {
        let lora = &self.lora;
        let mut whole = vec![true; lora.modules.len()];
        let mut known = vec![false; lora.modules.len()];
        for ((_, number), taken) in lora.targets.iter().zip(&self.taken) {
            whole[*number] &= taken.load(Relaxed);
            known[*number] = true;
        }
        let left = lora.modules.iter().zip(whole.iter().zip(&known)).filter(|(_, (w, k))| !**w || !**k);
        let keys: Vec<String> = left.map(|(m, _)| m.stem.clone()).collect();
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
}

/// Every element of a matrix times what `factor` has for its row and column.
fn times(matrix: &HostTensor, factor: impl Fn(usize, usize) -> f32) -> kiln_tensor::Result<HostTensor> {
    let cols = matrix.shape().last().max(1);
    let values = matrix.to_f32()?;
    let values = values.iter().enumerate().map(|(i, v)| v * factor(i / cols, i % cols)).collect();
    HostTensor::from_f32(matrix.shape(), values)
}

/// How a LoRA was taken up: `lora style.safetensors: 112 of 112 modules, rank 16, weight 0.8`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraReport {
    /// The LoRA's file.
    pub file: PathBuf,
    /// Modules that the model took.
    pub matched: usize,
    /// Modules that the LoRA has.
    pub total: usize,
    /// The kinds of its updates, see [`Lora::kinds`].
    pub kinds: Vec<&'static str>,
    /// The largest rank of its modules, 0 when they are whole matrices.
    pub rank: usize,
    /// The user's factor.
    pub weight: f32,
    /// Modules and keys that were left out, where that was allowed.
    pub unmatched: Vec<String>,
}

impl fmt::Display for LoraReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LoraReport { file, matched, total, kinds, rank, weight, unmatched } = self;
        let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
        write!(f, "lora {name}: {matched} of {total} modules")?;
        if kinds[..] != ["LoRA"] {
            write!(f, ", {}", kinds.join(" and "))?;
        }
        if *rank > 0 {
            write!(f, ", rank {rank}")?;
        }
        write!(f, ", weight {weight}")?;
        match unmatched.is_empty() {
            true => Ok(()),
            false => write!(f, "; left out: {}", crate::error::quoted(unmatched)),
        }
    }
}
