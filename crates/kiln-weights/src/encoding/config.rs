//! `quantization_config`: what a model's `config.json` says about the encoding of its weights.
//!
//! transformers, diffusers and ModelOpt write it. A format that Kiln reads right passes, and its tensors are checked one by
//! one; every other one, known or not, is an error with its name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{Error, Result};

/// The metadata key under which ModelOpt stores the configuration in a file for other programs.
pub(crate) const HEADER_CONFIG: &str = "quantization_config";
const CONFIG: &str = "config.json";
/// ModelOpt's own file with the same information.
const MODELOPT_CONFIG: &str = "hf_quant_config.json";

/// The `quantization_config` of a component in a format that Kiln reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct QuantizationConfig {
    /// What the names of the component's tensors begin with.
    prefix: String,
    method: Method,
    tile: Option<[usize; 2]>,
}

/// The formats that Kiln reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Method {
    /// transformers' fp8.
    #[default]
    Fp8,
    /// fp8 or nvfp4 of ModelOpt or diffusers.
    ModelOpt,
    /// Other fp8 and int8 files, with a `weight_scale` for every layer.
    Scaled,
}

impl QuantizationConfig {
    /// Reads the configuration in a component's folder, if it has one.
    pub fn read(folder: &Path) -> Result<Option<QuantizationConfig>> {
        // An unreadable configuration is an error where the model is opened.
        let json = |name: &str| serde_json::from_slice::<Value>(&fs::read(folder.join(name)).ok()?).ok();
        let config = json(CONFIG).and_then(|config| quantization(&config).cloned());
        let modelopt = || json(MODELOPT_CONFIG).map(|config| (config, MODELOPT_CONFIG));
        let Some((config, name)) = config.map(|config| (config, CONFIG)).or_else(modelopt) else {
            return Ok(None);
        };
        QuantizationConfig::new(&config)
            .map(Some)
            .map_err(|format| Error::foreign_quantization(folder.into(), &format, format!("`{name}`")))
    }

    /// Reads the configurations in the header of a file: those of the components that are packed into it, and its own.
    /// `file` is for messages.
    pub fn of_header(file: &Path, metadata: &BTreeMap<String, String>) -> Result<Vec<QuantizationConfig>> {
        let mut configs = Vec::new();
        for (key, text) in metadata {
            let folder = key.strip_suffix(CONFIG).and_then(|rest| rest.strip_suffix('/'));
            // Other entries may be large.
            if folder.is_none() && key != HEADER_CONFIG {
                continue;
            }
            let Ok(json) = serde_json::from_str::<Value>(text) else { continue };
            let (prefix, config) = match folder {
                Some(folder) => (format!("{folder}."), quantization(&json)),
                None => (String::new(), Some(&json).filter(|json| json.is_object())),
            };
            let Some(config) = config else { continue };
            let config = QuantizationConfig::new(config)
                .map_err(|format| Error::foreign_quantization(file.into(), &format, format!("`{key}`")))?;
            configs.push(QuantizationConfig { prefix, ..config });
        }
        Ok(configs)
    }

    /// Whether ModelOpt wrote the header for other programs, so that the order of nvfp4 scales is open.
    pub fn is_modelopt_header(metadata: &BTreeMap<String, String>) -> bool {
        let config = metadata.get(HEADER_CONFIG).and_then(|text| serde_json::from_str::<Value>(text).ok());
        config.is_some_and(|config| method(&config) == "modelopt")
    }

    /// What the names of the component's tensors begin with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Rows and columns of values that share a scale, if it says so.
    pub fn tile(&self) -> Option<[usize; 2]> {
        self.tile
    }

    /// Whether nvfp4 is in ModelOpt's order.
    pub fn has_modelopt_order(&self) -> bool {
        self.method == Method::ModelOpt
    }

    /// Understands a `quantization_config`; the error names a format that Kiln does not read.
    fn new(config: &Value) -> Result<QuantizationConfig, String> {
        let with = |method| Ok(QuantizationConfig { method, ..QuantizationConfig::default() });
        match method(config).as_str() {
            "fp8" | "finegrained_fp8" => {
                Ok(QuantizationConfig { tile: tile(config)?, ..QuantizationConfig::default() })
            }
            "bfl" => with(Method::ModelOpt),
            "fbgemm_fp8" => with(Method::Scaled),
            "modelopt" => modelopt(config).and_then(|()| with(Method::ModelOpt)),
            "compressed-tensors" => compressed_tensors(config).and_then(|()| with(Method::Scaled)),
            "bitsandbytes" => Err(bitsandbytes(config)),
            "" => Err("an unnamed method".into()),
            other => Err(match text(config, &["bits", "weight_bits", "quant_type", "weights"]) {
                Some(detail) => format!("{other} ({detail})"),
                None => other.to_owned(),
            }),
        }
    }
}

