//! Weights that don't stay on the device: they lie in host memory that the GPU reads by itself, and are copied into a ring
//! on the device while others are computed with.

mod ring;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::device::{Allocation, Device, Event, PinnedMemory, Stream};
use crate::error::Result;
use crate::queue::Queue;
use crate::sys::driver::DevicePtr;
use kiln_base::{lock, wait};
use ring::{Id, Order, Ring};

/// The ring has room for so many of the largest weight, memory permitting.
const DEPTH: usize = 3;

/// The weights that take turns, and how they come and go.
pub(crate) struct Streamer {
    device: Arc<Device>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ring: Ring,
    /// The ring's.
    memory: Option<Allocation>,
    order: Order,
    weights: HashMap<Id, Weight>,
    made: usize,
    /// The stream of the copies.
    copies: Option<Stream>,
}

struct Weight {
    host: PinnedMemory,
    bytes: usize,
    /// When the last copy has arrived, and when the last product with it is done.
    arrived: Event,
    done: Event,
}

/// A weight's place in the host's memory, given back at the end.
pub(crate) struct Streamed {
    streamer: Arc<Streamer>,
    id: Id,
}

/// A weight that is on the device. Nobody else brings one in meanwhile.
pub(crate) struct Brought<'a> {
    device: &'a Device,
    state: MutexGuard<'a, State>,
    id: Id,
    pub at: DevicePtr,
}

impl Streamer {
    pub fn new(device: &Arc<Device>) -> Arc<Streamer> {
        Arc::new(Streamer { device: Arc::clone(device), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Whether no weights take turns.
    pub fn is_empty(&self) -> bool {
        self.state().weights.is_empty()
    }

    /// Moves `bytes` bytes from the device to the host.
    pub fn add(self: &Arc<Self>, from: DevicePtr, bytes: usize) -> Result<Streamed> {
        let primary = &self.device.primary;
        let (host, arrived, done) =
            (PinnedMemory::new(primary, bytes)?, Event::order(primary)?, Event::order(primary)?);
        // SAFETY: both have that size, and the host's stays until the copy is done.
        unsafe { self.device.stream.copy_to_host(from, host.at(), bytes)? };
        self.device.stream.wait()?;
        let mut state = self.state();
        let id = state.made;
        state.made += 1;
        state.weights.insert(id, Weight { host, bytes, arrived, done });
        Ok(Streamed { streamer: Arc::clone(self), id })
    }
}

impl Streamed {
    /// Has it on the device, for work on this queue, until the result is dropped; `None` when there is no memory for it.
    pub fn bring(&self, queue: &Queue) -> Result<Option<Brought<'_>>> {
        // It will be elsewhere the next time.
        queue.device("cuStreamWaitEvent")?;
        let device = &self.streamer.device;
        let mut state = self.streamer.state();
        let there = state.bring(device, self.id)?;
        Ok(there.map(|at| Brought { device, state, id: self.id, at }))
    }
}

impl Drop for Streamed {
    fn drop(&mut self) {
        self.streamer.state().remove(&self.streamer.device, self.id);
    }
}

impl Drop for Brought<'_> {
    /// Everything that reads it is on the stream: the next ones may come.
    fn drop(&mut self) {
        // A failure shows again where the weight that did not come is asked for.
        let _ = self.state.used(self.device, self.id);
    }
}

impl State {
    fn bring(&mut self, device: &Device, id: Id) -> Result<Option<DevicePtr>> {
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
        device.stream.wait_for(&weight.arrived)?;
        Ok(Some(memory + start as u64))
    }

    /// Copies a weight to the place it gets, if it gets one.
    fn fetch(&mut self, device: &Device, id: Id, memory: DevicePtr) -> Result<bool> {
        let Some(bytes) = self.weights.get(&id).map(|weight| weight.bytes) else { return Ok(false) };
        let Some(placed) = self.ring.place(id, bytes) else { return Ok(false) };
        let copies = match &mut self.copies {
            Some(copies) => copies,
            none => none.insert(Stream::new(&device.primary)?),
        };
        for weight in placed.gone.iter().filter_map(|gone| self.weights.get(gone)) {
            copies.wait_for(&weight.done)?;
        }
        if let Some(weight) = self.weights.get(&id) {
            // SAFETY: the ring has that place, which everything before is done with; the host's memory stays until a wait.
            unsafe { copies.copy_to_device(weight.host.at(), memory + placed.start as u64, bytes)? };
            copies.record(&weight.arrived)?;
        }
        Ok(true)
    }

    /// A weight was used: it may go when its work is done, and those that will follow are asked for.
    fn used(&mut self, device: &Device, id: Id) -> Result<()> {
        if let Some(weight) = self.weights.get(&id) {
            device.stream.record(&weight.done)?;
        }
        self.ring.used(id);
        let Some(memory) = self.memory.as_ref().map(Allocation::at) else { return Ok(()) };
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
        if let Some(memory) = &self.memory
            && Ring::rounded(bytes) <= self.ring.capacity()
        {
            return Ok(Some(memory.at()));
        }
        self.release(device)?;
        let sizes = || self.weights.values().map(|weight| Ring::rounded(weight.bytes));
        let (largest, all) = (sizes().max().unwrap_or(0), sizes().sum::<usize>());
        for depth in (1..=DEPTH).rev() {
            if let Some(memory) = device.memory.take((depth * largest).min(all))? {
                self.ring = Ring::new(memory.size());
                return Ok(Some(self.memory.insert(memory).at()));
            }
        }
        Ok(None)
    }

    /// Gives the ring's memory back.
    fn release(&mut self, device: &Device) -> Result<()> {
        if self.memory.is_some() {
            self.wait(device)?;
            self.memory = None;
            self.ring = Ring::default();
        }
        Ok(())
    }

    /// Waits for all copies and all products.
    fn wait(&self, device: &Device) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), Stream::wait)?;
        device.stream.wait()
    }

    fn remove(&mut self, device: &Device, id: Id) {
        let Some(weight) = self.weights.remove(&id) else { return };
        self.ring.forget(id);
        self.order.forget(id);
        // Nothing may read it any more before it goes.
        let waited = self.wait(device);
        if self.weights.is_empty() {
            let _ = self.release(device);
        }
        match waited {
            Ok(()) => drop(weight),
            Err(_) => std::mem::forget(weight),
        }
    }
}
