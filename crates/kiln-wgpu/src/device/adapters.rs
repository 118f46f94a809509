//! The adapters of this machine: what they offer, and why one can't be used.

use wgpu::{DeviceType, Features, Limits};

use super::future::resolve;
use crate::api::Api;
use crate::error::{Error, Result};
use crate::options::Options;

/// Where an adapter's processor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdapterKind {
    /// A GPU with its own memory.
    Discrete,
    /// A GPU that shares the CPU's memory.
    Integrated,
    /// A GPU of a virtual machine.
    Virtual,
    /// A driver that does not say.
    Other,
    /// A driver that computes on the CPU.
    Cpu,
}

impl AdapterKind {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            AdapterKind::Discrete => "discrete GPU",
            AdapterKind::Integrated => "integrated GPU",
            AdapterKind::Virtual => "virtual GPU",
            AdapterKind::Other => "unknown kind",
            AdapterKind::Cpu => "CPU",
        }
    }

    fn of(kind: DeviceType) -> AdapterKind {
        match kind {
            DeviceType::DiscreteGpu => AdapterKind::Discrete,
            DeviceType::IntegratedGpu => AdapterKind::Integrated,
            DeviceType::VirtualGpu => AdapterKind::Virtual,
            DeviceType::Cpu => AdapterKind::Cpu,
            DeviceType::Other => AdapterKind::Other,
        }
    }
}

/// An adapter: a GPU through one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Its number in the list of all.
    pub number: usize,
    /// Its name.
    pub name: String,
    /// The interface.
    pub api: Api,
    /// Where its processor is.
    pub kind: AdapterKind,
    /// The driver and its version.
    pub driver: String,
    /// The largest buffer, in bytes.
    pub max_buffer: u64,
    /// The largest part of a buffer that a kernel can see, in bytes.
    pub max_binding: u64,
    /// Memory that the invocations of a workgroup share, in bytes.
    pub workgroup_memory: u32,
    /// Invocations of a workgroup.
    pub workgroup_size: u32,
    /// Smallest and largest subgroup.
    pub subgroup_sizes: [u32; 2],
    /// Whether shaders have f16.
    pub has_f16: bool,
    /// The cooperative matrices: rows, columns and inner size, types of operands and sums.
    pub cooperative_matrices: Vec<String>,
    /// Why it can't be used; `None` if it can.
    pub unusable: Option<String>,
}

/// Lists the adapters of this machine: discrete GPUs first, drivers that compute on the CPU last.
pub fn adapters() -> Vec<Adapter> {
    enumerate().iter().map(|(_, adapter)| adapter.clone()).collect()
}

/// Returns the adapter that `options` name.
pub(super) fn choose(options: &Options) -> Result<(wgpu::Adapter, Adapter)> {
    let all = enumerate();
    let count = all.len();
    let mut matching: Vec<_> =
        all.into_iter().filter(|(_, adapter)| options.api.is_none_or(|api| adapter.api == api)).collect();
    if options.number >= matching.len() {
        let found = match (matching.len(), count) {
            (_, 0) => "no GPU driver was found".into(),
            (0, _) => format!("none of the {count} adapters has this interface"),
            (1, _) => "there is one, number 0".into(),
            (n, _) => format!("there are {n}, from number 0"),
        };
        return Err(Error::NoAdapter { number: options.number, api: options.api, found });
    }
    let (handle, adapter) = matching.swap_remove(options.number);
    match &adapter.unusable {
        Some(reason) => Err(Error::Unsuitable { name: adapter.name, reason: reason.clone() }),
        None => Ok((handle, adapter)),
    }
}

fn enumerate() -> Vec<(wgpu::Adapter, Adapter)> {
    let backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    // Validation layers of the driver are for wgpu's own developers: its checks of every call remain.
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let mut all: Vec<_> = resolve(instance.enumerate_adapters(backends))
        .into_iter()
        .filter_map(|handle| describe(&handle).map(|adapter| (handle, adapter)))
        .collect();
    // Stable: adapters of one kind keep the driver's order.
    all.sort_by_key(|(_, adapter)| adapter.kind);
    for (number, (_, adapter)) in all.iter_mut().enumerate() {
        adapter.number = number;
    }
    all
}

fn describe(handle: &wgpu::Adapter) -> Option<Adapter> {
    let (info, limits, features) = (handle.get_info(), handle.limits(), handle.features());
    let matrices = handle.cooperative_matrix_properties();
    Some(Adapter {
        number: 0,
        name: info.name,
        api: Api::of(info.backend)?,
        kind: AdapterKind::of(info.device_type),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
        max_buffer: limits.max_buffer_size,
        max_binding: limits.max_storage_buffer_binding_size,
        workgroup_memory: limits.max_compute_workgroup_storage_size,
        workgroup_size: limits.max_compute_invocations_per_workgroup,
        subgroup_sizes: [info.subgroup_min_size, info.subgroup_max_size],
        has_f16: features.contains(Features::SHADER_F16),
        cooperative_matrices: matrices.iter().map(|matrix| format!("{matrix:?}")).collect(),
        unusable: missing(&limits),
    })
}

/// What an adapter lacks of the limits that the kernels need: those that WebGPU guarantees.
pub(super) fn missing(limits: &Limits) -> Option<String> {
    let of = |limits: &Limits| {
        [
            ("storage buffers per kernel", limits.max_storage_buffers_per_shader_stage.into()),
            ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size.into()),
            ("invocations per workgroup", limits.max_compute_invocations_per_workgroup.into()),
            ("workgroups per dimension", limits.max_compute_workgroups_per_dimension.into()),
            ("bytes per binding", limits.max_storage_buffer_binding_size),
        ]
    };
    let pairs = of(limits).into_iter().zip(of(&Limits::defaults()));
    let lacking = pairs.into_iter().find(|((_, found), (_, needed)): &((_, u64), (_, u64))| found < needed);
    lacking.map(|((what, found), (_, needed))| format!("it has {found} {what}, Kiln needs {needed}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_below_the_limits_of_webgpu_are_refused_with_the_reason() {
        assert_eq!(missing(&Limits::defaults()), None);
        let reason = missing(&Limits::downlevel_defaults());
        assert_eq!(reason.as_deref(), Some("it has 4 storage buffers per kernel, Kiln needs 8"));
    }
}
