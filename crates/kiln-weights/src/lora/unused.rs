//! The keys of a LoRA file that the transformer can't use. They are an error, unless the user asks for what fits.

use std::collections::BTreeSet;

use super::LoraProblem;

/// What a key that is not used is for, in the order in which problems are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum UnusedKind {
    TextEncoder,
    Vae,
    Convolution,
    NormOrBias,
    /// A weight that takes the place of the model's.
    NewWeight,
    /// Not a LoRA key.
    Unknown,
}

/// A key that is not used.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct UnusedKey {
    pub kind: UnusedKind,
    pub key: String,
}

const TEXT_ENCODER: [&str; 5] = [
    "text_encoder",
    "lora_te",
    "base_model.model.text_encoder",
    "lycoris_text_encoder",
    // OneTrainer's embeddings for the prompt.
    "bundle_emb.",
];
const VAE: [&str; 4] = ["vae.", "first_stage_model.", "base_model.model.vae.", "lora_vae_"];
/// Keys that only LoRA files have.
const LORA_ONLY: [&str; 4] = [".diff_b", ".w_norm", ".b_norm", ".set_weight"];
const NORM_OR_BIAS: [&str; 5] = [".diff_b", ".w_norm", ".b_norm", ".bias", "_norm.scale"];

impl UnusedKind {
    /// What a key is for, if its name alone tells that it is not used.
    pub fn of_key(key: &str) -> Option<UnusedKind> {
        let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| key.starts_with(prefix));
        let ends = |suffixes: &[&str]| suffixes.iter().any(|suffix| key.ends_with(suffix));
        if starts(&TEXT_ENCODER) {
            Some(UnusedKind::TextEncoder)
        } else if starts(&VAE) {
            Some(UnusedKind::Vae)
        } else if ends(&NORM_OR_BIAS) {
            Some(UnusedKind::NormOrBias)
        } else {
            ends(&[".set_weight"]).then_some(UnusedKind::NewWeight)
        }
    }

    /// Whether only LoRA files have such keys.
    pub fn is_lora_key(key: &str) -> bool {
        LORA_ONLY.iter().any(|suffix| key.ends_with(suffix))
    }
}

impl UnusedKey {
    pub fn new(kind: UnusedKind, key: &str) -> UnusedKey {
        UnusedKey { kind, key: key.to_owned() }
    }
}

/// Rejects keys of unknown meaning that belong to modules with these stems: without them, the module may be wrong.
pub(super) fn check_modules(unused: &[UnusedKey], stems: &BTreeSet<&str>) -> Result<(), LoraProblem> {
    for UnusedKey { key, .. } in unused.iter().filter(|unused| unused.kind == UnusedKind::Unknown) {
        // A number is the name of another module: `to_out.0` in `to_out`.
        let is_module = |at: usize| {
            stems.contains(&key[..at]) && !key[at + 1..].starts_with(|c: char| c.is_ascii_digit())
        };
        if let Some((at, _)) = key.rmatch_indices('.').find(|(at, _)| is_module(*at)) {
            return Err(LoraProblem::UnknownInModule { key: key.clone(), module: key[..at].to_owned() });
        }
    }
    Ok(())
}

/// The problem with keys that are not used, the most telling kind first; `None` if there are none.
pub(super) fn problem(unused: &[UnusedKey]) -> Option<LoraProblem> {
    let first = unused.iter().min()?;
    let key = first.key.clone();
    let other = |what| LoraProblem::OtherPart { what, key: first.key.clone() };
    Some(match first.kind {
        UnusedKind::TextEncoder => LoraProblem::TextEncoder { key },
        UnusedKind::Vae => other("changes the VAE"),
        UnusedKind::Convolution => other("changes a convolution"),
        UnusedKind::NormOrBias => other("changes a norm or a bias"),
        UnusedKind::NewWeight => other("replaces a weight"),
        UnusedKind::Unknown => {
            LoraProblem::UnknownKeys { keys: unused.iter().map(|unused| unused.key.clone()).collect() }
        }
    })
}
