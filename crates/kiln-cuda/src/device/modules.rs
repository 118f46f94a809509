//! Loaded kernels, each source on first use.
//!
//! What every image needs is unpacked, or compiled, and loaded in parallel as soon as the GPU is opened, while weights load:
//! later, loading waits for all work on the GPU. Where all of it has to be compiled, the first image of klein 4B takes 4 to 5 s on
//! an H200.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::primary_context::PrimaryContext;
use crate::cache::DiskCache;
use crate::error::Result;
use crate::images::Images;
use crate::sources::KernelSource;
use crate::sys::driver::FUNCTION_SHARED_BYTES;
use kiln_base::lock;

/// Dynamic shared memory a block can use without raising the kernel's limit: 48 KiB, less the static arrays of our kernels.
const DEFAULT_SHARED_BYTES: usize = 47 << 10;

/// The kernels of one GPU, unloaded on drop; the stream has to be idle then.
pub(crate) struct Modules {
    primary: Arc<PrimaryContext>,
    images: Arc<Images>,
    loaded: Mutex<LoadedKernels>,
    /// Sources that are being loaded, by name.
    starting: Mutex<HashMap<&'static str, JoinHandle<Result<Handle>>>>,
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
    /// Fails if kernels that every image needs are neither there nor can be compiled.
    pub fn new(primary: &Arc<PrimaryContext>, cache: &Arc<DiskCache>) -> Result<Modules> {
        let images = Arc::new(Images::new(&primary.gpu, cache));
        let needed: Vec<KernelSource> = KernelSource::needed_at_start(primary.gpu.capability).collect();
        needed.iter().try_for_each(|source| images.check(source))?;
        let starting = needed.into_iter().map(|source| {
            let (primary, images) = (Arc::clone(primary), Arc::clone(&images));
            (source.name, std::thread::spawn(move || load_module(&primary, &images, &source)))
        });
        let starting = Mutex::new(starting.collect());
        Ok(Modules { primary: Arc::clone(primary), images, loaded: Mutex::default(), starting })
    }

    /// The kernels' machine code.
    pub fn images(&self) -> &Images {
        &self.images
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
                let started = lock(&self.starting).remove(source.name);
                let module = match started.map(JoinHandle::join) {
                    Some(Ok(module)) => module?,
                    // Not started, or its thread panicked.
                    _ => load_module(&self.primary, &self.images, source)?,
                };
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
}

impl Drop for Modules {
    fn drop(&mut self) {
        let starting = std::mem::take(&mut *lock(&self.starting));
        // Compilations must end before the process does.
        let started = starting.into_values().filter_map(|thread| thread.join().ok()?.ok());
        let loaded = std::mem::take(&mut lock(&self.loaded).modules);
        let modules: Vec<Handle> = started.chain(loaded.into_values()).collect();
        if self.primary.make_current().is_ok() {
            for module in modules {
                // SAFETY: the stream is idle and the module's functions are not used any more.
                unsafe { (self.primary.driver.module_unload)(module.0) };
            }
        }
    }
}

fn load_module(primary: &PrimaryContext, images: &Images, source: &KernelSource) -> Result<Handle> {
    let mut image = images.get(source)?;
    // PTX has to be nul-terminated.
    image.push(0);
    primary.make_current()?;
    let mut module = null_mut();
    // SAFETY: the image is for this device.
    let status = unsafe { (primary.driver.module_load)(&mut module, image.as_ptr().cast()) };
    primary.driver.check("cuModuleLoadData", status)?;
    Ok(Handle(module))
}
