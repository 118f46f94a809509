//! Finds the scales of every layer.

use std::collections::{BTreeMap, BTreeSet};

use kiln_tensor::DType;

use super::comfy::{self, ComfyQuant};
use super::nvfp4::{Order, Origin};
use super::read::read_scales;
use super::{
    Encoding, Fp8Scales, NvFp4Scales, QuantizationConfig, ScaleLayout, TensorEntry, TensorRef, Tensors,
    foreign,
};
use crate::file::WeightFile;
use crate::{Error, Result, int8};

const WEIGHT: &str = ".weight";
/// Tensors that a quantized layer may have beside its weight.
const SCALE: &str = ".weight_scale";
const SCALES: [&str; 3] = [SCALE, ".weight_scale_inv", ".scale_weight"];
const GLOBAL_SCALE: &str = ".weight_scale_2";
/// Scales of activations.
const IGNORED: [&str; 5] =
    [".input_scale", ".scale_input", ".activation_scale", ".output_scale", ".input_zero_point"];
/// Scales of a language model's cache, which a text encoder doesn't have.
const CACHE_SCALES: [&str; 3] = [".k_scale", ".v_scale", ".q_scale"];
/// The tensor that marks files of earlier versions of ComfyUI.
const MARKER: &str = "scaled_fp8";

/// Finds the scales of every layer, and removes them from the list of tensors.
///
/// The scales of int8 rows stay in it: they are tensors of the model, sliced as their weight is.
pub(crate) fn attach_scales(
    tensors: &mut Tensors,
    files: &[WeightFile],
    metadata: &BTreeMap<String, String>,
    configs: &[QuantizationConfig],
) -> Result<()> {
    if let Some((format, tensor)) = foreign::find(tensors, metadata) {
        let file = tensors.get(tensor).map(|(file, _)| files[*file].path.clone()).unwrap_or_default();
        return Err(Error::foreign_quantization(file, format, format!("tensor `{tensor}`")));
    }
    let file = Layers { tensors: &*tensors, files, quants: comfy::read(tensors, files, metadata)?, configs };
    file.check_descriptions()?;
    let order = file.nvfp4_order(metadata)?;
    let (mut encodings, mut used) = (Vec::new(), BTreeSet::new());
    for module in file.modules() {
        if let Some((encoding, scales)) = file.encoding(&module, order)? {
            encodings.push((format!("{module}{WEIGHT}"), encoding));
            used.extend(scales);
        }
    }
    for (name, encoding) in encodings {
        let Some((_, entry)) = tensors.get_mut(&name) else { continue };
        if let (Encoding::NvFp4(_), &[rows, bytes]) = (&encoding, entry.shape.dims()) {
            entry.shape = [rows, bytes.saturating_mul(2)].into();
        }
        entry.encoding = encoding;
    }
    tensors.retain(|name, _| !used.contains(name) && !is_ignored(name));
    Ok(())
}

/// Whether a tensor has no influence on the values of weights.
fn is_ignored(name: &str) -> bool {
    name.rsplit('.').next() == Some(MARKER)
        || name.ends_with(comfy::SUFFIX)
        || IGNORED.iter().any(|suffix| name.ends_with(suffix))
        || name.contains("self_attn.") && CACHE_SCALES.iter().any(|suffix| name.ends_with(suffix))
}

/// The tensors of a file, by layer.
struct Layers<'f> {
    tensors: &'f Tensors,
    files: &'f [WeightFile],
    quants: BTreeMap<String, ComfyQuant>,
    configs: &'f [QuantizationConfig],
}

