//! Quantization of a transformer's linear layers to int8, written to a new file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use kiln_tensor::{DType, HostTensor};

use crate::save::{TensorSpec, stream};
use crate::{Error, LinearPrecision, Result, WeightSource, export, int8};

/// The metadata key of the precision in which a file's linear layers are meant to be used.
pub const PRECISION_KEY: &str = "kiln.linear";
/// The key's value in files that [`quantize`] wrote.
const INT8: &str = int8::NAME;

impl WeightSource {
    /// The precision that suits the file: int8 if [`quantize`] wrote it, fp8 if it has such matrices and the device
    /// has fp8 matmuls.
    pub fn preferred_precision(&self, threads: usize, has_fp8: bool) -> LinearPrecision {
        let in_fp8 = |name: &str| name.strip_suffix(".weight").is_some_and(|module| self.stores_fp8(module));
        match self.metadata().get(PRECISION_KEY).map(String::as_str) {
            Some(INT8) => LinearPrecision::Int8 { threads },
            _ if has_fp8 && self.names().any(in_fp8) => LinearPrecision::StoredFp8,
            _ => LinearPrecision::Float,
        }
    }

    /// The memory that [`LinearPrecision::Int8`] takes beside the files: one byte for every weight that is not stored in
    /// int8.
    pub fn int8_bytes_to_quantize(&self) -> u64 {
        self.count_weights(|name| is_quantizable(self, name))
    }

    /// The memory of all int8 weights, if those that are stored in int8 are copied, too.
    pub fn int8_bytes(&self) -> u64 {
        self.count_weights(|name| {
            is_quantizable(self, name) || self.is_int8(name) && int8::is_block_layer(name)
        })
    }

    fn count_weights(&self, counts: impl Fn(&str) -> bool) -> u64 {
        let counted = self.names().filter(|name| counts(name)).filter_map(|name| self.entry(name));
        counted.map(|(_, shape)| shape.numel() as u64).sum()
    }
}

/// Whether `name` is a float matrix of a layer that is used in int8.
pub(crate) fn is_quantizable(source: &WeightSource, name: &str) -> bool {
    let Some((dtype, shape)) = source.entry(name) else { return false };
    let float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64);
    let values = float || dtype.is_fp8() || source.packed_format(name).is_some();
    values && shape.rank() == 2 && name.strip_suffix(".weight").is_some_and(int8::is_block_layer)
}

/// The quantization error of the layers of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerGroup {
    /// The layers' name, without the number of the block.
    pub name: String,
    /// The name of the type they were written in.
    pub storage: &'static str,
    /// How many there are.
    pub layers: usize,
    /// Their weights.
    pub weights: u64,
    /// `‖quantized - weight‖ / ‖weight‖` over all of them.
    pub error: f64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The quantized layers, by kind.
    pub groups: Vec<LayerGroup>,
    /// The layers that were to be quantized, by the type they were written in: another one than was asked for if their
    /// rows are no whole blocks of it.
    pub layers: BTreeMap<&'static str, usize>,
    /// Other tensors that were written in another type than the source's: how many, by both types.
    pub changed: BTreeMap<(&'static str, &'static str), usize>,
    /// Tensors that were not quantized.
    pub copied: usize,
    /// Bytes of all tensors before and after.
    pub bytes: [u64; 2],
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.groups.iter().map(|g| g.name.len()).max().unwrap_or(0);
        for LayerGroup { name, layers, weights, error, .. } in &self.groups {
            let millions = *weights as f64 / 1e6;
            writeln!(
                f,
                "{name:width$}  {layers:3} layers  {millions:8.1} M weights  {:.2} % off",
                100.0 * error
            )?;
        }
        for ((before, after), count) in &self.changed {
            writeln!(f, "{count} tensors written as {after}, were {before}")?;
        }
        write!(f, "{} tensors kept as they are", self.copied - self.changed.values().sum::<usize>())
    }
}

