use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kiln_tensor::{Delta, Shape};

use super::merge::{Magnitude, Merge};
use super::names::Rows;
use super::update::{Keyed, Update};
use super::{Lora, LoraBase, LoraProblem, Module};
use crate::{Error, Result};

/// A LoRA laid over some weights: knows which of its modules were taken, so that none is dropped in silence.
#[derive(Debug)]
pub(crate) struct Applied {
    lora: Lora,
    weight: f32,
    /// For each target of the LoRA. Atomic, since layers may be loaded by several threads.
    taken: Vec<AtomicBool>,
}

/// A layer that is asked for: its name, rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a> {
    pub name: &'a str,
    pub rows: usize,
    pub cols: usize,
}

/// Rows of a module that go to rows of a layer.
struct Piece<'l> {
    number: usize,
    module: &'l Module,
    runs: Vec<(Range<usize>, usize)>,
}

impl Applied {
    pub fn new(lora: Lora, weight: f32) -> Self {
        let taken = lora.targets.iter().map(|_| AtomicBool::new(false)).collect();
        Applied { lora, weight, taken }
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
                pieces.push(Piece { number: *number, module, runs });
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

    /// The updates that are added to the outputs of these layers, which are stacked.
    pub fn deltas<'a>(&self, stack: impl Iterator<Item = Layer<'a>>) -> Result<Vec<Delta>> {
        let mut found: Vec<(usize, &Module, Range<usize>, usize)> = Vec::new();
        let mut start = 0;
        for layer in stack {
            for piece in self.pieces(layer)?.into_iter().filter(|p| p.module.is_low_rank()) {
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
        let delta = |(_, module, rows, row): (usize, &Module, Range<usize>, usize)| {
            let Update::LowRank { down, up } = &module.update else { return Ok(None) };
            let scale = (module.scale * f64::from(self.weight)) as f32;
            let up_rows = up.tensor.rows(rows).map_err(|source| self.unusable(up, source))?;
            Ok(Some(Delta { row, down: down.tensor.clone(), up: up_rows, scale }))
        };
        found.into_iter().filter_map(|found| delta(found).transpose()).collect()
    }

    /// Whether there are updates that have to go into the weight of a layer.
    pub fn is_merged(&self, layer: Layer<'_>) -> Result<bool> {
        Ok(self.pieces(layer)?.iter().any(|p| !p.module.is_low_rank()))
    }

    /// The updates that have to go into the weight of a layer.
    pub fn merges(&self, layer: Layer<'_>) -> Result<Vec<Merge>> {
        let pieces = self.pieces(layer)?.into_iter().filter(|p| !p.module.is_low_rank());
        pieces.map(|piece| self.merge(layer, piece)).collect()
    }

    fn merge(&self, layer: Layer<'_>, piece: Piece<'_>) -> Result<Merge> {
        let module = piece.module;
        let magnitude = match &module.magnitude {
            None => Magnitude::None,
            Some(lengths) => self.magnitude(layer, &piece, lengths)?,
        };
        let factors = [module.scale as f32, self.weight];
        let [key, _] = module.update.keys();
        Merge::new(&module.update, piece.runs, factors, magnitude).map_err(|source| Error::Tensor {
            file: self.lora.path().to_owned(),
            tensor: key.to_owned(),
            source,
        })
    }

    /// DoRA's lengths: of the module's rows, or of its columns, which are known only where all of its rows are.
    fn magnitude(&self, layer: Layer<'_>, piece: &Piece<'_>, lengths: &Keyed) -> Result<Magnitude> {
        let rows = piece.module.update.size().map_or(0, |[rows, _]| rows);
        let values = lengths.tensor.to_f32().map_err(|source| self.unusable(lengths, source))?.into_owned();
        let covered: usize = piece.runs.iter().map(|(from, _)| from.len()).sum();
        match lengths.tensor.shape().dims() {
            &[found] | &[found, 1] if found == rows => Ok(Magnitude::Rows(values)),
            &[1, found] if found == layer.cols && covered == rows && rows == layer.rows => {
                Ok(Magnitude::Columns(values))
            }
            _ => Err(self.error(LoraProblem::NotThatShape {
                key: lengths.key.clone(),
                found: lengths.tensor.shape().clone(),
                expected: "a length for every row of its module",
            })),
        }
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
