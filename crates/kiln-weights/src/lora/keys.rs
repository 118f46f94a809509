//! The keys of a LoRA file: which trainer's layout they have, which module they belong to, and which tensor of its update
//! each one names.

use std::collections::BTreeMap;
use std::fmt;

use super::LoraProblem;
use super::targets::is_original;

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
}

/// The suffixes of keys, without a final `.weight`. Messages use the first suffix of a role.
const SUFFIXES: [(&str, TensorRole); 20] = [
    (".lora_A", TensorRole::Down),
    (".lora_down", TensorRole::Down),
    (".lora.down", TensorRole::Down),
    (".lora_B", TensorRole::Up),
    (".lora_up", TensorRole::Up),
    (".lora.up", TensorRole::Up),
    (".alpha", TensorRole::Alpha),
    (".dora_scale", TensorRole::Magnitude),
    (".lora_magnitude_vector", TensorRole::Magnitude),
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
];

/// Unsupported kinds of adapters, by a substring of their keys.
const UNSUPPORTED: [(&str, &str); 10] = [
    (".lora_B.bias", "LoRA with biases"),
    (".lora_up.bias", "LoRA with biases"),
    (".lora_mid.", "LoRA of convolutions"),
    (".lokr_t2", "LoKr of convolutions"),
    (".hada_t1", "LoHa of convolutions"),
    (".hada_t2", "LoHa of convolutions"),
    (".oft_", "OFT"),
    (".boft_", "BOFT"),
    (".b2.weight", "GLoRA"),
    (".on_input", "IA3"),
];

const TEXT_ENCODER: [&str; 4] =
    ["text_encoder", "lora_te", "base_model.model.text_encoder", "lycoris_text_encoder"];

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
    /// Keys for the text encoder.
    pub text_encoder: Vec<&'k str>,
    /// Keys that are not LoRA keys.
    pub unknown: Vec<&'k str>,
}

/// Groups keys by module. Unsupported kinds of adapters are an error.
pub(super) fn classify<'k>(keys: &[&'k str]) -> Result<ClassifiedKeys<'k>, LoraProblem> {
    let mut classified = ClassifiedKeys::default();
    let mut modules = BTreeMap::<&str, ModuleKeys<'k>>::new();
    for &key in keys {
        if let Some((_, kind)) = UNSUPPORTED.iter().find(|(substring, _)| key.contains(substring)) {
            return Err(LoraProblem::UnsupportedKind { kind, key: key.to_owned() });
        }
        if TEXT_ENCODER.iter().any(|prefix| key.starts_with(prefix)) {
            classified.text_encoder.push(key);
            continue;
        }
        let split = split_role(key).map(|(stem, role)| (stem, role, strip_prefix(stem)));
        let Some((stem, role, (layout, name))) = split.filter(|(_, _, (_, name))| !name.is_empty()) else {
            classified.unknown.push(key);
            continue;
        };
        let module = modules.entry(stem).or_insert_with(|| ModuleKeys {
            stem,
            name,
            layout,
            tensors: BTreeMap::new(),
        });
        if let Some(first) = module.tensors.insert(role, key) {
            return Err(LoraProblem::Duplicate { first: first.to_owned(), second: key.to_owned() });
        }
    }
    classified.modules = modules.into_values().collect();
    Ok(classified)
}

/// Splits a key into its module, with the prefix, and the role of its tensor.
fn split_role(key: &str) -> Option<(&str, TensorRole)> {
    let key = key.strip_suffix(".weight").unwrap_or(key);
    // PEFT's name of an adapter that was given none; `save_pretrained` drops it, other writers don't.
    let key = key.strip_suffix(".default").unwrap_or(key);
    SUFFIXES.iter().find_map(|(suffix, role)| Some((key.strip_suffix(suffix)?, *role)))
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
    let (is_peft, rest) = match stem.strip_prefix("base_model.model.") {
        Some(rest) => (true, rest),
        None => (false, stem),
    };
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
    (if is_peft { LoraLayout::Peft } else { layout }, name)
}

/// Replaces dots by underscores, as flat layouts do.
pub(super) fn flatten(name: &str) -> String {
    name.replace('.', "_")
}
