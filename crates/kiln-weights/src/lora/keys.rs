//! The keys of a LoRA file: which trainer's layout they have, which module they belong to, and which tensor of its update
//! each one names.

use std::collections::BTreeMap;
use std::fmt;

use super::LoraProblem;
use super::targets::is_original;
use super::unused::{UnusedKey, UnusedKind};

/// The layout of a LoRA file's keys, named after the programs that write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoraLayout {
    /// `transformer.` and a module of diffusers.
    Diffusers,
    /// `diffusion_model.` and a module of Black Forest Labs' naming.
    Original,
    /// `base_model.model.` and a module of either naming.
    Peft,
    /// `lora_unet_` and a module with underscores.
    Kohya,
    /// `transformer.` and a module of Black Forest Labs' naming, or `lora_transformer_`.
    OneTrainer,
    /// `lycoris_` and a module with underscores.
    Lycoris,
    /// `diffusion_model.` and a module of diffusers.
    Mixed,
    /// `unet.` and a module of either naming.
    Unet,
    /// A module without a prefix.
    Bare,
}

impl fmt::Display for LoraLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LoraLayout::Diffusers => "diffusers (transformer.*)",
            LoraLayout::Original => "ai-toolkit and ComfyUI (diffusion_model.*)",
            LoraLayout::Peft => "PEFT (base_model.model.*)",
            LoraLayout::Kohya => "kohya and musubi (lora_unet_*)",
            LoraLayout::OneTrainer => "OneTrainer",
            LoraLayout::Lycoris => "LyCORIS (lycoris_*)",
            LoraLayout::Mixed => "diffusers' modules under diffusion_model.*",
            LoraLayout::Unet => "modules under unet.*",
            LoraLayout::Bare => "modules without a prefix",
        })
    }
}

/// What a tensor is in a module's update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TensorRole {
    Down,
    Up,
    Alpha,
    /// DoRA's magnitude vector.
    Magnitude,
    LokrW1,
    LokrW1A,
    LokrW1B,
    LokrW2,
    LokrW2A,
    LokrW2B,
    HadaW1A,
    HadaW1B,
    HadaW2A,
    HadaW2B,
    /// The full difference of the weight.
    Diff,
    /// The cores of Tucker decompositions, which only convolutions have.
    Core1,
    Core2,
}

/// The suffixes of keys, without a final `.weight`. Messages use the first suffix of a role.
const SUFFIXES: [(&str, TensorRole); 26] = [
    (".lora_A", TensorRole::Down),
    (".lora_down", TensorRole::Down),
    (".lora.down", TensorRole::Down),
    (".lora_B", TensorRole::Up),
    (".lora_up", TensorRole::Up),
    (".lora.up", TensorRole::Up),
    (".alpha", TensorRole::Alpha),
    (".dora_scale", TensorRole::Magnitude),
    (".lora_magnitude_vector", TensorRole::Magnitude),
    // ai-toolkit's DoRA.
    (".magnitude", TensorRole::Magnitude),
    (".lokr_w1", TensorRole::LokrW1),
    (".lokr_w1_a", TensorRole::LokrW1A),
    (".lokr_w1_b", TensorRole::LokrW1B),
    (".lokr_w2", TensorRole::LokrW2),
    (".lokr_w2_a", TensorRole::LokrW2A),
    (".lokr_w2_b", TensorRole::LokrW2B),
    (".hada_w1_a", TensorRole::HadaW1A),
    (".hada_w1_b", TensorRole::HadaW1B),
    (".hada_w2_a", TensorRole::HadaW2A),
    (".hada_w2_b", TensorRole::HadaW2B),
    (".diff", TensorRole::Diff),
    (".lora_mid", TensorRole::Core1),
    (".lokr_t1", TensorRole::Core1),
    (".lokr_t2", TensorRole::Core2),
    (".hada_t1", TensorRole::Core1),
    (".hada_t2", TensorRole::Core2),
];

/// PEFT's names of tensors. Inside of a model the adapter's name follows, which `save_pretrained` drops and other writers
/// don't.
const PEFT_TENSORS: [&str; 5] = ["lora_A", "lora_B", "lora_magnitude_vector", "lokr_", "hada_"];

