use std::fmt;
use std::path::PathBuf;

use crate::similar::quoted;

/// How much of a LoRA a model uses: `lora style.safetensors: 112 of 112 modules, rank 16, weight 0.8`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraReport {
    /// The LoRA's file.
    pub file: PathBuf,
    /// Modules that match the model.
    pub matched: usize,
    /// All modules of the LoRA.
    pub total: usize,
    /// The kinds of its updates; see [`kinds`](crate::Lora::kinds).
    pub kinds: Vec<&'static str>,
    /// The largest rank of its modules; 0 if all are full-rank.
    pub rank: usize,
    /// The user's factor.
    pub weight: f32,
    /// Modules and keys that are not used, if that is allowed.
    pub unmatched: Vec<String>,
    /// What the file does not tell for certain; see [`notes`](crate::Lora::notes).
    pub notes: Vec<String>,
}

impl fmt::Display for LoraReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LoraReport { file, matched, total, kinds, rank, weight, unmatched, notes } = self;
        let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
        write!(f, "lora {name}: {matched} of {total} modules")?;
        if kinds[..] != ["LoRA"] {
            write!(f, ", {}", kinds.join(" and "))?;
        }
        if *rank > 0 {
            write!(f, ", rank {rank}")?;
        }
        write!(f, ", weight {weight}")?;
        if !unmatched.is_empty() {
            write!(f, "; left out: {}", quoted(unmatched))?;
        }
        notes.iter().try_for_each(|note| write!(f, "; {note}"))
    }
}
