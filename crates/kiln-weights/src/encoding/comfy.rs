//! ComfyUI's description of quantized layers: `X.comfy_quant`, or a list in the header.

use std::collections::BTreeMap;

use kiln_tensor::DType;
use serde::Deserialize;

use super::Tensors;
use crate::file::WeightFile;
use crate::{Error, Result};

/// The suffix of a layer's description, JSON in a tensor of bytes.
pub(super) const SUFFIX: &str = ".comfy_quant";
/// The metadata key of the list of layers.
pub(crate) const METADATA: &str = "_quantization_metadata";
/// The supported formats, and the dtypes of their weights. ModelOpt writes such lists, too, and calls its format `fp8`.
const SUPPORTED: [(&str, DType); 5] = [
    ("float8_e4m3fn", DType::F8E4M3),
    ("float8_e5m2", DType::F8E5M2),
    ("fp8", DType::F8E4M3),
    ("nvfp4", DType::U8),
    ("int8_tensorwise", DType::I8),
];

/// The description of a layer.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "Description")]
pub(super) struct ComfyQuant {
    format: String,
    /// Whether the weight was rotated before it was quantized.
    rotated: bool,
    /// Whether activations must not be rounded for the product.
    pub full_precision: bool,
}

/// A description as it is written: in full, or the format alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum Description {
    Format(String),
    Full {
        format: String,
        #[serde(default)]
        convrot: bool,
        #[serde(default)]
        params: Option<Parameters>,
        #[serde(default)]
        full_precision_matrix_mult: bool,
    },
}

#[derive(Deserialize)]
struct Parameters {
    #[serde(default)]
    convrot: bool,
}

impl From<Description> for ComfyQuant {
    fn from(description: Description) -> ComfyQuant {
        match description {
            Description::Format(format) => ComfyQuant { format, rotated: false, full_precision: false },
            Description::Full { format, convrot, params, full_precision_matrix_mult } => ComfyQuant {
                format,
                rotated: convrot || params.is_some_and(|params| params.convrot),
                full_precision: full_precision_matrix_mult,
            },
        }
    }
}

impl ComfyQuant {
    pub fn is_nvfp4(&self) -> bool {
        self.format == "nvfp4"
    }

    /// What keeps Kiln from reading such a layer, whose weight has this dtype and perhaps scales.
    pub fn problem(&self, dtype: DType, has_scale: bool) -> Option<String> {
        let format = &self.format;
        let Some((_, expected)) = SUPPORTED.iter().find(|(name, _)| name == format) else {
            let supported: Vec<&str> = SUPPORTED.iter().map(|(name, _)| *name).collect();
            return Some(format!("is stored as `{format}`; Kiln reads {}", supported.join(", ")));
        };
        if self.rotated {
            return Some(format!("is stored as `{format}` after a rotation, which Kiln can't undo"));
        }
        if dtype != *expected {
            return Some(format!("is said to be `{format}`, but its weight is {dtype}"));
        }
        (!has_scale).then(|| format!("is said to be `{format}`, but has no scale"))
    }
}

/// The descriptions of all layers that have one, by module.
pub(super) fn read(
    tensors: &Tensors,
    files: &[WeightFile],
    metadata: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, ComfyQuant>> {
    let mut layers = BTreeMap::new();
    if let Some(text) = metadata.get(METADATA) {
        layers = listed(text, tensors).map_err(|e| Error::UnsupportedQuantization {
            file: files.first().map(|file| file.path.clone()).unwrap_or_default(),
            module: METADATA.to_owned(),
            problem: format!("is not ComfyUI's list of quantized layers: {e}"),
        })?;
    }
    for (name, (file, entry)) in tensors {
        let Some(module) = name.strip_suffix(SUFFIX) else { continue };
        let file = &files[*file];
        // Some writers pad the text with zeros.
        let text = file.bytes(entry).trim_ascii_end();
        let end = text.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
        let quant = serde_json::from_slice(&text[..end]).map_err(|e| Error::UnsupportedQuantization {
            file: file.path.clone(),
            module: module.to_owned(),
            problem: format!("has a `{name}` that is not JSON of its format: {e}"),
        })?;
        layers.insert(module.to_owned(), quant);
    }
    Ok(layers)
}

/// The layers of the list that are in the file. Some writers leave out a prefix that all names have.
fn listed(text: &str, tensors: &Tensors) -> serde_json::Result<BTreeMap<String, ComfyQuant>> {
    #[derive(Deserialize)]
    struct Listing {
        layers: BTreeMap<String, ComfyQuant>,
    }
    let Listing { layers } = serde_json::from_str(text)?;
    let of_module = |module: &str| {
        let shorter = module.match_indices('.').map(|(dot, _)| &module[dot + 1..]);
        std::iter::once(module).chain(shorter).find_map(|name| layers.get(name))
    };
    let modules = tensors.keys().filter_map(|name| name.strip_suffix(".weight"));
    Ok(modules.filter_map(|module| Some((module.to_owned(), of_module(module)?.clone()))).collect())
}
