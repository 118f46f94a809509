//! One GPU: its context, the one stream all work goes to, its memory and its kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::arena::{self, Arena};
use crate::cache::Cache;
use crate::compile::Compiler;
use crate::flags::Flags;
use crate::gemm::lt::Lt;
use crate::probe::{self, Gpu};
use crate::replay::{Pool, Registry};
use crate::sources::{Source, Target};
use crate::staging::{LARGE, Staging};
use crate::stream::{Quota, Streamer};
use crate::sys::driver::{DevicePtr, Driver, FUNCTION_SHARED_BYTES, OUT_OF_MEMORY, STREAM_NON_BLOCKING};
use crate::{Error, Graphs, Options, Result};

/// Shared memory that a block gets without being granted more.
const SHARED_UNASKED: usize = 48 << 10;

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

#[derive(Default)]
struct Modules {
    loaded: HashMap<&'static str, Handle>,
    functions: HashMap<&'static str, Function>,
}

#[derive(Clone, Copy)]
struct Handle(*mut c_void);

// SAFETY: as for `Raw`.
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

    /// Bytes of the device's memory that this process may still use: those that nobody has and its own reserve, up to the limit.
    pub fn free(&self) -> Result<usize> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers are written.
        self.driver.check("cuMemGetInfo", unsafe { (self.driver.mem_info)(&mut free, &mut total) })?;
        Ok(self.arena.room(free))
    }

    /// Bytes of this device's memory that this process holds for tensors and weights.
    pub fn held(&self) -> usize {
        self.arena.held()
    }

    /// Memory for `bytes` bytes; `None` when there is no more.
    pub fn memory(self: &Arc<Self>, bytes: usize) -> Result<Option<Block>> {
        let (device, pool) = (Arc::clone(self), self.recording_pool());
        let block = match &pool {
            Some(pool) => pool.take(bytes),
            None => self.take(bytes)?,
        };
        Ok(block.map(|(at, size)| Block { device, at, size, pool }))
    }

    /// Address and size of a block that nobody gives back by himself.
    pub fn take(&self, bytes: usize) -> Result<Option<(DevicePtr, usize)>> {
        self.not_recording("cuMemAlloc")?;
        self.enter()?;
        let take = || self.arena.take(&FromDriver(self), bytes);
        Ok(take().or_else(|| if self.recorded.drop_all() { take() } else { None }))
    }

    /// The same as far as that makes no work wait.
    pub fn take_gently(&self, bytes: usize) -> Option<(DevicePtr, usize)> {
        self.enter().ok()?;
        self.arena.take_gently(&FromDriver(self), bytes)
    }

    /// Takes back what [`Device::take`] gave.
    pub fn give(&self, at: DevicePtr, size: usize) {
        self.arena.give(at, size);
    }

    /// Gives free memory back to the driver.
    pub fn release(&self) {
        if self.not_recording("cuMemFree").and_then(|()| self.enter()).is_ok() {
            self.arena.release(&FromDriver(self));
        }
    }

    /// The most bytes that were held at once.
    pub fn peak(&self) -> usize {
        self.arena.peak()
    }

    /// Copies from the host; the bytes may go away when this returns.
    pub fn upload(&self, bytes: &[u8], to: DevicePtr) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.not_recording("cuMemcpyHtoDAsync")?;
        self.enter()?;
        if bytes.len() >= LARGE
            && let Some(staging) = self.staging().as_mut().and_then(Option::as_mut)
        {
            return staging.upload(&self.driver, bytes, to, self.raw.stream);
        }
        // SAFETY: the caller has a block of that size; pageable memory is read before the call returns.
        let status =
            unsafe { (self.driver.copy_to_device)(to, bytes.as_ptr().cast(), bytes.len(), self.raw.stream) };
        self.driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies to the host and waits.
    pub fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.not_recording("cuMemcpyDtoHAsync")?;
        self.enter()?;
        if bytes.len() >= LARGE
            && let Some(staging) = self.staging().as_ref().and_then(Option::as_ref)
        {
            return staging.download(&self.driver, from, bytes, self.raw.stream);
        }
        // SAFETY: the buffer outlives the wait.
        let status = unsafe {
            (self.driver.copy_to_host)(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw.stream)
        };
        self.driver.check("cuMemcpyDtoHAsync", status)?;
        self.wait()
    }

    /// The way of large copies; the context is current.
    fn staging(&self) -> MutexGuard<'_, Option<Option<Staging>>> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.get_or_insert_with(|| Staging::new(&self.driver).ok());
        staging
    }

    /// Copies within the device.
    pub fn copy(&self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: both blocks have that size.
        let status = unsafe { (self.driver.copy_on_device)(to, from, bytes, self.stream()) };
        self.driver.check("cuMemcpyDtoDAsync", status)
    }

    /// Milliseconds that some work takes on the device.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.not_recording("cuEventSynchronize")?;
        self.enter()?;
        let (begin, end) = (Event::new(&self.driver)?, Event::new(&self.driver)?);
        begin.record(self.raw.stream)?;
        work()?;
        end.record(self.raw.stream)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events were recorded.
        unsafe {
            self.driver.check("cuEventSynchronize", (self.driver.event_wait)(end.event))?;
            let status = (self.driver.event_elapsed)(&mut milliseconds, begin.event, end.event);
            self.driver.check("cuEventElapsedTime", status)?;
        }
        Ok(milliseconds)
    }

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
            self.arena.release(&FromDriver(self));
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

/// The driver as the arena's source; the context is current.
struct FromDriver<'a>(&'a Device);

impl arena::Source for FromDriver<'_> {
    fn take(&self, bytes: usize) -> Option<DevicePtr> {
        let mut at = 0;
        // SAFETY: the address is written.
        let status = unsafe { (self.0.driver.mem_alloc)(&mut at, bytes) };
        debug_assert!(status == 0 || status == OUT_OF_MEMORY, "cuMemAlloc: {status}");
        (status == 0).then_some(at)
    }

    fn give(&self, at: DevicePtr) {
        // SAFETY: the driver gave it, nobody owns it any more, and freeing waits for work that is still under way.
        unsafe { (self.0.driver.mem_free)(at) };
    }
}

/// Memory of a device, given back to its arena at the end.
pub(crate) struct Block {
    device: Arc<Device>,
    at: DevicePtr,
    size: usize,
    /// What it goes back to, where that isn't the arena.
    pool: Option<Arc<Pool>>,
}

impl Block {
    /// Memory that belongs to somebody else.
    pub fn lent(device: &Arc<Device>, at: DevicePtr) -> Block {
        Block { device: Arc::clone(device), at, size: 0, pool: None }
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        self.at
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match &self.pool {
            _ if self.size == 0 => {}
            Some(pool) => pool.give(self.at, self.size),
            None => self.device.arena.give(self.at, self.size),
        }
    }
}

struct Event<'a> {
    driver: &'a Driver,
    event: *mut c_void,
}

impl Event<'_> {
    fn new(driver: &Driver) -> Result<Event<'_>> {
        let mut event = null_mut();
        // SAFETY: the event is written.
        driver.check("cuEventCreate", unsafe { (driver.event_create)(&mut event, 0) })?;
        Ok(Event { driver, event })
    }

    fn record(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: both live.
        self.driver.check("cuEventRecord", unsafe { (self.driver.event_record)(self.event, stream) })
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: the last use.
        unsafe { (self.driver.event_destroy)(self.event) };
    }
}
