//! One GPU: its context, the one stream all work goes to, its memory and its kernels.

mod copies;
mod launch;
mod memory;
mod time;

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::arena::Arena;
use crate::cache::Cache;
use crate::compile::Compiler;
use crate::flags::Flags;
use crate::gemm::lt::Lt;
use crate::pinned::Pinned;
use crate::probe::{self, Gpu};
use crate::replay::Registry;
use crate::sources::{Source, Target};
use crate::staging::Staging;
use crate::stream::{Quota, Streamer};
use crate::sys::driver::{Driver, STREAM_NON_BLOCKING};
use crate::{Error, Graphs, Options, Result};
use launch::Modules;
pub(crate) use launch::{Argument, argument, launch};
pub(crate) use memory::Block;

pub(crate) struct Device {
    pub driver: Driver,
    pub gpu: Gpu,
    pub cache: Arc<Cache>,
    /// cuBLASLt, or why products are made without it.
    pub lt: Result<Lt>,
    pub flags: Flags,
    compiler: Arc<Compiler>,
    target: Target,
    raw: Raw,
    arena: Arena,
    modules: Mutex<Modules>,
    /// Kernels that are being compiled, by the name of their source.
    coming: Mutex<HashMap<&'static str, JoinHandle<Result<Vec<u8>>>>>,
    /// Made when a large copy first needs it; `None` where the driver has no such memory.
    staging: Mutex<Option<Option<Staging>>>,
    /// Where copies arrive that are waited for later.
    pub pinned: Pinned,
    streamer: Mutex<Streamer>,
    /// Which of the weights to come stay on the device; all, where nobody said otherwise.
    quota: Mutex<Option<Quota>>,
    /// Whether work that is asked for again and again is recorded.
    pub graphs: Graphs,
    /// What was recorded, to be dropped when memory runs out.
    pub recorded: Registry,
}

/// The driver's handles.
struct Raw {
    device: i32,
    context: *mut c_void,
    stream: *mut c_void,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Raw {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Raw {}

impl Device {
    pub fn new(options: &Options) -> Result<Device> {
        let driver = probe::driver()?;
        let gpus = probe::gpus(&driver)?;
        let count = gpus.len();
        let gpu = gpus.into_iter().nth(options.device);
        let gpu = gpu.ok_or(Error::NoDevice { ordinal: options.device, count })?;
        if gpu.capability.0 < 8 {
            let (major, minor) = gpu.capability;
            return Err(Error::TooOld { name: gpu.name, major, minor });
        }
        let compiler = Arc::new(Compiler::find()?);
        let target = compiler.target(gpu.capability.0, gpu.capability.1)?;
        let raw = Raw::new(&driver, gpu.ordinal as i32)?;
        let lt = if options.own_products {
            Err(Error::Missing { library: "cuBLASLt", install: "it was not asked for" })
        } else {
            Lt::new()
        };
        let folder = if options.keep { Cache::usual_folder() } else { None };
        let cache = Arc::new(Cache::at(options.cache.clone().or(folder)));
        let (arena, modules, staging) =
            (Arena::new(options.memory_limit), Mutex::default(), Mutex::default());
        let (streamer, quota, recorded) = (Mutex::default(), Mutex::default(), Registry::default());
        // What is recorded keeps its memory, and a limit says that there is little.
        let graphs = match options.graphs {
            Graphs::Auto if options.memory_limit.is_some() => Graphs::Never,
            graphs => graphs,
        };
        // Every picture needs these, and compiling them takes seconds: all at once, while weights are being read.
        let coming = Source::usual(gpu.capability).into_iter().map(|source| {
            let (compiler, target, cache) = (Arc::clone(&compiler), target.clone(), Arc::clone(&cache));
            (source.name, std::thread::spawn(move || compiler.compile_once(source, &target, &cache)))
        });
        let coming = Mutex::new(coming.collect());
        Ok(Device {
            driver,
            gpu,
            cache,
            lt,
            flags: Flags::default(),
            compiler,
            target,
            raw,
            arena,
            modules,
            coming,
            staging,
            pinned: Pinned::default(),
            streamer,
            quota,
            graphs,
            recorded,
        })
    }

    /// Makes the context this thread's.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as the device.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.raw.context) })
    }

    /// The one stream; or, while this thread records work, the one it is recorded from.
    pub fn stream(&self) -> *mut c_void {
        self.recording().unwrap_or(self.raw.stream)
    }

    /// Waits for all work so far.
    pub fn wait(&self) -> Result<()> {
        self.not_recording("cuStreamSynchronize")?;
        self.enter()?;
        // SAFETY: the stream lives as long as the device.
        self.driver.check("cuStreamSynchronize", unsafe { (self.driver.stream_wait)(self.raw.stream) })
    }

    /// The weights that are brought in when they are used.
    pub fn streamer(&self) -> MutexGuard<'_, Streamer> {
        self.streamer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of the weights to come, `of` bytes together, `stay` bytes stay on the device.
    pub fn keep_weights(&self, stay: u64, of: u64) {
        *self.quota.lock().unwrap_or_else(PoisonError::into_inner) = Some(Quota::new(stay, of));
    }

    /// Whether the next weight stays on the device.
    pub fn keeps(&self, bytes: usize) -> bool {
        let mut quota = self.quota.lock().unwrap_or_else(PoisonError::into_inner);
        quota.as_mut().is_none_or(|quota| quota.admits(bytes as u64))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let coming = std::mem::take(self.coming.get_mut().unwrap_or_else(PoisonError::into_inner));
        // The compiler must not run on while the process ends.
        coming.into_values().for_each(|thread| drop(thread.join()));
        if self.wait().is_ok() {
            if let Some(mut staging) =
                self.staging.get_mut().unwrap_or_else(PoisonError::into_inner).take().flatten()
            {
                staging.free(&self.driver);
            }
            self.pinned.free(&self.driver);
            let streamer = self.streamer.get_mut().unwrap_or_else(PoisonError::into_inner);
            if let Some((at, size)) = streamer.free(&self.driver) {
                self.arena.give(at, size);
            }
            if let Some((at, size)) = self.flags.end() {
                self.arena.give(at, size);
            }
            if let Ok(lt) = &self.lt
                && let Some((at, size)) = lt.destroy()
            {
                self.arena.give(at, size);
            }
            self.arena.release(&memory::FromDriver(self));
            let modules = self.modules.get_mut().unwrap_or_else(PoisonError::into_inner);
            for module in modules.loaded.values() {
                // SAFETY: nothing runs any more, and nobody has the module's functions.
                unsafe { (self.driver.module_unload)(module.0) };
            }
        }
        // SAFETY: the last use of both.
        unsafe {
            (self.driver.stream_destroy)(self.raw.stream);
            (self.driver.context_release)(self.raw.device);
        }
    }
}

impl Raw {
    fn new(driver: &Driver, ordinal: i32) -> Result<Raw> {
        let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
        // SAFETY: each call writes what its pointer points to.
        unsafe {
            driver.check("cuDeviceGet", (driver.device_get)(&mut device, ordinal))?;
            driver.check("cuDevicePrimaryCtxRetain", (driver.context_retain)(&mut context, device))?;
            driver.check("cuCtxSetCurrent", (driver.context_set)(context))?;
            driver.check("cuStreamCreate", (driver.stream_create)(&mut stream, STREAM_NON_BLOCKING))?;
        }
        Ok(Raw { device, context, stream })
    }
}