/// Unsupported kinds of adapters, by a substring of their keys.
const UNSUPPORTED: [(&str, &str); 37] = [
    (".lora_E", "AdaLoRA"),
    (".lora_diag", "KaSA"),
    (".lora_embedding_", "LoRA of embeddings"),
    (".reshape_weight", "LoRA that resizes layers"),
    (".oft_", "OFT"),
    (".boft_", "BOFT"),
    (".psoft_", "PSOFT"),
    (".a1.weight", "GLoRA"),
    (".a2.weight", "GLoRA"),
    (".b1.weight", "GLoRA"),
    (".b2.weight", "GLoRA"),
    (".bm.weight", "GLoRA"),
    (".glora_", "GLoRA"),
    (".lambda_layer", "T-LoRA"),
    (".q_layer.", "T-LoRA"),
    (".p_layer.", "T-LoRA"),
    (".on_input", "IA3"),
    (".ia3_", "IA3"),
    (".vera_", "VeRA"),
    (".pvera_", "PVeRA"),
    (".randlora_", "RandLoRA"),
    (".vblora_", "VB-LoRA"),
    (".unilora_", "Uni-LoRA"),
    (".tinylora_", "TinyLoRA"),
    (".gralora_", "GraLoRA"),
    (".delora_", "DeLoRA"),
    (".hira_", "HiRA"),
    (".hra_", "HRA"),
    (".bone_", "Bone"),
    (".miss_", "MiSS"),
    (".shira_", "SHiRA"),
    (".c3a_", "C3A"),
    (".road_", "RoAd"),
    (".fourierft_", "FourierFT"),
    (".waveft_", "WaveFT"),
    (".ln_tuning_", "LN tuning"),
    (".trainable_tokens_", "trainable tokens"),
];

/// What stands in the place of an adapter's name in the scales and parts of quantized tensors.
const QUANTIZED: [&str; 14] = [
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "scale_weight",
    "scale",
    "scales",
    "input_scale",
    "zero_point",
    "weight_zero_point",
    "absmax",
    "quant_map",
    "weight_packed",
    "qweight",
    "SCB",
];

/// What else is not the name of an adapter.
const NOT_ADAPTERS: [&str; 2] = ["scaling", "bias"];

/// Outputs of a LoRA's second matrix, which may have a bias.
const UP: [&str; 2] = [".lora_B.", ".lora_up."];

impl TensorRole {
    pub fn suffix(self) -> &'static str {
        SUFFIXES.iter().find(|(_, role)| *role == self).map_or("", |(suffix, _)| suffix)
    }
}

/// The keys of one module.
#[derive(Debug)]
pub(super) struct ModuleKeys<'k> {
    /// The module's name in the file, with its prefix.
    pub stem: &'k str,
    /// The module's name without the prefix.
    pub name: &'k str,
    pub layout: LoraLayout,
    pub tensors: BTreeMap<TensorRole, &'k str>,
}

impl<'k> ModuleKeys<'k> {
    /// The key of a tensor that this kind of update requires.
    pub fn require(&self, role: TensorRole) -> Result<&'k str, LoraProblem> {
        self.tensors.get(&role).copied().ok_or_else(|| LoraProblem::Incomplete {
            key: self.tensors.values().next().copied().unwrap_or_default().to_owned(),
            missing: self.missing_key(role),
        })
    }

    /// The key that a missing tensor would have, in the style of the keys that are there.
    fn missing_key(&self, role: TensorRole) -> String {
        let has = |suffix: &str| self.tensors.values().any(|key| key.contains(suffix));
        let suffix = match role {
            TensorRole::Down if has(".lora_up") => ".lora_down",
            TensorRole::Up if has(".lora_down") => ".lora_up",
            _ => role.suffix(),
        };
        let weight = if matches!(role, TensorRole::Down | TensorRole::Up) { ".weight" } else { "" };
        format!("{}{suffix}{weight}", self.stem)
    }
}

/// All keys of a file, by what they are for.
#[derive(Debug, Default)]
pub(super) struct ClassifiedKeys<'k> {
    pub modules: Vec<ModuleKeys<'k>>,
    pub unused: Vec<UnusedKey>,
}

/// Groups keys by module. Unsupported kinds of adapters are an error, and so are two adapters in one file.
pub(super) fn classify<'k>(keys: &[&'k str]) -> Result<ClassifiedKeys<'k>, LoraProblem> {
    let mut classified = ClassifiedKeys::default();
    let mut modules = BTreeMap::<&str, ModuleKeys<'k>>::new();
    let mut adapters = Adapters::default();
    for &key in keys {
        if let Some(kind) = unsupported_kind(key) {
            return Err(LoraProblem::UnsupportedKind { kind, key: key.to_owned() });
        }
        if let Some(kind) = UnusedKind::of_key(key) {
            classified.unused.push(UnusedKey::new(kind, key));
            continue;
        }
        let split = split_key(key).map(|split| (split, strip_prefix(split.stem)));
        let Some((split, (layout, name))) = split.filter(|(_, (_, name))| !name.is_empty()) else {
            classified.unused.push(UnusedKey::new(UnusedKind::Unknown, key));
            continue;
        };
        if split.adapter.is_some_and(|name| QUANTIZED.contains(&name)) {
            return Err(LoraProblem::Quantized { key: key.to_owned() });
        }
        adapters.add(split)?;
        let module = modules.entry(split.stem).or_insert_with(|| ModuleKeys {
            stem: split.stem,
            name,
            layout,
            tensors: BTreeMap::new(),
        });
        if let Some(first) = module.tensors.insert(split.role, key) {
            return Err(LoraProblem::Duplicate { first: first.to_owned(), second: key.to_owned() });
        }
    }
    classified.modules = modules.into_values().collect();
    Ok(classified)
}

