//! Trained adapters as the tensors and metadata of a LoRA file, in the names of diffusers, ComfyUI or kohya.
//!
//! Black Forest Labs' names fuse q, k and v of a double block. Their three updates become one of the summed rank: the first
//! matrices below each other, the second ones along a diagonal, which is the same update. ai-toolkit's files have no alpha,
//! and diffusers refuses them with one: there the second matrix has the scale. diffusers refuses a LoKr with an alpha under
//! its own names, too: there the first factor has the scale.

use std::collections::BTreeMap;

use kiln_family::Family;
use kiln_tensor::{DType, HostTensor};
use serde_json::{Map, Value, json};

use crate::Component;
use crate::layout::{View, to_original};
use crate::lora::keys::flatten;

/// The names that a LoRA file is written with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoraNaming {
    /// `transformer.` and diffusers' modules, with PEFT's settings in the metadata.
    #[default]
    Diffusers,
    /// `diffusion_model.` and Black Forest Labs' modules, as ai-toolkit and ComfyUI.
    Original,
    /// `lora_unet_` and Black Forest Labs' modules, as kohya's scripts and musubi.
    Kohya,
}

/// The trained weights of one layer.
#[derive(Clone, Debug)]
pub struct TrainedModule {
    /// The model's name of the layer.
    pub layer: String,
    /// The rank of its matrices.
    pub rank: usize,
    /// The update is used with the factor `alpha / rank`.
    pub alpha: f32,
    /// f32 tensors under PEFT's names: `lora_A.weight`, `lora_B.weight`, `lora_magnitude_vector`, `lokr_w1`, …
    pub tensors: BTreeMap<String, HostTensor>,
}

/// The tensors of a file, and its metadata.
pub type LoraContents = (Vec<(String, HostTensor)>, BTreeMap<String, String>);

const DOWN: &str = "lora_A.weight";
const UP: &str = "lora_B.weight";
const MAGNITUDE: &str = "lora_magnitude_vector";
/// The first factor of a LoKr.
const KRONECKER: &str = "lokr_w1";

/// Names the tensors of a file for a transformer of `family`, and converts them to `dtype`. The error says why an adapter can't be written with these
/// names.
pub fn lora_contents(
    modules: &[TrainedModule],
    family: &'static Family,
    naming: LoraNaming,
    dtype: DType,
) -> Result<LoraContents, String> {
    let is_lora = modules.iter().all(|module| module.tensors.contains_key(DOWN));
    let mut tensors = Vec::new();
    let mut metadata = BTreeMap::new();
    if naming == LoraNaming::Diffusers {
        for module in modules {
            let name = |tensor: &str| format!("transformer.{}.{tensor}", module.layer);
            for (tensor, values) in &module.tensors {
                let scaled = match tensor.as_str() {
                    KRONECKER => Some(scale_by(values, module.alpha / module.rank as f32)?),
                    _ => None,
                };
                tensors.push((name(tensor), convert(scaled.as_ref().unwrap_or(values), dtype)?));
            }
        }
        if is_lora {
            metadata.insert("lora_adapter_metadata".into(), peft_settings(modules).to_string());
        }
        return Ok((tensors, metadata));
    }
    if !is_lora {
        return Err("a LoKr has no form for layers that these names fuse".into());
    }
    let has_alpha = naming == LoraNaming::Kohya;
    for (name, update) in fuse(modules, family, has_alpha)? {
        let (stem, [down, up]) = match naming {
            LoraNaming::Kohya => (format!("lora_unet_{}", flatten(&name)), ["lora_down", "lora_up"]),
            _ => (format!("diffusion_model.{name}"), ["lora_A", "lora_B"]),
        };
        tensors.push((format!("{stem}.{down}.weight"), convert(&update.down, dtype)?));
        tensors.push((format!("{stem}.{up}.weight"), convert(&update.up, dtype)?));
        if has_alpha {
            tensors.push((format!("{stem}.alpha"), number(update.alpha)?));
        }
        if let Some(magnitude) = &update.magnitude {
            tensors.push((format!("{stem}.dora_scale"), convert(magnitude, dtype)?));
        }
    }
    Ok((tensors, metadata))
}

