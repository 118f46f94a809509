//! Products of aligned matrices, on the faster of cuBLASLt and Kiln's own kernels: measured once per shape and cached on disk.

use std::collections::HashMap;
use std::sync::Mutex;

use kiln_base::lock;

use super::cublaslt::{CublasLtGemm, RowScaling};
use super::hopper::HopperGemm;
use super::mma::MmaGemm;
use super::shape::{GemmShape, Operands};
use crate::cache::CacheKey;
use crate::error::{Error, Result};
use crate::later::Later;
use crate::queue::Queue;
use crate::sources::KernelSource;

/// Both implementations, and which one is faster.
pub(crate) struct FastGemm {
    cublaslt: Later<Result<CublasLtGemm>>,
    hopper: HopperGemm,
    mma: MmaGemm,
    choices: Mutex<HashMap<GemmShape, Implementation>>,
    /// Whether a fused product is faster than what computes the same in several launches.
    fused: Mutex<HashMap<GemmShape, bool>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Implementation {
    CublasLt,
    Own,
}

impl FastGemm {
    pub fn new(cublaslt: Later<Result<CublasLtGemm>>) -> FastGemm {
        FastGemm {
            cublaslt,
            hopper: HopperGemm::new(),
            mma: MmaGemm::new(),
            choices: Mutex::default(),
            fused: Mutex::default(),
        }
    }

    /// cuBLASLt, or why it is not used.
    pub fn cublaslt(&self) -> &Result<CublasLtGemm> {
        self.cublaslt.get()
    }

    /// Whether one of them takes the product.
    pub fn supports(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> bool {
        is_supported(queue, shape, operands)
            || self.cublaslt().is_ok() && CublasLtGemm::supports(shape, operands)
    }

    /// Runs a product that is supported.
    pub fn run(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<RowScaling> {
        match (self.choose(queue, shape, operands)?, self.cublaslt()) {
            (Implementation::CublasLt, Ok(cublaslt)) => cublaslt.run(queue, shape, operands),
            _ => self.run_own(queue, shape, operands).map(|()| RowScaling::Applied),
        }
    }

    /// Whether [`FastGemm::run`] applies the row scales.
    pub fn applies_scales(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<bool> {
        match (self.choose(queue, shape, operands)?, self.cublaslt()) {
            (Implementation::CublasLt, Ok(cublaslt)) => cublaslt.applies_scales(queue, shape, operands),
            _ => Ok(true),
        }
    }

    /// Whether there is a kernel for a fused product.
    pub fn fuses(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> bool {
        is_supported(queue, shape, operands)
    }

    /// Runs a fused product.
    pub fn run_fused(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<()> {
        self.run_own(queue, shape, operands)
    }

    /// Whether a fused product takes less time than `unfused`, which computes the same: measured as they are used, once per
    /// shape, and cached on disk. Without cuBLASLt, `unfused` would be the same kernels and more.
    pub fn prefers_fused(
        &self,
        queue: &Queue,
        shape: &GemmShape,
        operands: &Operands,
        unfused: impl Fn() -> Result<()>,
    ) -> Result<bool> {
        let Ok(cublaslt) = self.cublaslt() else { return Ok(true) };
        if !shape.is_worth_timing() {
            return Ok(true);
        }
        let mut choices = lock(&self.fused);
        if let Some(choice) = choices.get(shape) {
            return Ok(*choice);
        }
        let device = queue.device("cuEventSynchronize")?;
        let (text, version) = (format!("{shape:?}"), cublaslt.version_text());
        let (kernels, gpu) = (own_source(queue, shape, operands).full_text(), queue.gpu().name.as_bytes());
        let key = CacheKey::new("fused", &[text.as_bytes(), version.as_bytes(), kernels.as_bytes(), gpu]);
        let choice = match device.cache.get(&key).as_deref() {
            Some(b"fused") => true,
            Some(b"unfused") => false,
            _ => {
                let fused = queue.time_repeated(|| self.run_fused(queue, shape, operands))?;
                match queue.time_repeated(unfused) {
                    Ok(milliseconds) => {
                        let choice = fused <= milliseconds;
                        device.cache.put(&key, if choice { &b"fused"[..] } else { b"unfused" });
                        choice
                    }
                    // It takes more memory.
                    Err(_) => true,
                }
            }
        };
        choices.insert(*shape, choice);
        Ok(choice)
    }

    fn run_own(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<()> {
        if HopperGemm::supports(queue, shape, operands) {
            self.hopper.run(queue, shape, operands)
        } else {
            self.mma.run(queue, shape, operands)
        }
    }

    fn choose(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<Implementation> {
        let Ok(cublaslt) = self.cublaslt() else { return Ok(Implementation::Own) };
        match (CublasLtGemm::supports(shape, operands), is_supported(queue, shape, operands)) {
            (false, _) => return Ok(Implementation::Own),
            (true, false) => return Ok(Implementation::CublasLt),
            (true, true) if !shape.is_worth_timing() => return Ok(Implementation::CublasLt),
            (true, true) => {}
        }
        // Locked while they are measured: two at once would disturb each other.
        let mut choices = lock(&self.choices);
        if let Some(choice) = choices.get(shape) {
            return Ok(*choice);
        }
        let choice = self.measured(queue, cublaslt, shape, operands)?;
        choices.insert(*shape, choice);
        Ok(choice)
    }

    fn measured(
        &self,
        queue: &Queue,
        cublaslt: &CublasLtGemm,
        shape: &GemmShape,
        operands: &Operands,
    ) -> Result<Implementation> {
        use Implementation::{CublasLt, Own};
        let device = queue.device("cuEventSynchronize")?;
        let (text, version) = (format!("{shape:?}"), cublaslt.version_text());
        let kernels = own_source(queue, shape, operands).full_text();
        let gpu = queue.gpu().name.as_bytes();
        let key = CacheKey::new("matmul", &[text.as_bytes(), version.as_bytes(), kernels.as_bytes(), gpu]);
        match device.cache.get(&key).as_deref() {
            Some(b"cublaslt") => return Ok(CublasLt),
            Some(b"own") => return Ok(Own),
            _ => {}
        }
        // Use scratch memory: a product that accumulates into its result cannot be repeated in place.
        let Some(scratch) = queue.allocate(shape.out_bytes())? else { return Ok(CublasLt) };
        let trial = Operands { out: scratch.ptr(queue), ..*operands };
        let own = queue.time_repeated(|| self.run_own(queue, shape, &trial))?;
        let choice = match queue.time_repeated(|| cublaslt.run(queue, shape, &trial).map(drop)) {
            Ok(milliseconds) if milliseconds <= own => CublasLt,
            // cuBLASLt does not support some sizes.
            Ok(_) | Err(Error::Call { .. }) => Own,
            Err(e) => return Err(e),
        };
        device.cache.put(&key, if choice == CublasLt { &b"cublaslt"[..] } else { b"own" });
        Ok(choice)
    }
}

/// Whether Kiln's own kernels take the product.
fn is_supported(queue: &Queue, shape: &GemmShape, operands: &Operands) -> bool {
    HopperGemm::supports(queue, shape, operands) || MmaGemm::supports(queue, shape, operands)
}

/// The source of those that do.
fn own_source(queue: &Queue, shape: &GemmShape, operands: &Operands) -> KernelSource {
    if HopperGemm::supports(queue, shape, operands) { HopperGemm::SOURCE } else { MmaGemm::SOURCE }
}