/// The adapter that the keys of a file name.
#[derive(Default)]
struct Adapters<'k> {
    named: Option<&'k str>,
    /// Whether there are keys of PEFT without a name.
    has_unnamed: bool,
}

impl<'k> Adapters<'k> {
    /// Adds a key, which must be of the same adapter as those before. PEFT names magnitudes also if nothing else has a name.
    fn add(&mut self, split: SplitKey<'k>) -> Result<(), LoraProblem> {
        if split.role == TensorRole::Magnitude {
            return Ok(());
        }
        self.has_unnamed |=
            split.adapter.is_none() && !matches!(split.role, TensorRole::Alpha | TensorRole::Diff);
        let first = *self.named.get_or_insert(match split.adapter.or(self.named) {
            Some(name) => name,
            None => return Ok(()),
        });
        let second = split.adapter.filter(|second| *second != first);
        if second.is_none() && !self.has_unnamed {
            return Ok(());
        }
        Err(LoraProblem::Adapters { first: first.to_owned(), second: second.map(str::to_owned) })
    }
}

/// Whether only LoRA files have such keys.
pub(super) fn is_lora_key(key: &str) -> bool {
    split_key(key).is_some_and(|split| split.role != TensorRole::Alpha)
}

pub(super) fn unsupported_kind(key: &str) -> Option<&'static str> {
    if key.ends_with(".bias") && UP.iter().any(|up| key.contains(up)) {
        return Some("LoRA with biases");
    }
    UNSUPPORTED.iter().find(|(substring, _)| key.contains(substring)).map(|(_, kind)| *kind)
}

/// What a key consists of.
#[derive(Clone, Copy)]
struct SplitKey<'k> {
    /// The module, with the prefix.
    stem: &'k str,
    role: TensorRole,
    /// PEFT's name of the adapter.
    adapter: Option<&'k str>,
}

fn split_key(key: &str) -> Option<SplitKey<'_>> {
    let key = key.strip_suffix(".weight").unwrap_or(key);
    split_role(key, None).or_else(|| {
        let (rest, adapter) = key.rsplit_once('.')?;
        let (_, tensor) = rest.rsplit_once('.')?;
        let is_peft = PEFT_TENSORS.iter().any(|name| tensor.starts_with(name));
        (is_peft && !adapter.is_empty() && !NOT_ADAPTERS.contains(&adapter))
            .then(|| split_role(rest, Some(adapter)))?
    })
}

fn split_role<'k>(key: &'k str, adapter: Option<&'k str>) -> Option<SplitKey<'k>> {
    let found = SUFFIXES.iter().find_map(|(suffix, role)| Some((key.strip_suffix(suffix)?, *role)));
    found.map(|(stem, role)| SplitKey { stem, role, adapter })
}

/// Strips the prefix of a module, which tells its layout.
fn strip_prefix(stem: &str) -> (LoraLayout, &str) {
    const FLAT: [(&str, LoraLayout); 3] = [
        ("lora_unet_", LoraLayout::Kohya),
        ("lora_transformer_", LoraLayout::OneTrainer),
        ("lycoris_", LoraLayout::Lycoris),
    ];
    let flat = FLAT.iter().find_map(|(prefix, layout)| Some((*layout, stem.strip_prefix(prefix)?)));
    if let Some(found) = flat {
        return found;
    }
    let (is_unet, rest) = without_prefix(stem, "unet.");
    let (is_peft, rest) = without_prefix(rest, "base_model.model.");
    let comfy = ["model.diffusion_model.", "diffusion_model."].iter().find_map(|p| rest.strip_prefix(p));
    let (layout, name) = if let Some(name) = comfy {
        let original = is_original(&flatten(name));
        (if original { LoraLayout::Original } else { LoraLayout::Mixed }, name)
    } else if let Some(name) = rest.strip_prefix("transformer.") {
        let original = is_original(&flatten(name));
        (if original { LoraLayout::OneTrainer } else { LoraLayout::Diffusers }, name)
    } else {
        (LoraLayout::Bare, rest)
    };
    match (is_unet, is_peft) {
        (true, _) => (LoraLayout::Unet, name),
        (false, true) => (LoraLayout::Peft, name),
        (false, false) => (layout, name),
    }
}

fn without_prefix<'n>(name: &'n str, prefix: &str) -> (bool, &'n str) {
    name.strip_prefix(prefix).map_or((false, name), |rest| (true, rest))
}

/// Replaces dots by underscores, as flat layouts do.
pub(super) fn flatten(name: &str) -> String {
    name.replace('.', "_")
}
