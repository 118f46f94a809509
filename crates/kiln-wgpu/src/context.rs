//! What launchers work with: the device, its memory and queue, and launching kernels.

use std::ops::Range;
use std::sync::Arc;

use kiln_ops::{Error, Result};
use wgpu::{BindGroupDescriptor, BindGroupEntry, BindingResource, BufferBinding, BufferSize};

use crate::device::{DeviceBuffer, DeviceMemory, Fault, Gpu};
use crate::error;
use crate::kernels::{Kernel, PARAMS_BYTES, Pipelines, Value, WORKGROUP};
use crate::options::Options;
use crate::queue::Queue;

/// Workgroups of a dispatch in x; further ones go to y. Kernels number them `x + y · GROUPS_IN_X`.
const GROUPS_IN_X: usize = 32_768;

/// Bytes that are written at once: the driver keeps a copy of them.
const WRITE_BYTES: usize = 32 << 20;

/// An open device. Clones share it.
#[derive(Clone)]
pub(crate) struct Context(Arc<Shared>);

struct Shared {
    gpu: Gpu,
    name: String,
    memory: Arc<DeviceMemory>,
    queue: Queue,
    pipelines: Pipelines,
}

/// A part of a buffer that a kernel sees.
#[derive(Clone, Copy)]
pub(crate) struct Window<'a> {
    pub buffer: &'a DeviceBuffer,
    /// Its first byte.
    pub start: usize,
    pub bytes: usize,
    /// Bytes of an element, in which the kernel counts.
    pub element: usize,
}

/// A parameter of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Param {
    U32(u32),
    I32(i32),
    F32(f32),
}

/// A number as a parameter; launchers check sizes, and no tensor has 2³² elements in a window.
pub(crate) fn u(n: usize) -> Param {
    Param::U32(u32::try_from(n).unwrap_or(u32::MAX))
}

/// A kernel's launch.
pub(crate) struct Launch<'a> {
    pub kernel: &'static Kernel,
    /// The values of its constants.
    pub values: &'a [Value],
    /// Its tensors, in the order of the source.
    pub tensors: &'a [Window<'a>],
    /// Its parameters, in the order of the source.
    pub params: &'a [(&'static str, Param)],
    /// Number of workgroups.
    pub groups: usize,
    /// Floating-point operations, or as many memory accesses.
    pub cost: u64,
}

