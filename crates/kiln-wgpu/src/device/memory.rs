//! Buffers of GPU memory, which return to the cache when their last owner drops them.

use std::sync::{Arc, Mutex};

use kiln_base::lock;
use wgpu::{BufferDescriptor, BufferUsages, ErrorFilter};

use super::allocator::BlockCache;
use super::{Gpu, resolve};

/// The memory of one device.
pub(crate) struct DeviceMemory {
    device: wgpu::Device,
    largest: usize,
    cache: Mutex<BlockCache<wgpu::Buffer>>,
}

/// A buffer. Clones share it.
#[derive(Clone)]
pub(crate) struct DeviceBuffer(Arc<Block>);

struct Block {
    /// Taken when the block is dropped.
    buffer: Option<wgpu::Buffer>,
    size: usize,
    memory: Arc<DeviceMemory>,
}

impl DeviceMemory {
    /// The memory of `gpu`, of which at most `limit` bytes are used.
    pub fn new(gpu: &Gpu, limit: Option<usize>) -> Arc<DeviceMemory> {
        let largest = usize::try_from(gpu.limits.max_buffer_size).unwrap_or(usize::MAX);
        Arc::new(DeviceMemory {
            device: gpu.device.clone(),
            largest,
            cache: Mutex::new(BlockCache::new(limit)),
        })
    }

    /// Allocates a buffer of at least `bytes` bytes; `None` if there is not enough memory. Its content is arbitrary.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Option<DeviceBuffer> {
        let size = BlockCache::<wgpu::Buffer>::round(bytes).min(self.largest);
        if bytes > size {
            return None;
        }
        let wrap = |(buffer, size)| {
            DeviceBuffer(Arc::new(Block { buffer: Some(buffer), size, memory: self.clone() }))
        };
        if let Some(block) = lock(&self.cache).take(size) {
            return Some(wrap(block));
        }
        self.create(size)
            .or_else(|| {
                self.release();
                self.create(size)
            })
            .map(|buffer| wrap((buffer, size)))
    }

    fn create(&self, size: usize) -> Option<wgpu::Buffer> {
        let mut cache = lock(&self.cache);
        if !cache.allows(size) {
            return None;
        }
        let scope = self.device.push_error_scope(ErrorFilter::OutOfMemory);
        let buffer = self.device.create_buffer(&BufferDescriptor {
            label: None,
            size: size as u64,
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        if resolve(scope.pop()).is_some() {
            return None;
        }
        cache.add(size);
        Some(buffer)
    }

    /// Returns unused buffers to the driver, and restarts the peak.
    pub fn release(&self) {
        drop(lock(&self.cache).clear());
    }

    /// Bytes that the limit still allows; `None` without a limit.
    pub fn available(&self) -> Option<usize> {
        lock(&self.cache).available()
    }

    /// Bytes held, unused buffers included.
    pub fn held(&self) -> usize {
        lock(&self.cache).held()
    }

    /// Maximum of [`DeviceMemory::held`] since the last [`DeviceMemory::release`].
    pub fn peak(&self) -> usize {
        lock(&self.cache).peak()
    }
}

impl DeviceBuffer {
    /// The buffer, for commands.
    pub fn raw(&self) -> &wgpu::Buffer {
        self.0.buffer.as_ref().expect("only a dropped block has no buffer")
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Whether nothing else refers to it.
    pub fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            lock(&self.memory.cache).put(buffer, self.size);
        }
    }
}