/// PEFT's settings, as diffusers stores them. Layers whose rank or alpha is not the most common one have a pattern.
fn peft_settings(modules: &[TrainedModule]) -> Value {
    let most_common = |values: Vec<f64>| {
        let count = |value: &f64| values.iter().filter(|other| *other == value).count();
        values.iter().copied().max_by_key(count).unwrap_or(1.0)
    };
    let rank = most_common(modules.iter().map(|module| module.rank as f64).collect());
    let alpha = most_common(modules.iter().map(|module| f64::from(module.alpha)).collect());
    let layers: Vec<&str> = modules.iter().map(|module| module.layer.as_str()).collect();
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for TrainedModule { layer, rank: own, alpha: own_alpha, .. } in modules {
        if *own as f64 != rank {
            ranks.insert(layer.clone(), json!(own));
        }
        if f64::from(*own_alpha) != alpha {
            alphas.insert(layer.clone(), json!(own_alpha));
        }
    }
    json!({
        "transformer.r": rank as usize,
        "transformer.lora_alpha": alpha,
        "transformer.rank_pattern": ranks,
        "transformer.alpha_pattern": alphas,
        "transformer.target_modules": layers,
        "transformer.use_dora": modules.iter().any(|module| module.tensors.contains_key(MAGNITUDE)),
        "transformer.use_rslora": false,
        "transformer.lora_bias": false,
        "transformer.bias": "none",
    })
}

/// The update of one module of a file.
struct FusedUpdate {
    down: HostTensor,
    up: HostTensor,
    alpha: f32,
    magnitude: Option<HostTensor>,
}

/// One layer of a file's module.
struct Part<'m> {
    module: &'m TrainedModule,
    view: View,
}

/// Groups layers by the module that a file fuses them to. Without an alpha, the second matrices have the scale.
fn fuse(
    modules: &[TrainedModule],
    family: &'static Family,
    has_alpha: bool,
) -> Result<BTreeMap<String, FusedUpdate>, String> {
    let mut groups: BTreeMap<String, Vec<Part<'_>>> = BTreeMap::new();
    for module in modules {
        let layer = &module.layer;
        let (name, view) = to_original(Component::Transformer, family, &format!("{layer}.weight"))
            .ok_or_else(|| format!("the layer `{layer}` has no name in this layout"))?;
        let name = name.trim_end_matches(".weight").to_owned();
        groups.entry(name).or_default().push(Part { module, view });
    }
    groups
        .into_iter()
        .map(|(name, parts)| Ok((name.clone(), fuse_parts(&name, &parts, has_alpha)?)))
        .collect()
}

