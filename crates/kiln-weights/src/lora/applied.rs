use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kiln_tensor::{Delta, HostTensor, Shape};

use super::{Lora, LoraProblem};
use crate::{Error, Result};

/// A LoRA laid over some weights: knows which of its modules were taken, so that none is dropped in silence.
#[derive(Debug)]
pub(crate) struct Applied {
    lora: Lora,
    weight: f32,
    /// For each module of the LoRA. Atomic, since layers may be loaded by several threads.
    taken: Vec<AtomicBool>,
}

impl Applied {
    pub fn new(lora: Lora, weight: f32) -> Self {
        let taken = lora.modules.iter().map(|_| AtomicBool::new(false)).collect();
        Applied { lora, weight, taken }
    }

    /// The update of layer `module`, `rows` by `cols`, at `row` of its stack; `None` when this LoRA has none.
    pub fn delta(&self, module: &str, row: usize, rows: usize, cols: usize) -> Result<Option<Delta>> {
        let Ok(at) = self.lora.modules.binary_search_by(|m| m.name.as_str().cmp(module)) else {
            return Ok(None);
        };
        let found = &self.lora.modules[at];
        let rank = found.rank();
        let check = |key: &str, tensor: &HostTensor, expected: [usize; 2]| {
            if tensor.shape().dims() == expected {
                return Ok(());
            }
            let problem = Box::new(LoraProblem::Shape {
                key: key.to_owned(),
                found: tensor.shape().clone(),
                expected: Shape::from(expected),
                module: module.to_owned(),
                rows,
                cols,
            });
            Err(Error::Lora { file: self.lora.path().to_owned(), problem })
        };
        check(&found.down_key, &found.down, [rank, cols])?;
        check(&found.up_key, &found.up, [rows, rank])?;
        self.taken[at].store(true, Relaxed);
        let scale = (found.scale * f64::from(self.weight)) as f32;
        // Weight 0 switches a LoRA off; there is no need to compute with it.
        Ok((scale != 0.0).then(|| Delta { row, down: found.down.clone(), up: found.up.clone(), scale }))
    }

    /// What was taken; an error when something was not.
    pub fn finish(&self, base: &Path) -> Result<LoraReport> {
        let modules = self.lora.modules.iter().zip(&self.taken);
        let left = modules.filter(|(_, taken)| !taken.load(Relaxed));
        let keys: Vec<String> = left.map(|(m, _)| m.name.clone()).collect();
        let (file, total) = (self.lora.path().to_owned(), self.taken.len());
        if !keys.is_empty() {
            return Err(Error::LoraUnmatched { file, base: base.to_owned(), keys, total });
        }
        Ok(LoraReport { file, matched: total, total, rank: self.lora.rank(), weight: self.weight })
    }
}

/// How a LoRA was taken up: `lora style.safetensors: 112 of 112 modules, rank 16, weight 0.8`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraReport {
    /// The LoRA's file.
    pub file: PathBuf,
    /// Modules that the model took.
    pub matched: usize,
    /// Modules that the LoRA has.
    pub total: usize,
    /// The largest rank of its modules.
    pub rank: usize,
    /// The user's factor.
    pub weight: f32,
}

impl fmt::Display for LoraReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LoraReport { file, matched, total, rank, weight } = self;
        let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
        write!(f, "lora {name}: {matched} of {total} modules, rank {rank}, weight {weight}")
    }
}
