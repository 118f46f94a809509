//! Weights that don't stay on the device: they lie in host memory that the GPU reads by itself, and are copied into a ring
//! on the device while others are computed with.

mod ring;

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, MutexGuard};

use crate::device::Device;
use crate::sys::driver::{DevicePtr, Driver, EVENT_NO_TIME, STREAM_NON_BLOCKING};
use crate::{Error, Result};
pub(crate) use ring::{Id, Quota};
use ring::{Order, Ring};

/// The ring has room for so many of the largest weight, memory permitting.
const DEPTH: usize = 3;

/// The weights that take turns, and how they come and go.
#[derive(Default)]
pub(crate) struct Streamer {
    ring: Ring,
    /// Address and size of the ring's memory.
    memory: Option<(DevicePtr, usize)>,
    order: Order,
    weights: HashMap<Id, Weight>,
    made: usize,
    /// The stream of the copies.
    copies: Option<Handle>,
}

/// One of the driver's handles.
struct Handle(*mut c_void);

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Handle {}

struct Weight {
    host: Handle,
    bytes: usize,
    /// When the last copy has arrived, and when the last product with it is done.
    arrived: Handle,
    done: Handle,
}

/// A weight's place in the host's memory, given back at the end.
pub(crate) struct Streamed {
    device: Arc<Device>,
    id: Id,
}

impl Streamed {
    /// Moves `bytes` bytes from the device to the host.
    pub fn new(device: &Arc<Device>, from: DevicePtr, bytes: usize) -> Result<Streamed> {
        let (host, arrived, done) = (device.pinned(bytes)?, device.event()?, device.event()?);
        let weight = Weight { host: Handle(host), bytes, arrived: Handle(arrived), done: Handle(done) };
        let mut streamer = device.streamer();
        let id = streamer.made;
        streamer.made += 1;
        streamer.weights.insert(id, weight);
        drop(streamer);
        // From here on the end of `streamed` gives everything back.
        let streamed = Streamed { device: Arc::clone(device), id };
        device.copy_to_pinned(from, host, bytes)?;
        Ok(streamed)
    }

    /// Has it on the device until the result is dropped; `None` when there is no memory for it.
    pub fn bring(&self) -> Result<Option<Brought<'_>>> {
        let mut streamer = self.device.streamer();
        let there = streamer.bring(&self.device, self.id)?;
        Ok(there.map(|at| Brought { device: &self.device, streamer, id: self.id, at }))
    }
}

impl Drop for Streamed {
    fn drop(&mut self) {
        self.device.streamer().remove(&self.device, self.id);
    }
}

/// A weight that is on the device. Nobody else brings one in meanwhile.
pub(crate) struct Brought<'a> {
    device: &'a Arc<Device>,
    streamer: MutexGuard<'a, Streamer>,
    id: Id,
    pub at: DevicePtr,
}

impl Drop for Brought<'_> {
    /// Everything that reads it is on the stream: the next ones may come.
    fn drop(&mut self) {
        // A failure shows again where the weight that did not come is asked for.
        let _ = self.streamer.used(self.device, self.id);
    }
}

impl Streamer {
    /// Whether no weights take turns.
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    fn bring(&mut self, device: &Arc<Device>, id: Id) -> Result<Option<DevicePtr>> {
        let Some(bytes) = self.weights.get(&id).map(|weight| weight.bytes) else { return Ok(None) };
        let Some(memory) = self.memory(device, bytes)? else { return Ok(None) };
        self.order.used(id);
        if self.ring.start(id).is_none() {
            self.ring.surprise();
            self.fetch(device, id, memory)?;
        }
        let (Some(start), Some(weight)) = (self.ring.start(id), self.weights.get(&id)) else {
            return Ok(None);
        };
        device.stream_waits(device.stream(), weight.arrived.0)?;
        Ok(Some(memory + start as u64))
    }

    /// Copies a weight to the place it gets, if it gets one.
    fn fetch(&mut self, device: &Device, id: Id, memory: DevicePtr) -> Result<bool> {
        let copies = self.copies(&device.driver)?;
        let Some(bytes) = self.weights.get(&id).map(|weight| weight.bytes) else { return Ok(false) };
        let Some(placed) = self.ring.place(id, bytes) else { return Ok(false) };
        for gone in placed.gone {
            if let Some(weight) = self.weights.get(&gone) {
                device.stream_waits(copies, weight.done.0)?;
            }
        }
        if let Some(weight) = self.weights.get(&id) {
            device.copy_from_pinned(weight.host.0, memory + placed.start as u64, bytes, copies)?;
            device.record(weight.arrived.0, copies)?;
        }
        Ok(true)
    }

    /// A weight was used: it may go when its work is done, and those that will follow are asked for.
    fn used(&mut self, device: &Device, id: Id) -> Result<()> {
        if let Some(weight) = self.weights.get(&id) {
            device.record(weight.done.0, device.stream())?;
        }
        self.ring.used(id);
        let Some((memory, _)) = self.memory else { return Ok(()) };
        let mut next = self.order.after(id);
        for _ in 0..self.weights.len() {
            if next == id || !self.weights.contains_key(&next) {
                break;
            }
            match self.ring.start(next) {
                Some(_) => self.ring.await_use(next),
                None if !self.fetch(device, next, memory)? => break,
                None => {}
            }
            next = self.order.after(next);
        }
        Ok(())
    }

