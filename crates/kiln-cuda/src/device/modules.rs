//! Kernels: compiled or found when one is first needed.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::primary::Primary;
use crate::cache::Cache;
use crate::compile::Compiler;
use crate::error::Result;
use crate::sources::{Source, Target};
use crate::sys::driver::FUNCTION_SHARED_BYTES;
use kiln_base::lock;

/// Shared memory that a block gets without being granted more.
const SHARED_UNASKED: usize = 48 << 10;

/// The kernels of one GPU, unloaded at the end; nothing runs any more then.
pub(crate) struct Modules {
    primary: Arc<Primary>,
    compiler: Arc<Compiler>,
    target: Target,
    cache: Arc<Cache>,
    loaded: Mutex<Loaded>,
    /// Kernels that are being compiled, by the name of their source.
    coming: Mutex<HashMap<&'static str, JoinHandle<Result<Vec<u8>>>>>,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Handle>,
    functions: HashMap<&'static str, Function>,
}

#[derive(Clone, Copy)]
struct Handle(*mut c_void);

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Handle {}

/// A kernel that can be launched.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    handle: Handle,
    /// Bytes of shared memory a block may have.
    shared: usize,
}

impl Function {
    /// The driver's handle.
    pub fn raw(&self) -> *mut c_void {
        self.handle.0
    }
}

impl Modules {
    pub fn new(primary: &Arc<Primary>, cache: &Arc<Cache>) -> Result<Modules> {
        let compiler = Arc::new(Compiler::find()?);
        let (major, minor) = primary.gpu.capability;
        let target = compiler.target(major, minor)?;
        // Every picture needs these, and compiling them takes seconds: all at once, while weights are being read.
        let coming = Source::usual(primary.gpu.capability).into_iter().map(|source| {
            let (compiler, target, cache) = (Arc::clone(&compiler), target.clone(), Arc::clone(cache));
            (source.name, std::thread::spawn(move || compiler.compile_once(source, &target, &cache)))
        });
        let coming = Mutex::new(coming.collect());
        let (primary, cache) = (Arc::clone(primary), Arc::clone(cache));
        Ok(Modules { primary, compiler, target, cache, loaded: Mutex::default(), coming })
    }

    /// A kernel whose blocks may have `shared` bytes, if it is loaded; the context is current then.
    pub fn loaded(&self, name: &str, shared: usize) -> Result<Option<Function>> {
        self.primary.enter()?;
        let loaded = lock(&self.loaded);
        Ok(loaded.functions.get(name).copied().filter(|function| shared <= function.shared))
    }

    /// The same, loaded if it was not.
    pub fn load(&self, source: &Source, name: &'static str, shared: usize) -> Result<Function> {
        self.primary.enter()?;
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
        // SAFETY: the module is loaded and stays so; the name ends with zero.
        unsafe {
            let status = (driver.module_function)(&mut handle, module.0, symbol.as_ptr());
            driver.check("cuModuleGetFunction", status)?;
            if shared > SHARED_UNASKED {
                let status = (driver.function_set_attribute)(handle, FUNCTION_SHARED_BYTES, shared as i32);
                driver.check("cuFuncSetAttribute", status)?;
            }
        }
        let function = Function { handle: Handle(handle), shared: shared.max(SHARED_UNASKED) };
        loaded.functions.insert(name, function);
        Ok(function)
    }

    fn load_module(&self, source: &Source) -> Result<Handle> {
        let coming = lock(&self.coming).remove(source.name);
        let mut image = match coming.map(JoinHandle::join) {
            Some(Ok(image)) => image?,
            // Not begun, or its thread died: then once more, here.
            _ => self.compiler.compile_once(source, &self.target, &self.cache)?,
        };
        // PTX is read up to a zero.
        image.push(0);
        let driver = &self.primary.driver;
        let mut module = null_mut();
        // SAFETY: the image is what the compiler gave for this device.
        let status = unsafe { (driver.module_load)(&mut module, image.as_ptr().cast()) };
        driver.check("cuModuleLoadData", status)?;
        Ok(Handle(module))
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let coming = std::mem::take(&mut *lock(&self.coming));
        // The compiler must not run on while the process ends.
        coming.into_values().for_each(|thread| drop(thread.join()));
        if self.primary.enter().is_ok() {
            let mut loaded = lock(&self.loaded);
            for module in loaded.modules.values() {
                // SAFETY: nothing runs any more, and nobody has the module's functions.
                unsafe { (self.primary.driver.module_unload)(module.0) };
            }
        }
    }
}
