//! Quantization of a transformer's linear layers to int8, written to a new file.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_tensor::{DType, HostTensor, Rotation};

use crate::export::metadata::{PRECISION_KEY, kept_metadata};
use crate::export::report::{ErrorSums, Report, layer_kind};
use crate::save::{TensorSpec, stream};
use crate::{Error, LinearPrecision, Result, WeightSource, int8};

/// The key's value in files that [`quantize`] wrote.
const INT8: &str = int8::NAME;

impl WeightSource {
    /// The precision that suits the file: int8 if [`quantize`] wrote it; as stored if it has matrices in fp8 or nvfp4, and the
    /// device has such matmuls.
    pub fn preferred_precision(&self, threads: usize, has_fp8: bool, has_nvfp4: bool) -> LinearPrecision {
        let any = |stores: &dyn Fn(&str) -> bool| {
            self.names().filter_map(|name| name.strip_suffix(".weight")).any(stores)
        };
        match self.metadata().get(PRECISION_KEY).map(String::as_str) {
            Some(INT8) => LinearPrecision::Int8 { threads },
            _ if has_nvfp4 && any(&|module| self.stores_nvfp4(module)) => {
                LinearPrecision::Stored { nvfp4: true }
            }
            _ if has_fp8 && any(&|module| self.stores_fp8(module)) => {
                LinearPrecision::Stored { nvfp4: false }
            }
            _ => LinearPrecision::Float,
        }
    }

    /// The memory that [`LinearPrecision::Int8`] takes beside the files: one byte for every weight that is not stored in
    /// int8.
    pub fn int8_bytes_to_quantize(&self) -> u64 {
        self.count_weights(|name| self.is_quantizable(name))
    }

    /// The memory of all int8 weights, if those that are stored in int8 are copied, too.
    pub fn int8_bytes(&self) -> u64 {
        self.count_weights(|name| {
            self.is_quantizable(name) || self.is_int8(name) && int8::is_block_layer(name)
        })
    }

    fn count_weights(&self, counts: impl Fn(&str) -> bool) -> u64 {
        let counted = self.names().filter(|name| counts(name)).filter_map(|name| self.entry(name));
        counted.map(|(_, shape)| shape.numel() as u64).sum()
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
    let is_quantizable = |name: &str| source.is_quantizable(name);
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
    let mut metadata = kept_metadata(source);
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

impl Quantizer<'_> {
    fn tensor(&mut self, spec: &TensorSpec, quantized: bool) -> Result<HostTensor> {
        if let Some((_, scale)) = self.next_scale.take_if(|(name, _)| *name == spec.name) {
            return Ok(scale);
        }
        if !quantized {
            return self.source.stored(&spec.name);
        }
        let quantized = self.source.int8(&spec.name, spec.shape.clone(), Rotation::None, self.threads)?;
        let sums = self.groups.entry(layer_kind(&spec.name)).or_default();
        sums.add(quantized.weight.numel() as u64, quantized.squares);
        if !quantized.squares[1].is_finite() {
            return Err(Error::NotFinite { file: self.source.path().to_owned(), tensor: spec.name.clone() });
        }
        self.next_scale = Some((int8::scale_name(&spec.name), quantized.scale));
        Ok(quantized.weight)
    }
}