impl Layers<'_> {
    /// The layers whose weight may need scales, or that have some.
    fn modules(&self) -> BTreeSet<String> {
        let suffixes = [SCALES[0], SCALES[1], SCALES[2], GLOBAL_SCALE];
        let module = |(name, (_, entry)): (&String, &(usize, TensorEntry))| match name.strip_suffix(WEIGHT) {
            Some(module) => is_one_byte(entry).then(|| module.to_owned()),
            None => suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).map(str::to_owned),
        };
        self.tensors.iter().filter_map(module).collect()
    }

    fn tensor(&self, module: &str, suffix: &str) -> Option<TensorRef> {
        let name = format!("{module}{suffix}");
        let (file, entry) = self.tensors.get(&name)?;
        Some(TensorRef { file: *file, name, entry: entry.clone() })
    }

    fn error(&self, module: &str, problem: impl Into<String>) -> Error {
        let file = self.tensors.get(&format!("{module}{WEIGHT}")).map_or(0, |(file, _)| *file);
        Error::UnsupportedQuantization {
            file: self.files.get(file).map(|f| f.path.clone()).unwrap_or_default(),
            module: module.to_owned(),
            problem: problem.into(),
        }
    }

    fn check_descriptions(&self) -> Result<()> {
        for (module, quant) in &self.quants {
            let Some(weight) = self.tensor(module, WEIGHT) else { continue };
            let has_scale = SCALES.iter().any(|suffix| self.tensor(module, suffix).is_some());
            if let Some(problem) = quant.problem(weight.entry.dtype, has_scale) {
                return Err(self.error(module, problem));
            }
        }
        Ok(())
    }

    fn config(&self, module: &str) -> Option<&QuantizationConfig> {
        self.configs.iter().find(|config| module.starts_with(config.prefix()))
    }

    /// The order of all nvfp4 layers; `None` if there are none.
    fn nvfp4_order(&self, metadata: &BTreeMap<String, String>) -> Result<Option<Order>> {
        let layers: Vec<_> =
            self.modules().into_iter().filter_map(|module| self.nvfp4_layer(module)).collect();
        if layers.is_empty() {
            return Ok(None);
        }
        let is_marked = |(module, ..): &&(String, [usize; 2], TensorRef)| {
            self.quants.get(module).is_some_and(ComfyQuant::is_nvfp4)
        };
        let marked = layers.iter().filter(is_marked).count();
        if let Some((module, ..)) = layers.iter().find(|layer| marked > 0 && !is_marked(layer)) {
            return Err(self.error(module, "is nvfp4 without ComfyUI's mark, which other layers have"));
        }
        let is_listed = metadata.get(comfy::METADATA).is_some_and(|list| list.contains("nvfp4"));
        if let (true, 0, [(module, ..), ..]) = (is_listed, marked, &layers[..]) {
            return Err(self.error(module, "is nvfp4, and the header lists such layers under other names"));
        }
        let origin = Origin {
            comfyui: marked > 0,
            fused: self.tensors.keys().any(|name| name.contains("_attn.qkv.")),
            modelopt_header: QuantizationConfig::is_modelopt_header(metadata),
            modelopt_config: self.configs.iter().any(QuantizationConfig::has_modelopt_order),
        };
        let shapes =
            layers.iter().map(|(module, shape, blocks)| (module.as_str(), *shape, &blocks.entry.shape));
        let order = origin.order(shapes);
        order.map(Some).map_err(|(module, problem)| self.error(module, format!("has {problem}")))
    }

    /// The name, shape and block scales of an nvfp4 layer.
    fn nvfp4_layer(&self, module: String) -> Option<(String, [usize; 2], TensorRef)> {
        let weight = self.tensor(&module, WEIGHT)?.entry;
        // ComfyUI stored e4m3 scales as plain bytes for a time.
        let is_e4m3 = |scales: &TensorRef| match scales.entry.dtype {
            DType::F8E4M3 => true,
            DType::U8 => self.quants.get(&module).is_some_and(ComfyQuant::is_nvfp4),
            _ => false,
        };
        let blocks = self.tensor(&module, SCALE).filter(is_e4m3)?;
        match weight.shape.dims() {
            &[rows, bytes] if weight.dtype == DType::U8 => {
                Some((module, [rows, bytes.saturating_mul(2)], blocks))
            }
            _ => None,
        }
    }

    /// The encoding of a layer's weight, and the tensors that are used up; `None` if nothing changes.
    fn encoding(&self, module: &str, order: Option<Order>) -> Result<Option<Attached>> {
        let Some(TensorRef { entry: weight, .. }) = self.tensor(module, WEIGHT) else { return Ok(None) };
        if let (Some(order), Some((.., blocks))) = (order, self.nvfp4_layer(module.to_owned())) {
            let global = self.global_scale(module)?;
            let used = vec![blocks.name.clone(), global.name.clone()];
            let full_precision = self.quants.get(module).is_some_and(|quant| quant.full_precision);
            let scales = NvFp4Scales { blocks, global, order, full_precision };
            return Ok(Some((Encoding::NvFp4(Box::new(scales)), used)));
        }
        let scale = self.only_scale(module, &weight)?;
        if !matches!(weight.encoding, Encoding::Dense) {
            return self.without_effect(module, weight, scale);
        }
        match (weight.dtype, scale) {
            (DType::F8E4M3 | DType::F8E5M2, scale) => self.fp8(module, &weight, scale),
            (DType::I8, Some(scale)) if scale.name == format!("{module}{SCALE}") => {
                self.check_int8(module, &weight, &scale)
            }
            (DType::I8 | DType::U8, Some(_)) => Err(self.error(module, unknown_bytes(weight.dtype))),
            (_, scale) => self.without_effect(module, weight, scale),
        }
    }

    /// The scale of all values of an nvfp4 layer.
    fn global_scale(&self, module: &str) -> Result<TensorRef> {
        match self.tensor(module, GLOBAL_SCALE) {
            Some(global) if global.entry.shape.numel() == 1 && is_float(global.entry.dtype) => Ok(global),
            Some(TensorRef { name, entry, .. }) => {
                let problem =
                    format!("has {} of shape {} in `{name}`, expected one float", entry.dtype, entry.shape);
                Err(self.error(module, problem))
            }
            None => Err(self.error(module, format!("is nvfp4, but there is no `{module}{GLOBAL_SCALE}`"))),
        }
    }

    /// The scales of a layer that is not nvfp4. There may be one tensor of them.
    fn only_scale(&self, module: &str, weight: &TensorEntry) -> Result<Option<TensorRef>> {
        let scales = SCALES.iter().filter_map(|suffix| self.tensor(module, suffix));
        let mut scales: Vec<_> = scales.chain(self.tensor(module, GLOBAL_SCALE)).collect();
        let problem = match &scales[..] {
            [] => return Ok(None),
            [scale] if !is_float(scale.entry.dtype) => {
                format!("has scales of dtype {} (`{}`), expected floats", scale.entry.dtype, scale.name)
            }
            [scale] if !scale.name.ends_with(GLOBAL_SCALE) => return Ok(scales.pop()),
            _ => {
                let names: Vec<_> = scales.iter().map(|scale| format!("`{}`", scale.name)).collect();
                let names = names.join(" and ");
                format!("is {} with the scales {names}, a combination that Kiln does not know", weight.dtype)
            }
        };
        Err(self.error(module, problem))
    }

    fn fp8(&self, module: &str, weight: &TensorEntry, scale: Option<TensorRef>) -> Result<Option<Attached>> {
        let config = self.config(module);
        let Some(scales) = scale else {
            return match config.filter(|_| weight.shape.rank() == 2) {
                Some(_) => {
                    Err(self.error(module, "is fp8 without the scales that its configuration announces"))
                }
                None => Ok(None),
            };
        };
        let tile = config.and_then(QuantizationConfig::tile);
        let layout = ScaleLayout::new(&weight.shape, &scales.entry.shape, tile)
            .map_err(|problem| self.error(module, format!("has {problem} (`{}`)", scales.name)))?;
        let used = vec![scales.name.clone()];
        Ok(Some((Encoding::ScaledFp8(Box::new(Fp8Scales { scales, layout })), used)))
    }

    /// Checks the scales of int8 rows, which stay in the list.
    fn check_int8(&self, module: &str, weight: &TensorEntry, scale: &TensorRef) -> Result<Option<Attached>> {
        if int8::fits_rows(&weight.shape, &scale.entry.shape) {
            return Ok(None);
        }
        let (shape, found) = (&weight.shape, &scale.entry.shape);
        let problem = format!(
            "has scales of shape {found} for an int8 weight of {shape}, expected one, or one per row"
        );
        Err(self.error(module, format!("{problem} (`{}`)", scale.name)))
    }

    /// Checks that a scale beside a weight that has none changes nothing.
    fn without_effect(
        &self,
        module: &str,
        weight: TensorEntry,
        scale: Option<TensorRef>,
    ) -> Result<Option<Attached>> {
        let Some(scale) = scale else { return Ok(None) };
        if read_scales(self.files, &scale)?.iter().all(|scale| *scale == 1.0) {
            return Ok(Some((weight.encoding, vec![scale.name])));
        }
        let stored = weight.encoding.format(weight.dtype).map_or(weight.dtype.name(), |format| format.name());
        let problem = format!("has a scale (`{}`), though its weight is {stored}", scale.name);
        Err(self.error(module, format!("{problem}; Kiln does not know what it means")))
    }
}

/// The encoding of a weight, and the names of the tensors that became part of it.
type Attached = (Encoding, Vec<String>);

/// Describes a weight of bytes in no format that Kiln knows.
pub(crate) fn unknown_bytes(dtype: DType) -> String {
    format!(
        "is stored in bytes ({dtype}) of unknown meaning; Kiln reads int8 with a `weight_scale`, and nvfp4"
    )
}

fn is_float(dtype: DType) -> bool {
    dtype.is_fp8() || matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64)
}

/// Whether the weight has a dtype that needs scales or another description.
fn is_one_byte(entry: &TensorEntry) -> bool {
    let one_byte = matches!(entry.dtype, DType::F8E4M3 | DType::F8E5M2 | DType::U8 | DType::I8);
    one_byte && matches!(entry.encoding, Encoding::Dense)
}