/// The `quantization_config` in a `config.json`. MLX calls it `quantization`.
fn quantization(config: &Value) -> Option<&Value> {
    let found = [HEADER_CONFIG, "quantization"].iter().find_map(|key| config.get(key));
    found.filter(|config| config.as_object().is_some_and(|fields| !fields.is_empty()))
}

/// The name of the method, in lower case; empty if it is unknown.
fn method(config: &Value) -> String {
    let has = |key: &str| config.get(key).is_some();
    let named = config.get("quant_method").and_then(Value::as_str).map(str::to_ascii_lowercase);
    match named.as_deref() {
        Some("modelopt" | "modelopt_fp4" | "modelopt_mixed") => "modelopt".into(),
        Some(name) => name.replace("compressed_tensors", "compressed-tensors"),
        None if has("load_in_4bit") || has("load_in_8bit") => "bitsandbytes".into(),
        None if has("quant_algo") || has("producer") => "modelopt".into(),
        None if has("group_size") && has("bits") => "mlx".into(),
        None => String::new(),
    }
}

/// The first of these fields that holds a text or a number.
fn text(config: &Value, keys: &[&str]) -> Option<String> {
    keys.iter().find_map(|key| match config.get(key)? {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(format!("{number} {key}")),
        _ => None,
    })
}

/// `weight_block_size`: rows and columns. Absent, the shapes of the scales say it.
fn tile(config: &Value) -> Result<Option<[usize; 2]>, String> {
    let Some(size) = config.get("weight_block_size").filter(|size| !size.is_null()) else { return Ok(None) };
    let sides: Option<Vec<usize>> =
        size.as_array().and_then(|sides| sides.iter().map(|n| usize::try_from(n.as_u64()?).ok()).collect());
    match sides.as_deref() {
        Some(&[rows, cols]) if rows > 0 && cols > 0 && cols.is_multiple_of(8) => Ok(Some([rows, cols])),
        _ => Err(format!("fp8 in blocks of {size}")),
    }
}

/// ModelOpt's algorithms whose tensors are plain fp8 or nvfp4 with scales.
const MODELOPT_READ: [&str; 6] =
    ["fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "nvfp4", "w4a16_nvfp4", "mixed_precision"];

fn modelopt(config: &Value) -> Result<(), String> {
    let details = config.get("quantization").unwrap_or(config);
    match text(details, &["quant_algo"]) {
        Some(algorithm) if MODELOPT_READ.contains(&algorithm.to_ascii_lowercase().as_str()) => Ok(()),
        Some(algorithm) => Err(format!("ModelOpt {algorithm}")),
        None if details.get("quant_algo").is_some_and(Value::is_null) => Ok(()),
        // diffusers' own configuration: ModelOpt's quantizers are in the file.
        None => match text(config, &["quant_type"]) {
            Some(kind) => Err(format!("ModelOpt's own quantizers ({kind})")),
            None => Err("ModelOpt, by an algorithm it does not name".into()),
        },
    }
}

/// compressed-tensors' formats with plain values and a `weight_scale`.
const COMPRESSED_READ: [&str; 4] = ["dense", "float-quantized", "int-quantized", "naive-quantized"];

fn compressed_tensors(config: &Value) -> Result<(), String> {
    let groups = config.get("config_groups").and_then(Value::as_object);
    let formats = groups.into_iter().flat_map(|groups| groups.values()).chain([config]);
    let formats: Vec<&str> = formats.filter_map(|group| group.get("format")?.as_str()).collect();
    let unread =
        formats.iter().find(|format| **format != "mixed-precision" && !COMPRESSED_READ.contains(format));
    let sparse =
        config.get("sparsity_config").and_then(|sparsity| sparsity.get("format")).and_then(Value::as_str);
    let transformed = config.get("transform_config").and_then(|transforms| transforms.get("config_groups"));
    if let Some(format) = unread.copied().or(sparse.filter(|format| *format != "dense")) {
        return Err(format!("compressed-tensors ({format})"));
    }
    match transformed.and_then(Value::as_object) {
        Some(transforms) if !transforms.is_empty() => Err("compressed-tensors with transforms".into()),
        _ if formats.is_empty() => Err("compressed-tensors in a format it does not name".into()),
        _ => Ok(()),
    }
}

fn bitsandbytes(config: &Value) -> String {
    let is_set = |key: &str| config.get(key).and_then(Value::as_bool).unwrap_or(false);
    match text(config, &["bnb_4bit_quant_type"]) {
        Some(kind) if is_set("load_in_4bit") || is_set("_load_in_4bit") => format!("bitsandbytes {kind}"),
        _ if is_set("load_in_8bit") || is_set("_load_in_8bit") => "bitsandbytes int8".into(),
        _ => "bitsandbytes".into(),
    }
}
