//! What the keys of a LoRA file mean: whose layout they have, which module they are for, and which part of its update.

use std::collections::BTreeMap;
use std::fmt;

use super::{LoraProblem, names};

/// Who writes such keys.
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
    /// A module without anything before it.
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

/// Which part of a module's update a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Down,
    Up,
    Alpha,
    Magnitude,
    KronLeft,
    KronLeftA,
    KronLeftB,
    KronRight,
    KronRightA,
    KronRightB,
    Hada1A,
    Hada1B,
    Hada2A,
    Hada2B,
    Full,
}

/// What stands behind the module, without a `.weight` at the end. The first ending of a part is the one for messages.
const ENDINGS: [(&str, Part); 20] = [
    (".lora_A", Part::Down),
    (".lora_down", Part::Down),
    (".lora.down", Part::Down),
    (".lora_B", Part::Up),
    (".lora_up", Part::Up),
    (".lora.up", Part::Up),
    (".alpha", Part::Alpha),
    (".dora_scale", Part::Magnitude),
    (".lora_magnitude_vector", Part::Magnitude),
    (".lokr_w1", Part::KronLeft),
    (".lokr_w1_a", Part::KronLeftA),
    (".lokr_w1_b", Part::KronLeftB),
    (".lokr_w2", Part::KronRight),
    (".lokr_w2_a", Part::KronRightA),
    (".lokr_w2_b", Part::KronRightB),
    (".hada_w1_a", Part::Hada1A),
    (".hada_w1_b", Part::Hada1B),
    (".hada_w2_a", Part::Hada2A),
    (".hada_w2_b", Part::Hada2B),
    (".diff", Part::Full),
];

/// Adapters that are none of the kinds above, by a part of their keys.
const FOREIGN: [(&str, &str); 10] = [
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

impl Part {
    pub fn ending(self) -> &'static str {
        ENDINGS.iter().find(|(_, part)| *part == self).map_or("", |(ending, _)| ending)
    }
}

/// The tensors of one module.
#[derive(Debug)]
pub(super) struct Group<'k> {
    /// The module as the file calls it, with what stands before it.
    pub stem: &'k str,
    /// The module without that.
    pub name: &'k str,
    pub layout: LoraLayout,
    pub parts: BTreeMap<Part, &'k str>,
}

impl<'k> Group<'k> {
    /// The key of a part that this kind of update can't be without.
    pub fn need(&self, part: Part) -> Result<&'k str, LoraProblem> {
        self.parts.get(&part).copied().ok_or_else(|| LoraProblem::Incomplete {
            key: self.parts.values().next().copied().unwrap_or_default().to_owned(),
            missing: self.sibling(part),
        })
    }

    /// How the file would call a part that it does not have: in the words of the parts that it has.
    fn sibling(&self, part: Part) -> String {
        let has = |ending: &str| self.parts.values().any(|key| key.contains(ending));
        let ending = match part {
            Part::Down if has(".lora_up") => ".lora_down",
            Part::Up if has(".lora_down") => ".lora_up",
            _ => part.ending(),
        };
        let weight = if matches!(part, Part::Down | Part::Up) { ".weight" } else { "" };
        format!("{}{ending}{weight}", self.stem)
    }
}

/// All keys, sorted by what they are for.
#[derive(Debug, Default)]
pub(super) struct Keys<'k> {
    pub groups: Vec<Group<'k>>,
    /// Keys for the text encoder.
    pub text: Vec<&'k str>,
    /// Keys that are no LoRA keys.
    pub unknown: Vec<&'k str>,
}

/// Sorts keys by the module they are for. Kinds of adapters that can't be applied are an error.
pub(super) fn sort<'k>(keys: &[&'k str]) -> Result<Keys<'k>, LoraProblem> {
    let mut found = Keys::default();
    let mut groups = BTreeMap::<&str, Group<'k>>::new();
    for &key in keys {
        if let Some((_, kind)) = FOREIGN.iter().find(|(part, _)| key.contains(part)) {
            return Err(LoraProblem::Kind { kind, key: key.to_owned() });
        }
        if TEXT_ENCODER.iter().any(|start| key.starts_with(start)) {
            found.text.push(key);
            continue;
        }
        let split = split(key).map(|(stem, part)| (stem, part, bare(stem)));
        let Some((stem, part, (layout, name))) = split.filter(|(_, _, (_, name))| !name.is_empty()) else {
            found.unknown.push(key);
            continue;
        };
        let group =
            groups.entry(stem).or_insert_with(|| Group { stem, name, layout, parts: BTreeMap::new() });
        if let Some(first) = group.parts.insert(part, key) {
            return Err(LoraProblem::Twice { first: first.to_owned(), second: key.to_owned() });
        }
    }
    found.groups = groups.into_values().collect();
    Ok(found)
}

/// The module of a key, with what stands before it, and the part.
fn split(key: &str) -> Option<(&str, Part)> {
    let key = key.strip_suffix(".weight").unwrap_or(key);
    // What PEFT calls an adapter that was not given a name; `save_pretrained` drops it, other writers don't.
    let key = key.strip_suffix(".default").unwrap_or(key);
    ENDINGS.iter().find_map(|(ending, part)| Some((key.strip_suffix(ending)?, *part)))
}

/// A module without what stands before it, and whose layout that is.
fn bare(stem: &str) -> (LoraLayout, &str) {
    const FLAT: [(&str, LoraLayout); 3] = [
        ("lora_unet_", LoraLayout::Kohya),
        ("lora_transformer_", LoraLayout::OneTrainer),
        ("lycoris_", LoraLayout::Lycoris),
    ];
    let flat = FLAT.iter().find_map(|(start, layout)| Some((*layout, stem.strip_prefix(start)?)));
    if let Some(found) = flat {
        return found;
    }
    let (peft, rest) = match stem.strip_prefix("base_model.model.") {
        Some(rest) => (true, rest),
        None => (false, stem),
    };
    let comfy = ["model.diffusion_model.", "diffusion_model."].iter().find_map(|p| rest.strip_prefix(p));
    let (layout, name) = match (comfy, rest.strip_prefix("transformer.")) {
        (Some(name), _) => match names::is_original(&flatten(name)) {
            true => (LoraLayout::Original, name),
            false => (LoraLayout::Mixed, name),
        },
        (None, Some(name)) => match names::is_original(&flatten(name)) {
            true => (LoraLayout::OneTrainer, name),
            false => (LoraLayout::Diffusers, name),
        },
        (None, None) => (LoraLayout::Bare, rest),
    };
    (if peft { LoraLayout::Peft } else { layout }, name)
}

/// A name as the tables of [`names`] have it.
pub(super) fn flatten(name: &str) -> String {
    name.replace('.', "_")
}
