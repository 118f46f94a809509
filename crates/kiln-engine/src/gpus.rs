//! The machine's GPUs, and the libraries needed to use them.

/// GPUs and libraries found on this machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuProbe {
    /// Whether this build has a GPU backend.
    pub built_in: bool,
    /// Each GPU with its name for `--device`; `None` without a driver.
    pub devices: Option<Vec<(String, GpuInfo)>>,
    /// The GPUs whose kernels are built in, and those that each GPU of the machine uses.
    pub kernels: String,
    /// Each library with its version and path, or why it was not found.
    pub libraries: Vec<(&'static str, String)>,
    /// Each library's version, if it was found.
    pub versions: Vec<(&'static str, Option<String>)>,
    /// Whether a GPU can generate images.
    pub usable: bool,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuInfo {
    /// Its name.
    pub name: String,
    /// Its compute capability: major, minor.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub processors: u32,
    /// Total memory in bytes.
    pub memory: u64,
}

/// Looks for GPUs and their libraries.
#[cfg(feature = "cuda")]
pub fn probe_gpus() -> GpuProbe {
    let probe = kiln_cuda::probe();
    let device = |gpu: &kiln_cuda::Gpu| {
        let info = GpuInfo {
            name: gpu.name.clone(),
            capability: (gpu.capability.0 as u32, gpu.capability.1 as u32),
            processors: gpu.multiprocessors as u32,
            memory: gpu.memory,
        };
        (format!("cuda:{}", gpu.ordinal), info)
    };
    let state = |library: &kiln_cuda::LibraryStatus| {
        let state = match &library.found {
            Ok(found) => format!("{} ({})", found.version, found.path.display()),
            Err(kiln_cuda::Error::Missing { .. }) if library.not_needed() => "not found".into(),
            Err(kiln_cuda::Error::Missing { install, .. }) => format!("not found: {install}"),
            Err(e) => e.to_string(),
        };
        if library.not_needed() { format!("{state}; not needed, the kernels are built in") } else { state }
    };
    let version = |library: &kiln_cuda::LibraryStatus| {
        (library.name, library.found.as_ref().ok().map(|found| found.version.clone()))
    };
    GpuProbe {
        built_in: true,
        devices: probe.gpus.as_ref().ok().map(|gpus| gpus.iter().map(device).collect()),
        kernels: kernels(&probe, !kiln_cuda::BuiltInKernels::of_program().is_empty()),
        libraries: probe.libraries.iter().map(|library| (library.name, state(library))).collect(),
        versions: probe.libraries.iter().map(version).collect(),
        usable: probe.usable(),
    }
}

/// Says which kernels are built in, and which of them the machine's GPUs use. `some`: whether there are any, perhaps of older
/// sources.
#[cfg(feature = "cuda")]
fn kernels(probe: &kiln_cuda::Probe, some: bool) -> String {
    let (code, ptx): (Vec<_>, Vec<_>) = probe.built_in.iter().partition(|target| target.is_machine_code());
    if probe.built_in.is_empty() && some {
        return "not all built in: NVRTC compiles those whose source has changed since tools/cuda/kernels.sh"
            .into();
    }
    if probe.built_in.is_empty() {
        return "none built in: NVRTC compiles them at the first use of a GPU, which takes seconds".into();
    }
    let capabilities: Vec<String> = code.iter().map(|target| target.capability()).collect();
    let mut text = format!("built in for compute capability {}", capabilities.join(", "));
    if let Some(oldest) = ptx.first() {
        text += &format!(" and others from {}", oldest.capability());
    }
    for gpu in probe.gpus.iter().flatten() {
        text += &match probe.built_in_for(gpu) {
            Some(target) if target.is_machine_code() => {
                format!("; cuda:{} uses {}", gpu.ordinal, target.capability())
            }
            Some(_) => format!("; the driver compiles them for cuda:{}", gpu.ordinal),
            None => format!("; NVRTC compiles them for cuda:{}", gpu.ordinal),
        };
    }
    text
}

/// Looks for GPUs; this build has no GPU backend.
#[cfg(not(feature = "cuda"))]
pub fn probe_gpus() -> GpuProbe {
    GpuProbe::default()
}

/// A GPU, or a driver that computes on the CPU, which Vulkan, Metal or DirectX offers.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterInfo {
    /// Its name for `--device`.
    pub device: String,
    /// Its name, kind, interface and driver.
    pub description: String,
    /// What it offers: limits and optional features.
    pub offers: String,
    /// Whether it can be used, and why not.
    pub used: String,
}

/// Lists the adapters; `None` if this build has no backend for them.
#[cfg(feature = "wgpu")]
pub fn probe_adapters() -> Option<Vec<AdapterInfo>> {
    use crate::memory::HumanBytes;
    use kiln_wgpu::AdapterKind;

    let info = |adapter: kiln_wgpu::Adapter| {
        let [smallest, largest] = adapter.subgroup_sizes;
        let subgroups =
            if smallest == largest { smallest.to_string() } else { format!("{smallest} to {largest}") };
        let mut offers = format!(
            "buffers of {}, bindings of {}, {} of workgroup memory, {} invocations, subgroups of {subgroups}",
            HumanBytes(adapter.max_buffer),
            HumanBytes(adapter.max_binding),
            HumanBytes(adapter.workgroup_memory.into()),
            adapter.workgroup_size,
        );
        if adapter.has_f16 {
            offers += ", f16";
        }
        if !adapter.cooperative_matrices.is_empty() {
            offers += &format!(", {} kinds of cooperative matrices", adapter.cooperative_matrices.len());
        }
        let used = match (&adapter.unusable, adapter.kind) {
            (Some(reason), _) => format!("not used: {reason}"),
            (None, AdapterKind::Discrete) => "used by --device alone: not yet tested on such GPUs".into(),
            (None, AdapterKind::Cpu) => "used by --device alone: the CPU backend is faster".into(),
            (None, _) => "used by --device alone: it may be slower than the CPU".into(),
        };
        AdapterInfo {
            device: format!("wgpu:{}", adapter.number),
            description: format!(
                "{}, {}, {}, {}",
                adapter.name,
                adapter.kind.name(),
                adapter.api.name(),
                adapter.driver
            ),
            offers,
            used,
        }
    };
    Some(kiln_wgpu::adapters().into_iter().map(info).collect())
}

/// Lists the adapters; this build has no backend for them.
#[cfg(not(feature = "wgpu"))]
pub fn probe_adapters() -> Option<Vec<AdapterInfo>> {
    None
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use kiln_cuda::{CompileTarget, Gpu, Probe};

    fn text(built_in: &[&str], some: bool, capabilities: &[(i32, i32)]) -> String {
        let gpu = |(ordinal, &capability)| Gpu {
            ordinal,
            name: "a GPU".into(),
            capability,
            hardware: capability,
            memory: 0,
            multiprocessors: 1,
            shared_memory: 0,
        };
        let probe = Probe {
            libraries: Vec::new(),
            built_in: built_in.iter().map(|arch| CompileTarget::new(*arch)).collect(),
            gpus: Ok(capabilities.iter().enumerate().map(gpu).collect()),
        };
        kernels(&probe, some)
    }

    #[test]
    fn built_in_kernels_and_their_use_are_told() {
        let all: Vec<String> = CompileTarget::built_in().map(|target| target.arch).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        assert_eq!(
            text(&all, true, &[(9, 0), (8, 7), (13, 0)]),
            "built in for compute capability 8.0, 8.6, 8.9, 9.0, 10.0, 12.0 and others from 10.0; cuda:0 uses 9.0; \
             cuda:1 uses 8.6; the driver compiles them for cuda:2"
        );
        assert_eq!(
            text(&["sm_90a"], true, &[(8, 0)]),
            "built in for compute capability 9.0; NVRTC compiles them for cuda:0"
        );
        assert!(text(&[], false, &[(9, 0)]).starts_with("none built in: NVRTC"));
        assert!(text(&[], true, &[(9, 0)]).starts_with("not all built in: NVRTC"));
    }
}
