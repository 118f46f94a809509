//! Compiles kernels with NVRTC.

use crate::error::Result;
use crate::find::{self, CudaLibrary};
use crate::sources::KernelSource;
use crate::sys::nvrtc::Nvrtc;
use crate::target::CompileTarget;

/// The kernel compiler.
pub struct Compiler {
    nvrtc: Nvrtc,
    version: (i32, i32),
}

impl Compiler {
    /// Loads NVRTC.
    pub fn find() -> Result<Compiler> {
        let nvrtc = Nvrtc::new(find::load(CudaLibrary::Nvrtc)?)?;
        let version = nvrtc.read_version()?;
        Ok(Compiler { nvrtc, version })
    }

    /// NVRTC's version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Whether it can generate machine code for this compute capability.
    pub fn supports(&self, (major, minor): (i32, i32)) -> Result<bool> {
        Ok(self.nvrtc.supported_archs()?.contains(&(10 * major + minor)))
    }

    /// Returns the target for a GPU of this compute capability: PTX of the newest supported architecture if the GPU is
    /// newer than the compiler.
    pub fn target(&self, capability: (i32, i32)) -> Result<CompileTarget> {
        if self.supports(capability)? {
            return Ok(CompileTarget::machine_code(capability));
        }
        let own = 10 * capability.0 + capability.1;
        let newest = self.nvrtc.supported_archs()?.into_iter().filter(|&arch| arch < own).max().unwrap_or(80);
        Ok(CompileTarget::ptx((newest / 10, newest % 10)))
    }

    /// Compiles one source file to machine code (or PTX).
    pub fn compile(&self, source: &KernelSource, target: &CompileTarget) -> Result<Vec<u8>> {
        let (text, options) = (source.full_text(), target.options());
        self.nvrtc.build(source.name, &text, &target.arch, &options, target.is_machine_code())
    }
}
