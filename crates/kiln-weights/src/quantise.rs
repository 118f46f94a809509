//! A transformer's weights written again in 8-bit rows.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use kiln_tensor::{DType, HostTensor};

use crate::save::{Planned, stream};
use crate::{Error, LinearForm, Result, WeightSource, int8};

/// The metadata key by which a file says that its linear layers are meant to be used in 8 bits.
pub const MARK: &str = "kiln.linear";
/// The mark's value.
const INT8: &str = "int8";

impl WeightSource {
    /// The form in which a file wants its linear layers used: 8 bits when [`quantise`] made it, 8-bit floats where it has
    /// such matrices and the device products of them.
    pub fn own_form(&self, threads: usize, has_fp8: bool) -> LinearForm {
        let in_fp8 = |name: &str| name.strip_suffix(".weight").is_some_and(|module| self.stores_fp8(module));
        match self.metadata().get(MARK).map(String::as_str) {
            Some(INT8) => LinearForm::Int8 { threads },
            _ if has_fp8 && self.names().any(in_fp8) => LinearForm::StoredFp8,
            _ => LinearForm::Float,
        }
    }
}

impl WeightSource {
    /// Bytes that [`LinearForm::Int8`] takes beside the files: one for every weight that is not stored so.
    pub fn bytes_to_round(&self) -> u64 {
        self.weights_that(|name| rounds(self, name))
    }

    /// The same where integers that are stored are copied as well.
    pub fn bytes_in_integers(&self) -> u64 {
        self.weights_that(|name| rounds(self, name) || self.is_int8(name) && int8::takes(name))
    }

    fn weights_that(&self, counts: impl Fn(&str) -> bool) -> u64 {
        let counted = self.names().filter(|name| counts(name)).filter_map(|name| self.entry(name));
        counted.map(|(_, shape)| shape.numel() as u64).sum()
    }
}

/// Whether `name` is a float matrix of a layer that is used in 8 bits.
pub(crate) fn rounds(source: &WeightSource, name: &str) -> bool {
    match source.entry(name) {
        Some((dtype, shape)) => {
            let float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64);
            let values = float || dtype.is_small_float() || source.packing(name).is_some();
            values && shape.rank() == 2 && name.strip_suffix(".weight").is_some_and(int8::takes)
        }
        None => false,
    }
}

/// How much the layers of one kind lost.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The layers' name, without the number of the block.
    pub name: String,
    /// How many there are.
    pub layers: usize,
    /// Their weights.
    pub weights: u64,
    /// `‖rounded - weight‖ / ‖weight‖` over all of them.
    pub error: f64,
}

/// What became of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The layers in 8 bits, by kind.
    pub groups: Vec<Group>,
    /// Tensors that were copied as they are.
    pub copied: usize,
    /// Bytes of all tensors before and after.
    pub bytes: [u64; 2],
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wide = self.groups.iter().map(|g| g.name.len()).max().unwrap_or(0);
        for Group { name, layers, weights, error } in &self.groups {
            let millions = *weights as f64 / 1e6;
            writeln!(
                f,
                "{name:wide$}  {layers:3} layers  {millions:8.1} M weights  {:.2} % off",
                100.0 * error
            )?;
        }
        write!(f, "{} tensors kept as they are", self.copied)
    }
}

/// Writes the tensors of `source` to the file `out`, the linear layers inside the transformer's blocks as 8-bit rows:
/// `X` as i8 beside `X_scale`. Nothing but the largest tensor is held in memory; `progress` is told how many tensors of how
/// many are done and may stop it with an error, which leaves nothing behind.
///
/// Weights without such layers, or whose layers are in 8 bits already, are an error.
pub fn quantise(
    source: &WeightSource,
    out: &Path,
    threads: usize,
    progress: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<Report> {
    let rounds = |name: &str| rounds(source, name);
    let mut plan = Vec::new();
    for name in source.names() {
        let Some((dtype, shape)) = source.entry(name) else { continue };
        let rounded = rounds(name);
        let dtype = match (rounded, source.packing(name)) {
            (true, _) => DType::I8,
            // What is packed is written as what it stands for.
            (false, Some(_)) => DType::F32,
            (false, None) => dtype,
        };
        let (name, shape) = (name.to_owned(), shape.clone());
        let rows = shape.rows();
        let scale = Planned { name: int8::scale_name(&name), dtype: DType::F32, shape: [rows].into() };
        plan.push(Planned { name, dtype, shape });
        if rounded {
            plan.push(scale);
        }
    }
    if !source.names().any(rounds) {
        return Err(Error::NothingToRound {
            file: source.path().to_owned(),
            done: source.names().any(|name| source.is_int8(name)),
        });
    }
    let mut metadata = source.metadata().clone();
    metadata.insert(MARK.into(), INT8.into());
    let mut work = Work { source, threads, scale: None, groups: BTreeMap::new() };
    let (mut done, total) = (0, plan.len());
    stream(out, &plan, &metadata, &mut |planned| {
        let tensor = work.tensor(planned, rounds(&planned.name))?;
        done += 1;
        progress(done, total)?;
        Ok(tensor)
    })?;
    let written = |p: &Planned| (p.shape.numel() * p.dtype.size()) as u64;
    let layers: usize = work.groups.values().map(|g| g.layers).sum();
    Ok(Report {
        copied: total - 2 * layers,
        bytes: [source.bytes(), plan.iter().map(written).sum()],
        groups: work.groups.into_iter().map(|(name, sums)| sums.group(name)).collect(),
    })
}

struct Work<'a> {
    source: &'a WeightSource,
    threads: usize,
    /// Of the tensor before, whose turn comes next.
    scale: Option<(String, HostTensor)>,
    groups: BTreeMap<String, Sums>,
}

/// What the layers of one kind lost, so far.
#[derive(Default)]
pub(crate) struct Sums {
    pub layers: usize,
    weights: u64,
    squares: [f64; 2],
}

impl Sums {
    /// Counts one more layer.
    pub fn add(&mut self, weights: u64, squares: [f64; 2]) {
        self.layers += 1;
        self.weights += weights;
        self.squares = [self.squares[0] + squares[0], self.squares[1] + squares[1]];
    }

    pub fn group(self, name: String) -> Group {
        let [error, value] = self.squares;
        let error = (error / value.max(f64::MIN_POSITIVE)).sqrt();
        Group { name, layers: self.layers, weights: self.weights, error }
    }
}

impl Work<'_> {
    fn tensor(&mut self, planned: &Planned, rounds: bool) -> Result<HostTensor> {
        if let Some((_, scale)) = self.scale.take_if(|(name, _)| *name == planned.name) {
            return Ok(scale);
        }
        if !rounds {
            return self.source.stored(&planned.name);
        }
        let rounded = self.source.int8(&planned.name, planned.shape.clone(), self.threads)?;
        let sums = self.groups.entry(kind(&planned.name)).or_default();
        sums.add(rounded.weight.numel() as u64, rounded.squares);
        if !rounded.squares[1].is_finite() {
            return Err(Error::NotFinite {
                file: self.source.path().to_owned(),
                tensor: planned.name.clone(),
            });
        }
        self.scale = Some((int8::scale_name(&planned.name), rounded.scale));
        Ok(rounded.weight)
    }
}

/// `transformer_blocks.attn.to_q` for `transformer_blocks.3.attn.to_q.weight`.
pub(crate) fn kind(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let number = parts.iter().position(|p| p.parse::<usize>().is_ok());
    let kept = parts.iter().enumerate().filter(|(i, part)| Some(*i) != number && **part != "weight");
    kept.map(|(_, part)| *part).collect::<Vec<_>>().join(".")
}
