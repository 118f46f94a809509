//! Loaded kernels: compiled, or read from the disk cache, on first use.
//!
//! What every image needs is compiled in parallel as soon as the GPU is opened, while weights load: the first image of a
//! new process, with nothing cached, takes 4 to 5 s for klein 4B on an H200.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::primary_context::PrimaryContext;
use crate::cache::DiskCache;
use crate::compile::Compiler;
use crate::error::Result;
use crate::sources::{CompileTarget, KernelSource};
use crate::sys::driver::FUNCTION_SHARED_BYTES;
use kiln_base::lock;

/// Dynamic shared memory a block can use without raising the kernel's limit: 48 KiB, less the static arrays of our kernels.
const DEFAULT_SHARED_BYTES: usize = 47 << 10;

/// The kernels of one GPU, unloaded on drop; the stream has to be idle then.
pub(crate) struct Modules {
    primary: Arc<PrimaryContext>,
    compiler: Arc<Compiler>,
    target: CompileTarget,
    cache: Arc<DiskCache>,
    loaded: Mutex<LoadedKernels>,
    /// Compilations in progress, by source name.
    compiling: Mutex<HashMap<&'static str, JoinHandle<Result<Vec<u8>>>>>,
}

#[derive(Default)]
struct LoadedKernels {
    modules: HashMap<&'static str, Handle>,
    functions: HashMap<&'static str, Function>,
}

#[derive(Clone, Copy)]
struct Handle(*mut c_void);

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Handle {}

/// A launchable kernel.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    handle: Handle,
    /// Maximum shared memory per block, in bytes.
    shared: usize,
}

impl Function {
    /// The driver's handle.
    pub fn raw(&self) -> *mut c_void {
        self.handle.0
    }
}

impl Modules {
    pub fn compiler_version(&self) -> (i32, i32) {
        self.compiler.version()
    }

    pub fn new(primary: &Arc<PrimaryContext>, cache: &Arc<DiskCache>) -> Result<Modules> {
        let compiler = Arc::new(Compiler::find()?);
        let (major, minor) = primary.gpu.capability;
        let target = compiler.target(major, minor)?;
        // Every image needs these. Compiling takes seconds, so do it in parallel while weights load.
        let compiling = KernelSource::compiled_at_start(primary.gpu.capability).map(|source| {
            let (compiler, target, cache) = (Arc::clone(&compiler), target.clone(), Arc::clone(cache));
            (source.name, std::thread::spawn(move || compiler.compile_cached(&source, &target, &cache)))
        });
        let compiling = Mutex::new(compiling.collect());
        let (primary, cache) = (Arc::clone(primary), Arc::clone(cache));
        Ok(Modules { primary, compiler, target, cache, loaded: Mutex::default(), compiling })
    }

    /// Returns a kernel that is already loaded with at least `shared` bytes per block, and makes the context current.
    pub fn loaded(&self, name: &str, shared: usize) -> Result<Option<Function>> {
        self.primary.make_current()?;
        let loaded = lock(&self.loaded);
        Ok(loaded.functions.get(name).copied().filter(|function| shared <= function.shared))
    }

    /// Loads a kernel for `shared` bytes per block.
    pub fn load(&self, source: &KernelSource, name: &'static str, shared: usize) -> Result<Function> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        let mut loaded = lock(&self.loaded);
        let module = match loaded.modules.get(source.name) {
            Some(&module) => module,
            None => {
                let module = self.load_module(source)?;
                loaded.modules.insert(source.name, module);
                module
            }
        };
        let mut handle = null_mut();
        let symbol = CString::new(name).unwrap_or_default();
        // SAFETY: the module stays loaded; the name is nul-terminated.
        unsafe {
            let status = (driver.module_function)(&mut handle, module.0, symbol.as_ptr());
            driver.check("cuModuleGetFunction", status)?;
            if shared > DEFAULT_SHARED_BYTES {
                let status = (driver.function_set_attribute)(handle, FUNCTION_SHARED_BYTES, shared as i32);
                driver.check("cuFuncSetAttribute", status)?;
            }
        }
        let function = Function { handle: Handle(handle), shared: shared.max(DEFAULT_SHARED_BYTES) };
        loaded.functions.insert(name, function);
        Ok(function)
    }

    fn load_module(&self, source: &KernelSource) -> Result<Handle> {
        let compiling = lock(&self.compiling).remove(source.name);
        let mut image = match compiling.map(JoinHandle::join) {
            Some(Ok(image)) => image?,
            // Not started, or its thread panicked: compile here.
            _ => self.compiler.compile_cached(source, &self.target, &self.cache)?,
        };
        // PTX has to be nul-terminated.
        image.push(0);
        let driver = &self.primary.driver;
        let mut module = null_mut();
        // SAFETY: the image is the compiler's output for this device.
        let status = unsafe { (driver.module_load)(&mut module, image.as_ptr().cast()) };
        driver.check("cuModuleLoadData", status)?;
        Ok(Handle(module))
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let compiling = std::mem::take(&mut *lock(&self.compiling));
        // Compilations must end before the process does.
        compiling.into_values().for_each(|thread| drop(thread.join()));
        if self.primary.make_current().is_ok() {
            let loaded = lock(&self.loaded);
            for module in loaded.modules.values() {
                // SAFETY: the stream is idle and the module's functions are not used any more.
                unsafe { (self.primary.driver.module_unload)(module.0) };
            }
        }
    }
}
