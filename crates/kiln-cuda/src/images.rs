//! The machine code of a source for one GPU: built in, from the disk cache, or compiled now, in this order.

use std::sync::{Arc, OnceLock};

use crate::built_in::BuiltInKernels;
use crate::cache::DiskCache;
use crate::compile::Compiler;
use crate::error::Result;
use crate::probe::Gpu;
use crate::sources::{KernelSource, kernel_sources};
use crate::target::CompileTarget;

/// The kernels' machine code for one GPU.
pub(crate) struct Images {
    built_in: Option<CompileTarget>,
    /// What NVRTC compiles for, unless the GPU is too new for it.
    target: CompileTarget,
    capability: (i32, i32),
    cache: Arc<DiskCache>,
    /// NVRTC, loaded when something has to be compiled.
    compiler: OnceLock<Result<Compiler>>,
    numerics: OnceLock<String>,
}

impl Images {
    pub fn new(gpu: &Gpu, cache: &Arc<DiskCache>) -> Images {
        // Machine code of 8.x runs on later 8.y alone. On other GPUs the driver compiles PTX, which is not built in.
        let target = if gpu.capability.0 == gpu.hardware.0 {
            CompileTarget::machine_code(gpu.capability)
        } else {
            CompileTarget::ptx(gpu.capability)
        };
        // A real GPU must not find an emulated one's kernels in the cache.
        let cache = if gpu.is_emulated() { Arc::default() } else { Arc::clone(cache) };
        let built_in = CompileTarget::built_in_for(gpu.capability);
        Images {
            built_in: built_in.filter(|_| target.is_machine_code() && !gpu.is_emulated()),
            target,
            capability: gpu.capability,
            cache,
            compiler: OnceLock::new(),
            numerics: OnceLock::new(),
        }
    }

    /// Returns a source's machine code (or PTX).
    pub fn get(&self, source: &KernelSource) -> Result<Vec<u8>> {
        if let Some(image) =
            self.built_in.as_ref().and_then(|t| BuiltInKernels::of_program().image(source, t))
        {
            return Ok(image);
        }
        if let Some(image) = self.cache.get(&self.target.key(source)) {
            return Ok(image);
        }
        let compiler = self.compiler()?;
        let target = if self.target.is_machine_code() {
            compiler.target(self.capability)?
        } else {
            self.target.clone()
        };
        self.cache.get_or_create(&target.key(source), || compiler.compile(source, &target))
    }

    /// Fails if [`Images::get`] would need NVRTC, and there is none.
    pub fn check(&self, source: &KernelSource) -> Result<()> {
        if self.is_built_in(source) || self.cache.contains(&self.target.key(source)) {
            return Ok(());
        }
        self.compiler().map(drop)
    }

    /// Whether [`Images::get`] can give a source that [is for](CompileTarget::takes) this GPU: NVRTC may be too old for it.
    pub fn can_get(&self, source: &KernelSource) -> bool {
        let is_known =
            |compiler: &Compiler| compiler.target(self.capability).is_ok_and(|target| target.takes(source));
        self.target.takes(source)
            && (self.is_built_in(source)
                || self.cache.contains(&self.target.key(source))
                || self.compiler().is_ok_and(is_known))
    }

    /// What the last bits of the kernels' results depend on: the architecture, and the compiler of kernels that are not
    /// part of the program.
    pub fn numerics(&self) -> &str {
        self.numerics.get_or_init(|| {
            if kernel_sources()
                .filter(|source| self.target.takes(source))
                .all(|source| self.is_built_in(&source))
            {
                return format!("built-in kernels {}", self.target.arch);
            }
            match self.compiler().map(Compiler::version) {
                Ok((major, minor)) => format!("nvrtc {major}.{minor} {}", self.target.arch),
                Err(_) => format!("cached kernels {}", self.target.arch),
            }
        })
    }

    fn is_built_in(&self, source: &KernelSource) -> bool {
        self.built_in.as_ref().is_some_and(|target| BuiltInKernels::of_program().contains(source, target))
    }

    fn compiler(&self) -> Result<&Compiler> {
        self.compiler.get_or_init(Compiler::find).as_ref().map_err(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_kernels_need_no_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Arc::new(DiskCache::new(Some(folder.path().into())));
        // PTX of 8.0 on another generation, which is never built in.
        let gpu = Gpu {
            ordinal: 0,
            name: "a GPU".into(),
            capability: (8, 0),
            hardware: (9, 0),
            memory: 0,
            multiprocessors: 1,
            shared_memory: 0,
        };
        let images = Images::new(&gpu, &cache);
        let norm = KernelSource { name: "norm" };
        assert!(!images.is_built_in(&norm));
        cache.put(&CompileTarget::new("compute_80").key(&norm), b"PTX");
        assert_eq!((images.check(&norm), images.get(&norm)), (Ok(()), Ok(b"PTX".to_vec())));
        assert!(images.compiler.get().is_none());
    }
}
