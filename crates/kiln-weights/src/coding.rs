//! What the bytes of a matrix mean: plain numbers, GGUF's blocks, or small floats whose scales are other tensors.
//!
//! Of the last there are several conventions, all recognised by names and shapes, layer by layer:
//!
//! | weights | scales beside `X.weight` | who writes it |
//! |---|---|---|
//! | 8-bit floats | `X.weight_scale`, one number or one a row | Black Forest Labs, ComfyUI, diffusers |
//! | 8-bit floats | `X.scale_weight`, one number; a marker `scaled_fp8` | ComfyUI before that |
//! | 8-bit floats | none | plain casts |
//! | 4-bit floats, two in a byte | `X.weight_scale`, 8-bit floats, one for 16 columns, and `X.weight_scale_2` | both below |
//!
//! Pairs of 4-bit floats and their scales come in two orders that look alike. ComfyUI's, which Black Forest Labs use, has
//! the first of a pair in the high half and the scales in tiles; ModelOpt's and diffusers' has it in the low half and the
//! scales in rows. ComfyUI's files say so by `X.comfy_quant` or in their header, or have its fused names.
//!
//! What the scales of activations (`input_scale`) are for, Kiln computes without.

use std::collections::{BTreeMap, BTreeSet};

use kiln_tensor::packed::{BlockScales, Format, Packed};
use kiln_tensor::{DType, HostTensor};
use serde::Deserialize;

use crate::file::WeightFile;
use crate::header::Entry;
use crate::{Error, Result};

/// How a tensor's values are to be had from its bytes.
#[derive(Clone, Debug)]
pub(crate) enum Coding {
    /// Elements of the tensor's type, one after the other.
    Plain,
    /// GGUF's blocks.
    Blocks(Format),
    /// 8-bit floats times a scale, or one for every row.
    Scaled(Box<Place>),
    /// 4-bit floats, two in a byte.
    Fours(Box<Fours>),
}

/// Where another tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub file: usize,
    pub name: String,
    pub entry: Entry,
}

/// The scales of 4-bit floats.
#[derive(Clone, Debug)]
pub(crate) struct Fours {
    blocks: Place,
    all: Option<Place>,
    /// ComfyUI's order of halves and scales.
    tiled: bool,
}

const WEIGHT: &str = ".weight";
/// What a quantised layer may have beside its weight.
const SCALE: &str = ".weight_scale";
const OLD_SCALE: &str = ".scale_weight";
const SECOND_SCALE: &str = ".weight_scale_2";
const ABOUT: &str = ".comfy_quant";
const UNUSED: [&str; 2] = [".input_scale", ".scale_input"];
/// Tensors that only say what kind of file it is.
const MARKERS: [&str; 1] = ["scaled_fp8"];
/// The header's word on how layers are stored.
const HEADER: &str = "_quantization_metadata";
/// The kinds of layers that are read, as ComfyUI names them.
const KINDS: [&str; 4] = ["float8_e4m3fn", "float8_e5m2", "nvfp4", "int8_tensorwise"];

type Tensors = BTreeMap<String, (usize, Entry)>;

/// Finds the scales of every layer, and takes them out of the list of tensors.
pub(crate) fn attach(
    tensors: &mut Tensors,
    files: &[WeightFile],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let small = |entry: &Entry| {
        let bytes = matches!(entry.dtype, DType::F8E4M3 | DType::F8E5M2 | DType::U8 | DType::I8);
        bytes && matches!(entry.coding, Coding::Plain)
    };
    let candidates = tensors.iter().filter(|(name, (_, entry))| small(entry) && name.ends_with(WEIGHT));
    let modules: Vec<String> =
        candidates.filter_map(|(name, _)| Some(name.strip_suffix(WEIGHT)?.to_owned())).collect();
    if modules.is_empty() {
        return Ok(());
    }
    let header = header_layers(metadata)?;
    let fused = tensors.keys().any(|name| name.contains("_attn.qkv.") || name.ends_with(ABOUT));
    let tiled = fused || metadata.contains_key(HEADER);
    let mut used = BTreeSet::new();
    for module in modules {
        let about = about(tensors, files, &module)?.or_else(|| header.get(&module).cloned());
        if let Some(about) = &about {
            let path = |file: usize| files.get(file).map(|f| f.path.clone()).unwrap_or_default();
            let file = tensors.get(&format!("{module}{WEIGHT}")).map_or(0, |(file, _)| *file);
            check(about).map_err(|what| Error::Coding { file: path(file), module: module.clone(), what })?;
        }
        let place = |suffix: &str| {
            let name = format!("{module}{suffix}");
            tensors.get(&name).map(|(file, entry)| Place { file: *file, name, entry: entry.clone() })
        };
        let scale = place(SCALE).or_else(|| place(OLD_SCALE));
        let Some((_, weight)) = tensors.get(&format!("{module}{WEIGHT}")) else { continue };
        let coding = match (weight.dtype, scale) {
            (DType::F8E4M3 | DType::F8E5M2, Some(scale)) => Coding::Scaled(Box::new(scale)),
            (DType::U8, Some(blocks)) if blocks.entry.dtype == DType::F8E4M3 && weight.shape.rank() == 2 => {
                Coding::Fours(Box::new(Fours { blocks, all: place(SECOND_SCALE), tiled }))
            }
            // Rows of integers keep their scales by name.
            _ => Coding::Plain,
        };
        let fours = matches!(coding, Coding::Fours(_));
        if !matches!(coding, Coding::Plain) {
            used.extend([SCALE, OLD_SCALE, SECOND_SCALE].map(|suffix| format!("{module}{suffix}")));
        }
        used.extend([ABOUT, UNUSED[0], UNUSED[1]].map(|suffix| format!("{module}{suffix}")));
        if let Some((_, entry)) = tensors.get_mut(&format!("{module}{WEIGHT}")) {
            entry.coding = coding;
            if fours && let &[rows, bytes] = entry.shape.dims() {
                entry.shape = [rows, bytes.saturating_mul(2)].into();
            }
        }
    }
    tensors.retain(|name, _| !used.contains(name) && !MARKERS.contains(&name.as_str()));
    Ok(())
}