fn fuse_parts(name: &str, parts: &[Part<'_>], has_alpha: bool) -> Result<FusedUpdate, String> {
    let values = |part: &Part<'_>, tensor: &str| -> Result<Vec<f32>, String> {
        let tensor = part.module.tensors.get(tensor).ok_or_else(|| format!("`{name}` has no {tensor}"))?;
        Ok(tensor.to_f32().map_err(|error| error.to_string())?.into_owned())
    };
    let dims = |part: &Part<'_>, tensor: &str| {
        part.module.tensors.get(tensor).map_or(&[][..], |tensor| tensor.shape().dims()).to_vec()
    };
    let first = parts.first().ok_or_else(|| format!("`{name}` has no layers"))?;
    let [[_, cols], [rows, _]] = [DOWN, UP].map(|tensor| dims(first, tensor)).map(|dims| [dims[0], dims[1]]);
    let chunks = if let View::Chunk(_, count) = first.view { count } else { 1 };
    let total: usize = parts.iter().map(|part| part.module.rank).sum();
    let scale = if has_alpha { first.module.alpha / first.module.rank as f32 } else { 1.0 };
    let (mut down, mut up) = (Vec::with_capacity(total * cols), vec![0.0; chunks * rows * total]);
    let mut magnitude = Vec::new();
    let mut column = 0;
    for part in parts {
        let rank = part.module.rank;
        down.extend(values(part, DOWN)?);
        // Scales that differ are equalled in the second matrix.
        let factor = part.module.alpha / rank as f32 / scale;
        let own = swap_halves(values(part, UP)?, &part.view, rank);
        let start = if let View::Chunk(chunk, _) = part.view { chunk * rows } else { 0 };
        for (row, values) in own.chunks_exact(rank).enumerate() {
            let at = (start + row) * total + column;
            up[at..at + rank].iter_mut().zip(values).for_each(|(to, from)| *to = from * factor);
        }
        if part.module.tensors.contains_key(MAGNITUDE) {
            magnitude.push(swap_halves(values(part, MAGNITUDE)?, &part.view, 1));
        }
        column += rank;
    }
    if !magnitude.is_empty() && magnitude.len() != chunks {
        return Err(format!("`{name}` fuses {chunks} layers, and only {} have a DoRA", magnitude.len()));
    }
    let tensor =
        |shape: &[usize], values| HostTensor::from_f32(shape, values).map_err(|error| error.to_string());
    let magnitude = match magnitude.concat() {
        none if none.is_empty() => None,
        values => Some(tensor(&[values.len(), 1], values)?),
    };
    Ok(FusedUpdate {
        down: tensor(&[total, cols], down)?,
        up: tensor(&[chunks * rows, total], up)?,
        alpha: scale * total as f32,
        magnitude,
    })
}

/// Swaps the halves of rows of `width` values where the layout does.
fn swap_halves(mut values: Vec<f32>, view: &View, width: usize) -> Vec<f32> {
    if *view == View::SwappedHalves {
        let half = values.len() / width / 2 * width;
        values.rotate_left(half);
    }
    values
}

fn scale_by(values: &HostTensor, factor: f32) -> Result<HostTensor, String> {
    let text = |error: kiln_tensor::Error| error.to_string();
    let scaled = values.to_f32().map_err(text)?.iter().map(|value| value * factor).collect();
    HostTensor::from_f32(values.shape().clone(), scaled).map_err(text)
}

fn convert(values: &HostTensor, dtype: DType) -> Result<HostTensor, String> {
    values.to_dtype(dtype).map_err(|error| error.to_string())
}

