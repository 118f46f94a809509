//! Compiled kernels, each made at its first use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType,
    ComputePipelineDescriptor, Device, ErrorFilter, PipelineCompilationOptions, PipelineLayoutDescriptor,
    ShaderModuleDescriptor, ShaderSource, ShaderStages,
};

use super::accessors::Access;
use super::template::Shader;
use super::{Kernel, PARAMS_BYTES, Value};
use crate::device::resolve;

/// A compiled kernel.
pub(crate) struct Pipeline {
    pub raw: wgpu::ComputePipeline,
    pub layout: BindGroupLayout,
    /// The names of its parameters.
    pub params: Vec<String>,
    /// Number of tensors.
    pub tensors: usize,
}

type Key = (&'static str, Vec<Value>);

/// The compiled kernels of a device.
#[derive(Default)]
pub(crate) struct Pipelines {
    compiled: Mutex<HashMap<Key, Arc<Pipeline>>>,
}

impl Pipelines {
    /// Returns a kernel's pipeline for these values of its constants. An error is the compiler's message.
    pub fn get(&self, device: &Device, kernel: &Kernel, values: &[Value]) -> Result<Arc<Pipeline>, String> {
        let mut compiled = lock(&self.compiled);
        let key = (kernel.name, values.to_vec());
        if let Some(pipeline) = compiled.get(&key) {
            return Ok(Arc::clone(pipeline));
        }
        let pipeline = Arc::new(compile(device, kernel.name, kernel.shader(values)?)?);
        compiled.insert(key, Arc::clone(&pipeline));
        Ok(pipeline)
    }
}

fn compile(device: &Device, name: &str, shader: Shader) -> Result<Pipeline, String> {
    let scope = device.push_error_scope(ErrorFilter::Validation);
    let module = device.create_shader_module(ShaderModuleDescriptor {
        label: Some(name),
        source: ShaderSource::Wgsl(shader.wgsl.into()),
    });
    let entries = (0..=shader.tensors.len() as u32).map(|binding| entry(binding, &shader.tensors));
    let layout = device.create_bind_group_layout(&BindGroupLayoutDescriptor {
        label: Some(name),
        entries: &entries.collect::<Vec<_>>(),
    });
    let pipeline_layout = device.create_pipeline_layout(&PipelineLayoutDescriptor {
        label: Some(name),
        bind_group_layouts: &[Some(&layout)],
        immediate_size: 0,
    });
    // Kernels write workgroup memory before they read it.
    let compilation_options =
        PipelineCompilationOptions { zero_initialize_workgroup_memory: false, ..Default::default() };
    let raw = device.create_compute_pipeline(&ComputePipelineDescriptor {
        label: Some(name),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some("main"),
        compilation_options,
        cache: None,
    });
    match resolve(scope.pop()) {
        Some(error) => Err(format!("kernel {name}: {error}")),
        None => Ok(Pipeline { raw, layout, params: shader.params, tensors: shader.tensors.len() }),
    }
}

/// Binding 0 is the parameters, the others are the tensors.
fn entry(binding: u32, tensors: &[(String, Access)]) -> BindGroupLayoutEntry {
    let ty = match binding {
        0 => BindingType::Buffer {
            ty: BufferBindingType::Uniform,
            has_dynamic_offset: true,
            min_binding_size: wgpu::BufferSize::new(PARAMS_BYTES as u64),
        },
        n => BindingType::Buffer {
            ty: BufferBindingType::Storage { read_only: tensors[n as usize - 1].1 == Access::Read },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
    };
    BindGroupLayoutEntry { binding, visibility: ShaderStages::COMPUTE, ty, count: None }
}
