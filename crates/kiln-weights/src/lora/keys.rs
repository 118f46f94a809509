//! What the keys of a LoRA file mean, and whose layout they have.

use std::collections::BTreeMap;

use super::LoraProblem;

const DOWN: &str = ".lora_A.weight";
const UP: &str = ".lora_B.weight";
const ALPHA: &str = ".alpha";

/// What may stand before the module's name in the model. The first is diffusers', the second raw PEFT's.
const PREFIXES: [&str; 2] = ["transformer.", "base_model.model."];

/// The keys of one module.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Group<'k> {
    pub down: Option<&'k str>,
    pub up: Option<&'k str>,
    pub alpha: Option<&'k str>,
}

impl<'k> Group<'k> {
    /// The keys of the two matrices; neither is any use alone.
    pub fn pair(&self) -> Result<(&'k str, &'k str), LoraProblem> {
        let lone = |key: &str, ending, missing| LoraProblem::Incomplete {
            key: key.to_owned(),
            missing: format!("{}{missing}", key.strip_suffix(ending).unwrap_or(key)),
        };
        match (self.down, self.up) {
            (Some(down), Some(up)) => Ok((down, up)),
            (Some(down), None) => Err(lone(down, DOWN, UP)),
            (None, Some(up)) => Err(lone(up, UP, DOWN)),
            (None, None) => Err(lone(self.alpha.unwrap_or_default(), ALPHA, DOWN)),
        }
    }
}

/// All keys by the module they are for. Keys that are not for any are an error.
pub(super) fn group<'k>(keys: &[&'k str]) -> Result<BTreeMap<&'k str, Group<'k>>, LoraProblem> {
    let mut groups = BTreeMap::<&str, Group<'k>>::new();
    let mut unknown = Vec::new();
    for &key in keys {
        let name = bare(key);
        let module = [DOWN, UP, ALPHA].iter().find_map(|e| name.strip_suffix(e)).filter(|m| !m.is_empty());
        let Some(module) = module else {
            unknown.push(key.to_owned());
            continue;
        };
        let group = groups.entry(module).or_default();
        let place = match name {
            _ if name.ends_with(DOWN) => &mut group.down,
            _ if name.ends_with(UP) => &mut group.up,
            _ => &mut group.alpha,
        };
        if let Some(first) = place.replace(key) {
            return Err(LoraProblem::Twice { first: first.to_owned(), second: key.to_owned() });
        }
    }
    if !unknown.is_empty() {
        return Err(LoraProblem::UnknownKeys { keys: unknown });
    }
    if groups.is_empty() {
        return Err(LoraProblem::Empty);
    }
    Ok(groups)
}

fn bare(key: &str) -> &str {
    PREFIXES.iter().find_map(|p| key.strip_prefix(p)).unwrap_or(key)
}

/// Refuses files that are LoRAs, but not of a kind or layout that is read here.
pub(super) fn refuse_foreign(keys: &[&str]) -> Result<(), LoraProblem> {
    // The kind first, whatever the layout: a DoRA read as plain LoRA would give another picture without a word.
    let problem = keys.iter().find_map(|k| kind(k)).or_else(|| keys.iter().find_map(|k| foreign(k)));
    problem.map_or(Ok(()), Err)
}

fn kind(key: &str) -> Option<LoraProblem> {
    const KINDS: [(&str, &str); 6] = [
        ("lora_magnitude_vector", "DoRA"),
        ("dora_scale", "DoRA"),
        (".lokr_", "LoKr"),
        (".hada_", "LoHa"),
        (".lora_B.bias", "LoRA with biases"),
        (".lora_up.bias", "LoRA with biases"),
    ];
    let kind = KINDS.iter().find(|(part, _)| key.contains(part))?.1;
    Some(LoraProblem::Kind { kind, key: key.to_owned() })
}

fn foreign(key: &str) -> Option<LoraProblem> {
    const TEXT_ENCODER: [&str; 3] = ["text_encoder", "lora_te", "base_model.model.text_encoder"];
    const LAYOUTS: [(&str, &str); 4] = [
        ("lora_unet_", "kohya's sd-scripts (lora_unet_*)"),
        ("lora_transformer_", "OneTrainer (lora_transformer_*)"),
        ("lycoris_", "LyCORIS (lycoris_*)"),
        ("diffusion_model.", "ComfyUI and ai-toolkit (diffusion_model.*)"),
    ];
    const ORIGINAL_MODULES: [&str; 10] = [
        "double_blocks.",
        "single_blocks.",
        "img_in.",
        "txt_in.",
        "time_in.",
        "guidance_in.",
        "final_layer.",
        "double_stream_modulation_img.lin.",
        "double_stream_modulation_txt.lin.",
        "single_stream_modulation.lin.",
    ];
    let layout = |layout| Some(LoraProblem::Layout { layout, key: key.to_owned() });
    if TEXT_ENCODER.iter().any(|p| key.starts_with(p)) {
        return Some(LoraProblem::TextEncoder { key: key.to_owned() });
    }
    if let Some((_, name)) = LAYOUTS.iter().find(|(prefix, _)| key.starts_with(prefix)) {
        return layout(name);
    }
    if ORIGINAL_MODULES.iter().any(|m| bare(key).starts_with(m)) {
        return layout("Black Forest Labs' module names (double_blocks, single_blocks, …)");
    }
    if [".lora_down.", ".lora_up.", ".lora.down.", ".lora.up."].iter().any(|m| key.contains(m)) {
        return layout("old diffusers files (lora_down, lora_up)");
    }
    None
}
