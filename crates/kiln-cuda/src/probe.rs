//! Reports the CUDA libraries and GPUs of this machine, and the kernels inside the program.

use std::path::PathBuf;

use crate::built_in::BuiltInKernels;
use crate::error::{Error, Result};
use crate::find::{self, CudaLibrary};
use crate::sys::cublaslt::CublasLt;
use crate::sys::driver::{
    DEVICE_MAJOR, DEVICE_MINOR, DEVICE_PROCESSORS, DEVICE_SHARED_BYTES, Driver, NO_DEVICE,
};
use crate::sys::nvrtc::Nvrtc;
use crate::target::CompileTarget;

/// The libraries and GPUs of this machine.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Every library, found or not.
    pub libraries: Vec<LibraryStatus>,
    /// The targets whose kernels are inside the program.
    pub built_in: Vec<CompileTarget>,
    /// The GPUs, or why the driver cannot list them.
    pub gpus: Result<Vec<Gpu>>,
}

/// Whether a library was found.
#[derive(Clone, Debug)]
pub struct LibraryStatus {
    /// Name for messages.
    pub name: &'static str,
    /// Whether the backend needs it: NVRTC is needed where a GPU's kernels are not inside the program.
    pub required: bool,
    /// Path and version, or why it cannot be used.
    pub found: Result<LibraryInfo>,
}

impl LibraryStatus {
    /// Whether it has no use: NVRTC, where all kernels are inside the program.
    pub fn not_needed(&self) -> bool {
        self.name == CudaLibrary::Nvrtc.name() && !self.required
    }
}

/// Path and version of a usable library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryInfo {
    /// The file.
    pub path: PathBuf,
    /// Such as `13.0`.
    pub version: String,
}

/// A GPU reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Index, as in `cuda:0`.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability that kernels are chosen by: the hardware's, unless the backend's options name another.
    pub capability: (i32, i32),
    /// Compute capability of the hardware.
    pub hardware: (i32, i32),
    /// Bytes of memory.
    pub memory: u64,
    /// Number of multiprocessors.
    pub multiprocessors: i32,
    /// Maximum bytes of shared memory per block.
    pub shared_memory: i32,
}

impl Gpu {
    /// Whether it is that of `tools/cuda/emulator`, whose compiler's output is a placeholder.
    pub(crate) fn is_emulated(&self) -> bool {
        self.name == "Emulated GPU"
    }

    /// The GPU with the kernels, and no more shared memory, of another compute capability.
    pub(crate) fn with_kernels_of(self, capability: (i32, i32)) -> Result<Gpu> {
        if capability == self.hardware {
            return Ok(self);
        }
        // Those of 9.0 and later have instructions that no other architecture has.
        if capability.0 != 8 || capability > self.hardware {
            return Err(Error::OtherKernels { name: self.name, own: self.hardware, kernels: capability });
        }
        let most = if matches!(capability.1, 0 | 7) { 163 << 10 } else { 99 << 10 };
        Ok(Gpu { capability, shared_memory: self.shared_memory.min(most), ..self })
    }

    /// Whether its tensor cores support fp8: Ada and newer.
    pub fn has_fp8(&self) -> bool {
        self.capability >= (8, 9)
    }

    /// Whether `mma` multiplies nvfp4 with block scales. Of GPUs with such products, 10.0 and 10.3 have them in other
    /// instructions.
    pub fn has_nvfp4(&self) -> bool {
        matches!(self.capability, (12, 0 | 1))
    }
}

impl Probe {
    /// The kernels inside the program that a GPU uses.
    pub fn built_in_for(&self, gpu: &Gpu) -> Option<&CompileTarget> {
        let own = CompileTarget::built_in_for(gpu.capability)?;
        self.built_in.iter().find(|target| **target == own)
    }

    /// Whether a [`CudaBackend`](crate::CudaBackend) can be created.
    pub fn usable(&self) -> bool {
        self.libraries.iter().all(|library| !library.required || library.found.is_ok())
            && self.gpus.as_ref().is_ok_and(|gpus| gpus.iter().any(|gpu| gpu.capability.0 >= 8))
    }
}

/// Searches for libraries and GPUs. Never panics; initialising the driver may take a moment.
pub fn probe() -> Probe {
    let gpus = driver().and_then(|driver| gpus(&driver));
    let built_in = BuiltInKernels::of_program().targets();
    let mut probe = Probe { libraries: Vec::new(), built_in, gpus };
    let missing_kernels = match probe.gpus.as_deref() {
        Ok(gpus) if !gpus.is_empty() => gpus.iter().any(|gpu| probe.built_in_for(gpu).is_none()),
        _ => probe.built_in.is_empty(),
    };
    probe.libraries.extend(CudaLibrary::ALL.map(|library| LibraryStatus {
        name: library.name(),
        required: match library {
            CudaLibrary::Driver => true,
            CudaLibrary::Nvrtc => missing_kernels,
            CudaLibrary::CublasLt => false,
        },
        found: version(library),
    }));
    probe
}

