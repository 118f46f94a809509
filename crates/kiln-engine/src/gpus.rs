//! The machine's GPUs, and the libraries needed to use them.

/// GPUs and libraries found on this machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuProbe {
    /// Whether this build has a GPU backend.
    pub built_in: bool,
    /// Each GPU with its name for `--device`; `None` without a driver.
    pub devices: Option<Vec<(String, GpuInfo)>>,
    /// Each library with its version and path, or why it was not found.
    pub libraries: Vec<(&'static str, String)>,
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
    let state = |library: &kiln_cuda::LibraryStatus| match &library.found {
        Ok(found) => format!("{} ({})", found.version, found.path.display()),
        Err(kiln_cuda::Error::Missing { install, .. }) => format!("not found: {install}"),
        Err(e) => e.to_string(),
    };
    GpuProbe {
        built_in: true,
        devices: probe.gpus.as_ref().ok().map(|gpus| gpus.iter().map(device).collect()),
        libraries: probe.libraries.iter().map(|library| (library.name, state(library))).collect(),
        usable: probe.usable(),
    }
}

/// Looks for GPUs; this build has no GPU backend.
#[cfg(not(feature = "cuda"))]
pub fn probe_gpus() -> GpuProbe {
    GpuProbe::default()
}
