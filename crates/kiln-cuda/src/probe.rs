//! What this machine offers for CUDA.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::find::{self, Wanted};
use crate::sys::cublaslt::CublasLt;
use crate::sys::driver::{
    DEVICE_MAJOR, DEVICE_MINOR, DEVICE_PROCESSORS, DEVICE_SHARED_BYTES, Driver, NO_DEVICE,
};
use crate::sys::nvrtc::Nvrtc;

/// The libraries and GPUs of this machine.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Each library, found or not.
    pub libraries: Vec<Library>,
    /// The GPUs, or why there are none to see.
    pub gpus: Result<Vec<Gpu>>,
}

/// A library and where it is.
#[derive(Clone, Debug)]
pub struct Library {
    /// The name people know it by.
    pub name: &'static str,
    /// Whether a GPU can't be used without it.
    pub required: bool,
    /// Where it is and which version; or what to do about it.
    pub found: Result<Found>,
}

/// A library that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The file.
    pub path: PathBuf,
    /// Such as `13.0`.
    pub version: String,
}

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number, as in `cuda:0`.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of memory.
    pub memory: u64,
    /// Number of multiprocessors.
    pub processors: i32,
    /// Bytes of shared memory that one block can have.
    pub shared: i32,
}

impl Gpu {
    /// Whether it multiplies 8-bit floats: from Ada on.
    pub fn has_fp8(&self) -> bool {
        self.capability >= (8, 9)
    }
}

impl Probe {
    /// Whether a [`CudaBackend`](crate::CudaBackend) can be made.
    pub fn usable(&self) -> bool {
        self.libraries.iter().all(|library| !library.required || library.found.is_ok())
            && self.gpus.as_ref().is_ok_and(|gpus| gpus.iter().any(|gpu| gpu.capability.0 >= 8))
    }
}

/// Looks for the libraries and GPUs. Never panics, and takes a moment where there are any.
pub fn probe() -> Probe {
    let libraries = Wanted::ALL.map(|wanted| Library {
        name: wanted.name(),
        required: matches!(wanted, Wanted::Driver | Wanted::Nvrtc),
        found: version(wanted),
    });
    Probe { libraries: libraries.into(), gpus: driver().and_then(|driver| gpus(&driver)) }
}

fn version(wanted: Wanted) -> Result<Found> {
    let dotted = |n: i32| format!("{}.{}", n / 1000, n % 1000 / 10);
    match wanted {
        Wanted::Driver => {
            let driver = driver()?;
            let mut number = 0;
            // SAFETY: the number is written.
            driver.check("cuDriverGetVersion", unsafe { (driver.version)(&mut number) })?;
            Ok(Found { version: format!("for CUDA {}", dotted(number)), path: driver.path.clone() })
        }
        Wanted::Nvrtc => {
            let nvrtc = Nvrtc::new(find::load(wanted)?)?;
            let (major, minor) = nvrtc.numbers()?;
            Ok(Found { version: format!("{major}.{minor}"), path: nvrtc.path })
        }
        Wanted::CublasLt => {
            let lt = CublasLt::new(find::load(wanted)?)?;
            // SAFETY: takes nothing and gives a number.
            let number = unsafe { (lt.version)() };
            let version = format!("{}.{}.{}", number / 10000, number % 10000 / 100, number % 100);
            Ok(Found { version, path: lt.path })
        }
        Wanted::Cudnn => {
            let loaded = find::load(wanted)?;
            // SAFETY: `size_t cudnnGetVersion(void)`.
            let number = unsafe {
                loaded.library.get::<unsafe extern "C" fn() -> usize>(b"cudnnGetVersion").map(|f| f())
            };
            let number =
                number.map_err(|e| Error::Unusable { path: loaded.path.clone(), what: e.to_string() })?;
            let version = format!("{}.{}.{}", number / 10000, number % 10000 / 100, number % 100);
            Ok(Found { version, path: loaded.path })
        }
    }
}

/// The driver, ready to be asked.
pub(crate) fn driver() -> Result<Driver> {
    let driver = Driver::new(find::load(Wanted::Driver)?)?;
    // SAFETY: takes a number that has to be 0.
    match unsafe { (driver.init)(0) } {
        // An installed driver without a GPU.
        NO_DEVICE => Ok(driver),
        status => driver.check("cuInit", status).map(|()| driver),
    }
}

pub(crate) fn gpus(driver: &Driver) -> Result<Vec<Gpu>> {
    let mut count = 0;
    // SAFETY: the count is written.
    match unsafe { (driver.device_count)(&mut count) } {
        0 => {}
        // Not initialised, for want of a device.
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
    Ok(Gpu {
        ordinal: ordinal as usize,
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        capability: (attribute(DEVICE_MAJOR)?, attribute(DEVICE_MINOR)?),
        memory: memory as u64,
        processors: attribute(DEVICE_PROCESSORS)?,
        shared: attribute(DEVICE_SHARED_BYTES)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_names_every_library_and_what_to_do_about_missing_ones() {
        let probe = probe();
        assert_eq!(probe.libraries.len(), 4);
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
