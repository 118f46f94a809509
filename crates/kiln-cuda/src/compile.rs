//! Kernels from their source, by NVRTC, once for each GPU and compiler.

use crate::cache::{Cache, Key};
use crate::error::Result;
use crate::find::{self, Wanted};
use crate::sources::{Source, Target};
use crate::sys::nvrtc::Nvrtc;

/// Compiles kernels.
pub struct Compiler {
    nvrtc: Nvrtc,
    version: (i32, i32),
}

impl Compiler {
    /// Looks for NVRTC.
    pub fn find() -> Result<Compiler> {
        let nvrtc = Nvrtc::new(find::load(Wanted::Nvrtc)?)?;
        let version = nvrtc.numbers()?;
        Ok(Compiler { nvrtc, version })
    }

    /// Its version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The target for a GPU of this compute capability.
    pub fn target(&self, major: i32, minor: i32) -> Result<Target> {
        Ok(Target::of(major, minor, &self.nvrtc.supported()?))
    }

    /// Whether it can make machine code for this compute capability (times 10).
    pub fn knows(&self, capability: i32) -> Result<bool> {
        Ok(self.nvrtc.supported()?.contains(&capability))
    }

    /// Machine code (or PTX) of one file of kernels.
    pub fn compile(&self, source: &Source, target: &Target) -> Result<Vec<u8>> {
        self.nvrtc.build(source.name, &source.full_text(), &target.arch, &target.options(), target.binary)
    }

    /// [`Compiler::compile`], unless the cache has it.
    pub(crate) fn compile_once(&self, source: &Source, target: &Target, cache: &Cache) -> Result<Vec<u8>> {
        let key = key(source, target, self.version);
        cache.get_or_make(&key, || self.compile(source, target))
    }
}

fn key(source: &Source, target: &Target, (major, minor): (i32, i32)) -> Key {
    let (text, options) = (source.full_text(), target.options().join(" "));
    let version = format!("{major}.{minor}");
    let stem = format!("{}-{}", source.name, target.arch);
    Key::new(&stem, &[text.as_bytes(), options.as_bytes(), &[u8::from(target.binary)], version.as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::SOURCES;

    #[test]
    fn another_kernel_gpu_or_compiler_is_another_entry() {
        let hopper = Target { arch: "sm_90a".into(), binary: true };
        let ampere = Target { arch: "sm_80".into(), binary: true };
        let ptx = Target { arch: "sm_90a".into(), binary: false };
        let base = key(&SOURCES[0], &hopper, (13, 0));
        assert_eq!(base, key(&SOURCES[0], &hopper.clone(), (13, 0)));
        for other in [
            key(&SOURCES[1], &hopper, (13, 0)),
            key(&SOURCES[0], &ampere, (13, 0)),
            key(&SOURCES[0], &ptx, (13, 0)),
            key(&SOURCES[0], &hopper, (13, 1)),
        ] {
            assert_ne!(base, other);
        }
    }
}