impl Context {
    pub fn new(options: &Options) -> error::Result<Context> {
        let gpu = Gpu::open(options)?;
        let memory = DeviceMemory::new(&gpu, options.memory_limit);
        let queue = Queue::new(&gpu);
        let name = format!("wgpu ({}, {})", gpu.adapter.name, gpu.adapter.api.name());
        Ok(Context(Arc::new(Shared { gpu, name, memory, queue, pipelines: Pipelines::default() })))
    }

    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.0.memory
    }

    pub fn queue(&self) -> &Queue {
        &self.0.queue
    }

    /// The adapter's name and interface.
    pub fn name(&self) -> String {
        self.0.name.clone()
    }

    pub fn out_of_memory(&self, bytes: usize) -> Error {
        Error::Memory { backend: self.name(), bytes }
    }

    /// An error that the device reported.
    pub fn failed(&self, what: impl Into<String>) -> Error {
        Error::Device { backend: self.name(), what: what.into() }
    }

    /// Returns what the device reported since the last call.
    pub fn check(&self) -> Result<()> {
        match self.0.gpu.faults.take() {
            None => Ok(()),
            Some(Fault::OutOfMemory) => Err(self.out_of_memory(0)),
            Some(Fault::Other(what)) => Err(self.failed(what)),
        }
    }

    /// Allocates a buffer with arbitrary content.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer> {
        match self.0.memory.allocate(bytes) {
            Some(buffer) => Ok(buffer),
            None => {
                self.check()?;
                Err(self.out_of_memory(bytes))
            }
        }
    }

    /// Writes `bytes` into a buffer from byte `at` on, a multiple of 4, after all work so far. Up to three bytes behind them
    /// become zeros.
    pub fn write(&self, to: &DeviceBuffer, at: usize, bytes: &[u8]) -> Result<()> {
        let (words, tail) = bytes.split_at(bytes.len() / 4 * 4);
        for (i, piece) in words.chunks(WRITE_BYTES).enumerate() {
            self.0.queue.write(to.raw(), at + i * WRITE_BYTES, piece);
        }
        if !tail.is_empty() {
            let mut last = [0; 4];
            last[..tail.len()].copy_from_slice(tail);
            self.0.queue.write(to.raw(), at + words.len(), &last);
        }
        self.check()
    }

    /// Rows of a launch: cut so that `row_bytes` of the widest tensor fit a binding and `row_cost` the budget.
    pub fn row_chunks(
        &self,
        rows: Range<usize>,
        row_bytes: usize,
        row_cost: u64,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        // An aligned start may lie this far before the first row.
        let room = self.0.gpu.max_binding().saturating_sub(512);
        let fitting = room / row_bytes.max(1);
        let cheap = usize::try_from(self.0.queue.budget.0 / row_cost.max(1)).unwrap_or(usize::MAX);
        let step = fitting.min(cheap).max(1);
        // Whole tiles of products.
        let step = if step > 128 { step - step % 128 } else { step };
        rows.clone().step_by(step).map(move |start| start..start.saturating_add(step).min(rows.end))
    }

    /// Launches a kernel for `count` elements, each invocation taking `each` of them.
    pub fn groups_for(count: usize, each: usize) -> usize {
        count.div_ceil(each * WORKGROUP)
    }

    /// Launches a kernel. No workgroups is no launch.
    pub fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        if launch.groups == 0 {
            return Ok(());
        }
        let Launch { kernel, values, tensors, params, groups, cost } = launch;
        let shared = &*self.0;
        let pipeline = shared.pipelines.get(&shared.gpu.device, kernel, values);
        let pipeline = match pipeline {
            Ok(pipeline) => pipeline,
            Err(what) => {
                self.check()?;
                return Err(self.failed(what));
            }
        };
        let named = params.iter().map(|(name, _)| *name);
        if !named.eq(pipeline.params.iter().map(String::as_str)) || tensors.len() != pipeline.tensors {
            return Err(
                self.failed(format!("kernel {} is launched with other arguments than it has", kernel.name))
            );
        }
        let mut words: Vec<u32> = params.iter().map(|(_, param)| param.bits()).collect();
        let alignment = shared.gpu.limits.min_storage_buffer_offset_alignment.max(4) as usize;
        let mut entries = vec![BindGroupEntry {
            binding: 0,
            resource: BindingResource::Buffer(BufferBinding {
                buffer: &shared.queue.params,
                offset: 0,
                size: BufferSize::new(PARAMS_BYTES as u64),
            }),
        }];
        for (binding, window) in (1..).zip(tensors.iter()) {
            let (at, resource) = self.binding(window, alignment)?;
            words.push(at);
            entries.push(BindGroupEntry { binding, resource });
        }
        let bindings = shared.gpu.device.create_bind_group(&BindGroupDescriptor {
            label: None,
            layout: &pipeline.layout,
            entries: &entries,
        });
        let groups = [groups.min(&GROUPS_IN_X), &groups.div_ceil(GROUPS_IN_X)].map(|&n| n as u32);
        shared.queue.dispatch(pipeline, bindings, bytemuck::cast_slice(&words), groups, *cost);
        self.check()
    }

    /// The offset of a window's first element in its binding, and the binding.
    fn binding<'a>(&self, window: &Window<'a>, alignment: usize) -> Result<(u32, BindingResource<'a>)> {
        let first = window.start / alignment * alignment;
        let bytes = (window.start - first + window.bytes).max(4).next_multiple_of(4);
        let size = bytes.min(window.buffer.size().saturating_sub(first));
        let largest = self.0.gpu.max_binding();
        if size > largest || size == 0 {
            let what =
                format!("a kernel would need {size} bytes of one tensor, this adapter shows it {largest}");
            return Err(self.failed(what));
        }
        let resource = BindingResource::Buffer(BufferBinding {
            buffer: window.buffer.raw(),
            offset: first as u64,
            size: BufferSize::new(size as u64),
        });
        Ok((((window.start - first) / window.element) as u32, resource))
    }
}

impl Param {
    fn bits(self) -> u32 {
        match self {
            Param::U32(value) => value,
            Param::I32(value) => value as u32,
            Param::F32(value) => value.to_bits(),
        }
    }
}
