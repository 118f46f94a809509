//! Compiles kernels with NVRTC, once per GPU architecture and compiler version.

use crate::cache::{CacheKey, DiskCache};
use crate::error::Result;
use crate::find::{self, CudaLibrary};
use crate::sources::{CompileTarget, KernelSource};
use crate::sys::nvrtc::Nvrtc;

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

    /// Returns the target for a GPU of this compute capability.
    pub fn target(&self, major: i32, minor: i32) -> Result<CompileTarget> {
        Ok(CompileTarget::for_capability(major, minor, &self.nvrtc.supported_archs()?))
    }

    /// Whether it can generate machine code for this compute capability (times 10).
    pub fn supports(&self, capability: i32) -> Result<bool> {
        Ok(self.nvrtc.supported_archs()?.contains(&capability))
    }

    /// Compiles one source file to machine code (or PTX).
    pub fn compile(&self, source: &KernelSource, target: &CompileTarget) -> Result<Vec<u8>> {
        self.nvrtc.build(source.name, &source.full_text(), &target.arch, &target.options(), target.binary)
    }

    /// [`Compiler::compile`] through the disk cache.
    pub(crate) fn compile_cached(
        &self,
        source: &KernelSource,
        target: &CompileTarget,
        cache: &DiskCache,
    ) -> Result<Vec<u8>> {
        let key = key(source, target, self.version);
        cache.get_or_create(&key, || self.compile(source, target))
    }
}

fn key(source: &KernelSource, target: &CompileTarget, (major, minor): (i32, i32)) -> CacheKey {
    let (text, options) = (source.full_text(), target.options().join(" "));
    let version = format!("{major}.{minor}");
    let stem = format!("{}-{}", source.name, target.arch);
    CacheKey::new(
        &stem,
        &[text.as_bytes(), options.as_bytes(), &[u8::from(target.binary)], version.as_bytes()],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_kernel_gpu_or_compiler_is_another_entry() {
        let hopper = CompileTarget { arch: "sm_90a".into(), binary: true };
        let ampere = CompileTarget { arch: "sm_80".into(), binary: true };
        let ptx = CompileTarget { arch: "sm_90a".into(), binary: false };
        let base = key(&KernelSource { name: "norm" }, &hopper, (13, 0));
        assert_eq!(base, key(&KernelSource { name: "norm" }, &hopper.clone(), (13, 0)));
        for other in [
            key(&KernelSource { name: "rope" }, &hopper, (13, 0)),
            key(&KernelSource { name: "norm" }, &ampere, (13, 0)),
            key(&KernelSource { name: "norm" }, &ptx, (13, 0)),
            key(&KernelSource { name: "norm" }, &hopper, (13, 1)),
        ] {
            assert_ne!(base, other);
        }
    }
}