    /// The ring's memory, made when it is first needed, and anew when a weight is too large for it.
    fn memory(&mut self, device: &Device, bytes: usize) -> Result<Option<DevicePtr>> {
        if let Some((at, _)) = self.memory.filter(|_| Ring::rounded(bytes) <= self.ring.capacity()) {
            return Ok(Some(at));
        }
        self.release(device)?;
        let sizes = || self.weights.values().map(|weight| Ring::rounded(weight.bytes));
        let (largest, all) = (sizes().max().unwrap_or(0), sizes().sum::<usize>());
        for depth in (1..=DEPTH).rev() {
            if let Some((at, size)) = device.take((depth * largest).min(all))? {
                self.memory = Some((at, size));
                self.ring = Ring::new(size);
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// Gives the ring's memory back.
    fn release(&mut self, device: &Device) -> Result<()> {
        if let Some((at, size)) = self.memory.take() {
            self.wait(&device.driver)?;
            device.wait()?;
            device.give(at, size);
            self.ring = Ring::default();
        }
        Ok(())
    }

    fn wait(&self, driver: &Driver) -> Result<()> {
        let Some(copies) = &self.copies else { return Ok(()) };
        // SAFETY: the stream lives until the end.
        let status = unsafe { (driver.stream_wait)(copies.0) };
        driver.check("cuStreamSynchronize", status)
    }

    fn copies(&mut self, driver: &Driver) -> Result<*mut c_void> {
        if let Some(copies) = &self.copies {
            return Ok(copies.0);
        }
        let mut stream = null_mut();
        // SAFETY: the stream is written; the context is current.
        let status = unsafe { (driver.stream_create)(&mut stream, STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", status)?;
        self.copies = Some(Handle(stream));
        Ok(stream)
    }

    fn remove(&mut self, device: &Device, id: Id) {
        let Some(weight) = self.weights.remove(&id) else { return };
        self.ring.forget(id);
        self.order.forget(id);
        // Nothing may read it any more before it goes.
        let waited = device.wait().and_then(|()| self.wait(&device.driver));
        if self.weights.is_empty() {
            let _ = self.release(device);
        }
        if waited.is_ok() {
            // SAFETY: the last use, and the driver gave them.
            unsafe {
                (device.driver.host_free)(weight.host.0);
                (device.driver.event_destroy)(weight.arrived.0);
                (device.driver.event_destroy)(weight.done.0);
            }
        }
    }

    /// Gives back what is left; nothing runs any more.
    pub fn free(&mut self, driver: &Driver) -> Option<(DevicePtr, usize)> {
        if let Some(copies) = self.copies.take() {
            // SAFETY: the last use.
            unsafe { (driver.stream_destroy)(copies.0) };
        }
        self.memory.take()
    }
}

impl Device {
    /// Memory of the host that the GPU reads by itself.
    fn pinned(&self, bytes: usize) -> Result<*mut c_void> {
        self.enter()?;
        let mut host = null_mut();
        // SAFETY: the address is written.
        let status = unsafe { (self.driver.host_alloc)(&mut host, bytes, 0) };
        self.driver.check("cuMemHostAlloc", status).map_err(|e| match e {
            Error::Call { call, what } => {
                Error::Call { call, what: format!("{what} ({bytes} bytes for a weight that is brought in)") }
            }
            other => other,
        })?;
        Ok(host)
    }

    fn event(&self) -> Result<*mut c_void> {
        self.enter()?;
        let mut event = null_mut();
        // SAFETY: the event is written.
        let status = unsafe { (self.driver.event_create)(&mut event, EVENT_NO_TIME) };
        self.driver.check("cuEventCreate", status)?;
        Ok(event)
    }

    fn record(&self, event: *mut c_void, stream: *mut c_void) -> Result<()> {
        self.enter()?;
        // SAFETY: both live.
        self.driver.check("cuEventRecord", unsafe { (self.driver.event_record)(event, stream) })
    }

    /// What comes on a stream from now on waits for an event; one that was never recorded keeps nobody waiting.
    fn stream_waits(&self, stream: *mut c_void, event: *mut c_void) -> Result<()> {
        self.enter()?;
        // SAFETY: both live.
        let status = unsafe { (self.driver.stream_wait_event)(stream, event, 0) };
        self.driver.check("cuStreamWaitEvent", status)
    }

    /// Copies into memory that the GPU writes by itself, and waits.
    fn copy_to_pinned(&self, from: DevicePtr, host: *mut c_void, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: both have that size, and the host's stays until the copy is done.
        let status = unsafe { (self.driver.copy_to_host)(host, from, bytes, self.stream()) };
        self.driver.check("cuMemcpyDtoHAsync", status)?;
        self.wait()
    }

    fn copy_from_pinned(
        &self,
        host: *const c_void,
        to: DevicePtr,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<()> {
        self.enter()?;
        // SAFETY: the ring has that place, which everything before is done with; the host's memory stays until a wait.
        let status = unsafe { (self.driver.copy_to_device)(to, host, bytes, stream) };
        self.driver.check("cuMemcpyHtoDAsync", status)
    }
}