fn version(library: CudaLibrary) -> Result<LibraryInfo> {
    let dotted = |n: i32| format!("{}.{}", n / 1000, n % 1000 / 10);
    match library {
        CudaLibrary::Driver => {
            let driver = driver()?;
            let mut number = 0;
            // SAFETY: the value is written.
            driver.check("cuDriverGetVersion", unsafe { (driver.version)(&mut number) })?;
            Ok(LibraryInfo { version: format!("for CUDA {}", dotted(number)), path: driver.path.clone() })
        }
        CudaLibrary::Nvrtc => {
            let nvrtc = Nvrtc::new(find::load(library)?)?;
            let (major, minor) = nvrtc.read_version()?;
            Ok(LibraryInfo { version: format!("{major}.{minor}"), path: nvrtc.path })
        }
        CudaLibrary::CublasLt => {
            let lt = CublasLt::new(find::load(library)?)?;
            // SAFETY: the function has no arguments.
            let number = unsafe { (lt.version)() };
            let version = format!("{}.{}.{}", number / 10000, number % 10000 / 100, number % 100);
            Ok(LibraryInfo { version, path: lt.path })
        }
    }
}

/// Loads and initialises the driver.
pub(crate) fn driver() -> Result<Driver> {
    let driver = Driver::new(find::load(CudaLibrary::Driver)?)?;
    // SAFETY: the flags have to be 0.
    match unsafe { (driver.init)(0) } {
        // A driver without a GPU.
        NO_DEVICE => Ok(driver),
        status => driver.check("cuInit", status).map(|()| driver),
    }
}

pub(crate) fn gpus(driver: &Driver) -> Result<Vec<Gpu>> {
    let mut count = 0;
    // SAFETY: the count is written.
    match unsafe { (driver.device_count)(&mut count) } {
        0 => {}
        // Not initialised: no device.
        _ => count = 0,
    }
    (0..count).map(|ordinal| gpu(driver, ordinal)).collect()
}

fn gpu(driver: &Driver, ordinal: i32) -> Result<Gpu> {
    let (mut device, mut memory) = (0, 0usize);
    let mut name = [0u8; 128];
    // SAFETY: each call writes what its pointer points to, the name at most 127 bytes and a zero.
    unsafe {
        driver.check("cuDeviceGet", (driver.device_get)(&mut device, ordinal))?;
        driver.check("cuDeviceGetName", (driver.device_name)(name.as_mut_ptr().cast(), 127, device))?;
        driver.check("cuDeviceTotalMem", (driver.device_total_mem)(&mut memory, device))?;
    }
    let attribute = |which: i32| {
        let mut value = 0;
        // SAFETY: the value is written.
        let status = unsafe { (driver.device_attribute)(&mut value, which, device) };
        driver.check("cuDeviceGetAttribute", status).map(|()| value)
    };
    let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
    let capability = (attribute(DEVICE_MAJOR)?, attribute(DEVICE_MINOR)?);
    Ok(Gpu {
        ordinal: ordinal as usize,
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        capability,
        hardware: capability,
        memory: memory as u64,
        multiprocessors: attribute(DEVICE_PROCESSORS)?,
        shared_memory: attribute(DEVICE_SHARED_BYTES)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_older_gpus_run_with_their_limits() {
        let gpu = |hardware| Gpu {
            ordinal: 0,
            name: "a GPU".into(),
            capability: hardware,
            hardware,
            memory: 0,
            multiprocessors: 1,
            shared_memory: 227 << 10,
        };
        let shared = |capability| gpu((9, 0)).with_kernels_of(capability).unwrap().shared_memory >> 10;
        assert_eq!([(8, 0), (8, 6), (8, 9), (9, 0)].map(shared), [163, 99, 99, 227]);
        assert!(!gpu((9, 0)).with_kernels_of((8, 6)).unwrap().has_fp8());
        for (hardware, kernels) in [((8, 6), (8, 9)), ((8, 9), (9, 0)), ((12, 0), (9, 0)), ((9, 0), (7, 5))] {
            let error = gpu(hardware).with_kernels_of(kernels).unwrap_err().to_string();
            assert!(error.contains("can't run the kernels"), "{error}");
        }
    }

    #[test]
    fn a_probe_reports_every_library_and_explains_missing_ones() {
        let probe = probe();
        assert_eq!(probe.libraries.len(), 3);
        for library in &probe.libraries {
            match &library.found {
                Ok(found) => assert!(!found.version.is_empty(), "{library:?}"),
                Err(e) => assert!(!e.to_string().is_empty(), "{library:?}"),
            }
        }
        if let Err(e) = &probe.gpus {
            assert!(!probe.usable());
            println!("no GPU here: {e}");
        }
    }
}