/// What a file says of how a layer is stored.
#[derive(Clone, Debug, Deserialize)]
struct About {
    format: String,
    #[serde(default)]
    convrot: bool,
}

fn check(about: &About) -> Result<(), String> {
    match KINDS.contains(&about.format.as_str()) {
        true if !about.convrot => Ok(()),
        true => Err(format!("is stored as `{}` after a rotation, which Kiln can't undo", about.format)),
        false => Err(format!("is stored as `{}`; Kiln reads {}", about.format, KINDS.join(", "))),
    }
}

/// `X.comfy_quant`, JSON in a tensor of bytes.
fn about(tensors: &Tensors, files: &[WeightFile], module: &str) -> Result<Option<About>> {
    let name = format!("{module}{ABOUT}");
    let Some((file, entry)) = tensors.get(&name) else { return Ok(None) };
    let file = &files[*file];
    // Some pad the text with zeros.
    let text = file.bytes(entry).trim_ascii_end();
    let end = text.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    let broken = |e: serde_json::Error| Error::Coding {
        file: file.path.clone(),
        module: module.to_owned(),
        what: format!("has a `{name}` that is not JSON of its format: {e}"),
    };
    serde_json::from_slice(&text[..end]).map(Some).map_err(broken)
}

/// The header's list of layers; what can't be read of it is no matter, since the tensors tell the same.
fn header_layers(metadata: &BTreeMap<String, String>) -> Result<BTreeMap<String, About>> {
    #[derive(Deserialize)]
    struct Layers {
        #[serde(default)]
        layers: BTreeMap<String, About>,
    }
    let layers = metadata.get(HEADER).and_then(|text| serde_json::from_str::<Layers>(text).ok());
    Ok(layers.map(|l| l.layers).unwrap_or_default())
}

impl Coding {
    /// A name for what is stored, where the tensor's type does not say it.
    pub fn format(&self, dtype: DType) -> Option<Format> {
        match self {
            Coding::Plain => None,
            Coding::Blocks(format) => Some(*format),
            Coding::Scaled(_) if dtype == DType::F8E5M2 => Some(Format::F8E5M2),
            Coding::Scaled(_) => Some(Format::F8E4M3),
            Coding::Fours(_) => Some(Format::NvFp4),
        }
    }

    /// The tensors beside it that its values depend on.
    pub fn scales(&self) -> impl Iterator<Item = &Place> {
        let both = match self {
            Coding::Plain | Coding::Blocks(_) => [None, None],
            Coding::Scaled(scale) => [Some(&**scale), None],
            Coding::Fours(fours) => [Some(&fours.blocks), fours.all.as_ref()],
        };
        both.into_iter().flatten()
    }
}

/// The matrix `name` at `entry` of `files[file]`, which is not plain. Anything but a matrix has its last dimension as
/// columns.
pub(crate) fn packed(files: &[WeightFile], file: usize, name: &str, entry: &Entry) -> Result<Packed> {
    let of = &files[file];
    let unusable = |source| Error::Tensor { file: of.path.clone(), tensor: name.to_owned(), source };
    let Some(format) = entry.coding.format(entry.dtype) else {
        return Packed::from_dense(&of.tensor(name, entry)?).map_err(unusable);
    };
    let shape = [entry.shape.rows(), entry.shape.last()];
    let matrix = Packed::new(format, shape, of.data(entry)).map_err(unusable)?;
    match &entry.coding {
        Coding::Plain | Coding::Blocks(_) => Ok(matrix),
        Coding::Scaled(scale) => match &values(files, scale)?[..] {
            [one] => Ok(matrix.scaled(*one)),
            rows => matrix.scaled_rows(rows).map_err(unusable),
        },
        Coding::Fours(fours) => {
            let all = match &fours.all {
                None => 1.0,
                Some(all) => match values(files, all)?[..] {
                    [one] => one,
                    ref several => {
                        let what = format!("has {} factors in `{}`, expected one", several.len(), all.name);
                        return Err(Error::Coding { file: of.path.clone(), module: name.to_owned(), what });
                    }
                },
            };
            let scales = files[fours.blocks.file].data(&fours.blocks.entry);
            let mut block = BlockScales { scales, swizzled: fours.tiled, high_first: fours.tiled, all };
            // Rows that were rounded up to whole tiles are ComfyUI's for certain.
            if block.count(shape) != Some(block.scales.len()) {
                (block.swizzled, block.high_first) = (!fours.tiled, !fours.tiled);
            }
            matrix.scaled_blocks(block).map_err(unusable)
        }
    }
}

/// Scales, which may have any float type.
fn values(files: &[WeightFile], place: &Place) -> Result<Vec<f32>> {
    let file = &files[place.file];
    let tensor: HostTensor = file.tensor(&place.name, &place.entry)?;
    let values = tensor.to_f32().map(|values| values.into_owned());
    values.map_err(|source| Error::Tensor { file: file.path.clone(), tensor: place.name.clone(), source })
}