fn number(value: f32) -> Result<HostTensor, String> {
    HostTensor::from_f32([0usize; 0], vec![value]).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use kiln_family::flux2::FLUX2;

    use super::*;
    use crate::{LayerShape, Lora, LoraOptions, LoraUpdates, WeightSource, save};

    const DIM: usize = 6;

    fn tensor(rows: usize, cols: usize, seed: usize) -> HostTensor {
        let values = (0..rows * cols).map(|i| ((i * 7 + seed * 13) % 11) as f32 / 8.0 - 0.5).collect();
        HostTensor::from_f32([rows, cols], values).unwrap()
    }

    fn module(layer: &str, rank: usize, alpha: f32, seed: usize) -> TrainedModule {
        let tensors = [(DOWN, tensor(rank, DIM, seed)), (UP, tensor(DIM, rank, seed + 1))];
        let tensors = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        TrainedModule { layer: layer.into(), rank, alpha, tensors }
    }

    /// The update of each layer as a file gives it: the sum of its low-rank products.
    fn updates(modules: &[TrainedModule], naming: LoraNaming) -> BTreeMap<String, Vec<f32>> {
        let (tensors, metadata) = lora_contents(modules, &FLUX2, naming, DType::F32).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lora.safetensors");
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
        save::save(&path, &tensors, &metadata).unwrap();
        let layers: Vec<LayerShape> = modules
            .iter()
            .map(|module| LayerShape { name: module.layer.clone(), rows: DIM, cols: DIM })
            .collect();
        let model = folder.path().join("model.safetensors");
        let weights: Vec<(String, HostTensor)> =
            layers.iter().map(|l| (format!("{}.weight", l.name), HostTensor::zeros([DIM, DIM]))).collect();
        let weights: Vec<_> = weights.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
        save::save(&model, &weights, &BTreeMap::new()).unwrap();
        let source = WeightSource::open(&model).unwrap();
        let loras = [(Lora::open(&path).unwrap(), 1.0)];
        let (updates, reports) =
            LoraUpdates::resolve(&source, &layers, loras, LoraOptions::default()).unwrap();
        assert!(reports[0].to_string().contains("modules"), "{}", reports[0]);
        let product = |layer: &LayerShape| {
            let linear = source.root().with_loras(&updates).linear(&layer.name, DIM, DIM).unwrap();
            let mut sum = vec![0.0; DIM * DIM];
            for delta in linear.deltas() {
                let (down, up) = (delta.down.to_f32().unwrap(), delta.up.to_f32().unwrap());
                let rank = down.len() / DIM;
                for (row, up) in up.chunks_exact(rank).enumerate() {
                    for col in 0..DIM {
                        let dot: f32 = up.iter().enumerate().map(|(r, up)| up * down[r * DIM + col]).sum();
                        sum[(delta.row + row) * DIM + col] += dot * delta.scale;
                    }
                }
            }
            sum
        };
        layers.iter().map(|layer| (layer.name.clone(), product(layer))).collect()
    }

    #[test]
    fn all_namings_are_read_as_the_same_update() {
        let modules = [
            module("transformer_blocks.0.attn.to_q", 2, 2.0, 1),
            module("transformer_blocks.0.attn.to_k", 2, 1.0, 2),
            module("transformer_blocks.0.attn.to_v", 3, 3.0, 3),
            module("transformer_blocks.0.attn.to_out.0", 2, 4.0, 4),
            module("single_transformer_blocks.1.attn.to_out", 2, 2.0, 5),
            module("norm_out.linear", 2, 2.0, 6),
        ];
        let expected = updates(&modules, LoraNaming::Diffusers);
        assert!(expected.values().all(|update| update.iter().any(|value| *value != 0.0)));
        for naming in [LoraNaming::Original, LoraNaming::Kohya] {
            for (layer, update) in updates(&modules, naming) {
                let close = update.iter().zip(&expected[&layer]).all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(close, "{naming:?} {layer}: {update:?}, {:?}", expected[&layer]);
            }
        }
    }

    #[test]
    fn a_lokr_is_refused_where_layers_are_fused() {
        let tensors = BTreeMap::from([
            ("lokr_w1".to_owned(), tensor(2, 2, 1)),
            ("lokr_w2".to_owned(), tensor(3, 3, 2)),
        ]);
        let layer = "transformer_blocks.0.attn.to_q".to_owned();
        let modules = [TrainedModule { layer, rank: 4, alpha: 2.0, tensors }];
        assert!(lora_contents(&modules, &FLUX2, LoraNaming::Kohya, DType::F32).is_err());
        let (tensors, metadata) = lora_contents(&modules, &FLUX2, LoraNaming::Diffusers, DType::F32).unwrap();
        // diffusers accepts only keys of factors, and takes the scale for 1.
        let names: Vec<&str> = tensors.iter().map(|(name, _)| name.rsplit('.').next().unwrap()).collect();
        assert_eq!((&names[..], metadata.len()), (&["lokr_w1", "lokr_w2"][..], 0));
        let halved: Vec<f32> = tensor(2, 2, 1).to_f32().unwrap().iter().map(|value| value / 2.0).collect();
        assert_eq!(tensors[0].1.to_f32().unwrap()[..], halved);
    }
}
