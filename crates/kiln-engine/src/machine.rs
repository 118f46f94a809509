//! Memory and CPU of this machine.

use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

/// The machine's memory in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Installed memory.
    pub total: u64,
    /// Memory that can be allocated without swapping.
    pub available: u64,
}

impl Memory {
    /// Queries the system and the container's limits; `None` if unknown.
    pub fn detect() -> Option<Memory> {
        let kinds = RefreshKind::nothing().with_memory(MemoryRefreshKind::everything());
        let system = System::new_with_specifics(kinds).ok()?;
        let mut memory = Memory { total: system.total_memory(), available: system.available_memory() };
        if let Some(limits) = system.cgroup_limits() {
            memory.total = memory.total.min(limits.total_memory);
            // The page cache counts as used memory in a container, although the system can reclaim it.
            let used = limits.rss.min(memory.total);
            memory.available = memory.available.min(memory.total - used);
        }
        (memory.total > 0).then_some(memory)
    }
}

/// Returns name and version of the operating system and of its kernel.
pub fn system_version() -> Option<String> {
    let kernel =
        System::kernel_version().map_or_else(|_| String::new(), |version| format!(", kernel {version}"));
    System::long_os_version().ok().map(|name| name + &kernel)
}

/// Returns the version of NVIDIA's driver, such as 580.65.
#[cfg(not(windows))]
pub fn nvidia_driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|n| n.parse::<u32>().is_ok());
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// Returns the version of NVIDIA's driver, such as 580.65.
#[cfg(windows)]
pub fn nvidia_driver() -> Option<String> {
    let library = kiln_windows::system_folder().ok()?.join("nvcuda.dll");
    kiln_windows::file_version(&library).ok().map(driver_of_windows)
}

/// NVIDIA's version in that of a driver for Windows, whose last five digits it is: 580.65 in 32.0.15.8065.
#[cfg(any(windows, test))]
fn driver_of_windows([.., group, build]: [u16; 4]) -> String {
    let digits = u32::from(group) % 10 * 10_000 + u32::from(build);
    format!("{}.{:02}", digits / 100, digits % 100)
}

/// Returns the bytes available for a request on the CPU; one that needs more is refused.
pub fn memory_limit() -> Option<u64> {
    Memory::detect().map(|memory| if memory.available > 0 { memory.available } else { memory.total })
}

/// Says why this CPU is slow, if it lacks what Kiln's kernels for its architecture need.
pub fn slow_cpu() -> Option<String> {
    (kiln_cpu::Isa::best() == kiln_cpu::Isa::Portable).then(|| {
        let lacks = match std::env::consts::ARCH {
            "x86_64" => "this CPU has no AVX2, FMA and F16C",
            _ => "there are no kernels for this CPU",
        };
        format!("{lacks}: computing with plain code, about ten times slower")
    })
}

/// The machine's CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    /// Its name.
    pub name: String,
    /// Physical cores, if known.
    pub cores: Option<usize>,
    /// Threads that this process can run in parallel.
    pub threads: usize,
    /// Instruction sets that Kiln uses, and whether they are present.
    pub features: Vec<(&'static str, bool)>,
}

impl Cpu {
    /// Queries the system.
    pub fn detect() -> Cpu {
        let system =
            System::new_with_specifics(RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing())).ok();
        let first = system.as_ref().and_then(|system| system.cpus().first());
        let name = first.map(|cpu| cpu.brand().trim().to_owned()).unwrap_or_default();
        Cpu {
            name: if name.is_empty() { std::env::consts::ARCH.into() } else { name },
            cores: System::physical_core_count().ok(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            features: features(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<(&'static str, bool)> {
    // The standard library can't detect AMX yet; Linux lists it.
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = flags.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let listed = |name: &str| flags.split_whitespace().any(|flag| flag == name);
    vec![
        ("avx2", std::is_x86_feature_detected!("avx2")),
        ("fma", std::is_x86_feature_detected!("fma")),
        ("f16c", std::is_x86_feature_detected!("f16c")),
        ("avx512f", std::is_x86_feature_detected!("avx512f")),
        ("avx512_bf16", std::is_x86_feature_detected!("avx512bf16")),
        ("avx512_vnni", std::is_x86_feature_detected!("avx512vnni")),
        ("amx_bf16", listed("amx_bf16")),
        ("amx_int8", listed("amx_int8")),
    ]
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<(&'static str, bool)> {
    use std::arch::is_aarch64_feature_detected as detected;
    vec![
        ("neon", detected!("neon")),
        ("dotprod", detected!("dotprod")),
        ("i8mm", detected!("i8mm")),
        ("bf16", detected!("bf16")),
    ]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::driver_of_windows;

    #[test]
    fn the_driver_has_one_version_on_every_system() {
        let versions = [[32, 0, 15, 8065], [31, 0, 15, 3742], [30, 0, 14, 7141], [32, 0, 16, 9]];
        assert_eq!(versions.map(driver_of_windows), ["580.65", "537.42", "471.41", "600.09"]);
    }
}
