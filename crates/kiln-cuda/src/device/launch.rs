//! Kernels: compiled or found when one is first needed, and put on the stream.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::PoisonError;
use std::thread::JoinHandle;

use super::Device;
use crate::sources::Source;
use crate::sys::driver::FUNCTION_SHARED_BYTES;
use crate::{Error, Result};

/// Shared memory that a block gets without being granted more.
const SHARED_UNASKED: usize = 48 << 10;

/// What is loaded.
#[derive(Default)]
pub(super) struct Modules {
    pub loaded: HashMap<&'static str, Handle>,
    functions: HashMap<&'static str, Function>,
}

#[derive(Clone, Copy)]
pub(super) struct Handle(pub *mut c_void);

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Handle {}

#[derive(Clone, Copy)]
struct Function {
    handle: Handle,
    /// Bytes of shared memory a block may have.
    shared: usize,
}

/// A value that a kernel takes, with the size and layout it has there.
///
/// # Safety
///
/// The type is one of the kernels' own.
pub(crate) unsafe trait Argument: Copy {}

// SAFETY: a pointer there.
unsafe impl Argument for u64 {}

// SAFETY: `int`.
unsafe impl Argument for i32 {}

// SAFETY: `long long`.
unsafe impl Argument for i64 {}

// SAFETY: `float`.
unsafe impl Argument for f32 {}

/// Where an argument lies, for the launch that copies it.
pub(crate) fn argument<T: Argument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Launches a kernel: `launch!(device, SOURCE, "name", grid, threads, shared bytes; arguments …)`.
///
/// The arguments' number and types are those of the kernel; what they point to is large enough.
macro_rules! launch {
    ($device:expr, $source:expr, $name:expr, $grid:expr, $threads:expr, $shared:expr; $($argument:expr),* $(,)?) => {
        // SAFETY: every launcher names the arguments of its kernel, having checked their sizes.
        unsafe {
            $device.launch(
                &$source, $name, $grid, $threads, $shared,
                &mut [$(crate::device::argument(&{ $argument })),*],
            )
        }
    };
}
pub(crate) use launch;

impl Device {
    /// Puts a kernel on the stream. An empty grid is no work.
    ///
    /// # Safety
    ///
    /// The arguments are the kernel's, and the memory they point to suffices.
    pub unsafe fn launch(
        &self,
        source: &Source,
        name: &'static str,
        grid: [usize; 2],
        threads: usize,
        shared: usize,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let [x, y] = grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let function = self.function(source, name, shared)?;
        // SAFETY: as the caller promises.
        let status = unsafe {
            (self.driver.launch)(
                function.handle.0,
                x,
                y,
                1,
                threads as u32,
                1,
                1,
                shared as u32,
                self.stream(),
                arguments.as_mut_ptr(),
                null_mut(),
            )
        };
        self.driver.check("cuLaunchKernel", status).map_err(|e| match e {
            Error::Call { call, what } => Error::Call { call, what: format!("{what} (kernel `{name}`)") },
            other => other,
        })
    }

    fn function(&self, source: &Source, name: &'static str, shared: usize) -> Result<Function> {
        self.enter()?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = modules.functions.get(name)
            && shared <= function.shared
        {
            return Ok(function);
        }
        self.not_recording("cuModuleGetFunction")?;
        let module = match modules.loaded.get(source.name) {
            Some(&module) => module,
            None => {
                let module = self.load(source)?;
                modules.loaded.insert(source.name, module);
                module
            }
        };
        let mut handle = null_mut();
        let symbol = CString::new(name).unwrap_or_default();
        // SAFETY: the module is loaded and stays so; the name ends with zero.
        unsafe {
            let status = (self.driver.module_function)(&mut handle, module.0, symbol.as_ptr());
            self.driver.check("cuModuleGetFunction", status)?;
            if shared > SHARED_UNASKED {
                let status =
                    (self.driver.function_set_attribute)(handle, FUNCTION_SHARED_BYTES, shared as i32);
                self.driver.check("cuFuncSetAttribute", status)?;
            }
        }
        let function = Function { handle: Handle(handle), shared: shared.max(SHARED_UNASKED) };
        modules.functions.insert(name, function);
        Ok(function)
    }

    fn load(&self, source: &Source) -> Result<Handle> {
        let coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner).remove(source.name);
        let mut image = match coming.map(JoinHandle::join) {
            Some(Ok(image)) => image?,
            // Not begun, or its thread died: then once more, here.
            _ => self.compiler.compile_once(source, &self.target, &self.cache)?,
        };
        // PTX is read up to a zero.
        image.push(0);
        let mut module = null_mut();
        // SAFETY: the image is what the compiler gave for this device.
        let status = unsafe { (self.driver.module_load)(&mut module, image.as_ptr().cast()) };
        self.driver.check("cuModuleLoadData", status)?;
        Ok(Handle(module))
    }
}