/// Writes the tensors of `source` to the file `out`, the linear layers inside the transformer's blocks as int8 rows: `X` as
/// i8 beside `X_scale`. Only one tensor at a time is in memory. `progress` gets the number of tensors done and the
/// total; an error that it returns cancels the work and leaves no file behind.
///
/// Weights without such layers, or whose layers are int8 already, are an error.
pub fn quantize(
    source: &WeightSource,
    out: &Path,
    threads: usize,
    progress: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<Report> {
    let is_quantizable = |name: &str| is_quantizable(source, name);
    let (mut plan, mut changed) = (Vec::new(), BTreeMap::new());
    for name in source.names() {
        let Some((dtype, shape)) = source.entry(name) else { continue };
        let quantized = is_quantizable(name);
        let dtype = if quantized {
            DType::I8
        } else if let Some(format) = source.packed_format(name) {
            // Packed tensors outside of the blocks are written dequantized.
            *changed.entry((format.name(), DType::F32.name())).or_default() += 1;
            DType::F32
        } else {
            dtype
        };
        let (name, shape) = (name.to_owned(), shape.clone());
        let rows = shape.rows();
        let scale = TensorSpec { name: int8::scale_name(&name), dtype: DType::F32, shape: [rows].into() };
        plan.push(TensorSpec { name, dtype, shape });
        if quantized {
            plan.push(scale);
        }
    }
    if !source.names().any(is_quantizable) {
        return Err(Error::NothingToQuantize {
            file: source.path().to_owned(),
            already_int8: source.names().any(|name| source.is_int8(name)),
        });
    }
    let mut metadata = export::kept_metadata(source);
    metadata.insert(PRECISION_KEY.into(), INT8.into());
    let mut quantizer = Quantizer { source, threads, next_scale: None, groups: BTreeMap::new() };
    let (mut done, total) = (0, plan.len());
    stream(out, &plan, &metadata, &mut |spec| {
        let tensor = quantizer.tensor(spec, is_quantizable(&spec.name))?;
        done += 1;
        progress(done, total)?;
        Ok(tensor)
    })?;
    let written = |spec: &TensorSpec| (spec.shape.numel() * spec.dtype.size()) as u64;
    let layers: usize = quantizer.groups.values().map(|g| g.layers).sum();
    Ok(Report {
        copied: total - 2 * layers,
        bytes: [source.bytes(), plan.iter().map(written).sum()],
        groups: quantizer.groups.into_iter().map(|(name, sums)| sums.group(name, INT8)).collect(),
        layers: BTreeMap::from([(INT8, layers)]),
        changed,
    })
}

/// Produces the tensors to write, one after the other.
struct Quantizer<'a> {
    source: &'a WeightSource,
    threads: usize,
    /// Name and scales of the tensor before, which are written next.
    next_scale: Option<(String, HostTensor)>,
    groups: BTreeMap<String, ErrorSums>,
}

/// The quantization error of the layers of one kind, so far.
#[derive(Default)]
pub(crate) struct ErrorSums {
    pub layers: usize,
    weights: u64,
    squares: [f64; 2],
}

impl ErrorSums {
    /// Adds a layer.
    pub fn add(&mut self, weights: u64, squares: [f64; 2]) {
        self.layers += 1;
        self.weights += weights;
        self.squares = [self.squares[0] + squares[0], self.squares[1] + squares[1]];
    }

    pub fn group(self, name: String, storage: &'static str) -> LayerGroup {
        let [error, value] = self.squares;
        let error = (error / value.max(f64::MIN_POSITIVE)).sqrt();
        LayerGroup { name, storage, layers: self.layers, weights: self.weights, error }
    }
}

impl Quantizer<'_> {
    fn tensor(&mut self, spec: &TensorSpec, quantized: bool) -> Result<HostTensor> {
        if let Some((_, scale)) = self.next_scale.take_if(|(name, _)| *name == spec.name) {
            return Ok(scale);
        }
        if !quantized {
            return self.source.stored(&spec.name);
        }
        let quantized = self.source.int8(&spec.name, spec.shape.clone(), self.threads)?;
        let sums = self.groups.entry(layer_kind(&spec.name)).or_default();
        sums.add(quantized.weight.numel() as u64, quantized.squares);
        if !quantized.squares[1].is_finite() {
            return Err(Error::NotFinite { file: self.source.path().to_owned(), tensor: spec.name.clone() });
        }
        self.next_scale = Some((int8::scale_name(&spec.name), quantized.scale));
        Ok(quantized.weight)
    }
}

/// `transformer_blocks.attn.to_q` for `transformer_blocks.3.attn.to_q.weight`.
pub(crate) fn layer_kind(name: &str) -> String {
    let segments: Vec<&str> = name.split('.').collect();
    let number = segments.iter().position(|segment| segment.parse::<usize>().is_ok());
    let kept = segments.iter().enumerate();
    let kept = kept.filter(|(i, segment)| Some(*i) != number && **segment != "weight");
    kept.map(|(_, segment)| *segment).collect::<Vec<_>>().join(".")
}
