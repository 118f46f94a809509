//! The GPUs of this machine and the libraries to use them with.

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpus {
    /// Whether this build has a backend for them.
    pub built_in: bool,
    /// Each by its name for `--device`, and what it is; `None` where they can't be seen without a driver.
    pub devices: Option<Vec<(String, GpuInfo)>>,
    /// Libraries by name, and where they were found or why not.
    pub libraries: Vec<(&'static str, String)>,
    /// Whether images can be made on one.
    pub usable: bool,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuInfo {
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors: u32,
    /// Bytes of its memory.
    pub memory: u64,
}

/// Looks for GPUs.
#[cfg(feature = "cuda")]
pub fn gpus() -> Gpus {
    let probe = kiln_cuda::probe();
    let about = |gpu: &kiln_cuda::Gpu| {
        let info = GpuInfo {
            name: gpu.name.clone(),
            capability: (gpu.capability.0 as u32, gpu.capability.1 as u32),
            processors: gpu.processors as u32,
            memory: gpu.memory,
        };
        (format!("cuda:{}", gpu.ordinal), info)
    };
    let state = |library: &kiln_cuda::Library| match &library.found {
        Ok(found) => format!("{} ({})", found.version, found.path.display()),
        Err(kiln_cuda::Error::Missing { install, .. }) => format!("not found: {install}"),
        Err(e) => e.to_string(),
    };
    Gpus {
        built_in: true,
        devices: probe.gpus.as_ref().ok().map(|gpus| gpus.iter().map(about).collect()),
        libraries: probe.libraries.iter().map(|library| (library.name, state(library))).collect(),
        usable: probe.usable(),
    }
}

/// This build has no backend for them.
#[cfg(not(feature = "cuda"))]
pub fn gpus() -> Gpus {
    Gpus::default()
}
