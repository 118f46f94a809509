//! The kernels' source text and their compilation targets.

use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The files of the kernels, by name.
static FILES: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let files = kiln_pack::unpack(include_bytes!(concat!(env!("OUT_DIR"), "/kernels.packed")));
    files.into_iter().map(|(name, text)| (name, String::from_utf8_lossy(&text).into_owned())).collect()
});

/// The text of a file, which the build script has packed.
fn file(name: &str) -> &'static str {
    FILES.get(name).map_or("", String::as_str)
}

/// A kernel source file, named by its stem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSource {
    /// Stem of the file.
    pub name: &'static str,
}

/// All kernel source files.
pub fn kernel_sources() -> impl Iterator<Item = KernelSource> {
    FILES.keys().filter_map(|file| file.strip_suffix(".cu")).map(|name| KernelSource { name })
}

/// Types, conversions and instructions used by all kernels.
const COMMON: &str = "common.cuh";

impl KernelSource {
    /// Sources that every image needs on a GPU of this compute capability.
    pub(crate) fn compiled_at_start(capability: (i32, i32)) -> impl Iterator<Item = KernelSource> {
        let own = match capability {
            (9, 0) => ["attention_hopper", "conv_hopper"],
            _ => ["attention", "conv"],
        };
        let all = ["elementwise", "gemv", "group_norm", "movement", "norm", "epilogue", "rope", "softmax"];
        own.into_iter().chain(all).map(|name| KernelSource { name })
    }

    /// The file's own text, without the shared headers.
    pub(crate) fn text(&self) -> &'static str {
        file(&format!("{}.cu", self.name))
    }

    /// Returns the compiler's input: the common header, and the file with the headers that it includes. Nothing is included
    /// from the toolkit, since NVRTC would need its path.
    pub fn full_text(&self) -> String {
        let mut text = format!("{}\n#line 1 \"{}.cu\"\n", file(COMMON), self.name);
        for (i, line) in self.text().lines().enumerate() {
            match line.strip_prefix("#include \"").and_then(|name| name.strip_suffix('"')) {
                Some(header) => {
                    text.push_str(&format!("{}\n#line {} \"{}.cu\"\n", file(header), i + 2, self.name));
                }
                None => text.extend([line, "\n"]),
            }
        }
        text
    }
}

/// The architecture kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileTarget {
    /// Such as `sm_90a`, or `compute_90` for PTX.
    pub arch: String,
    /// Whether the output is machine code instead of PTX.
    pub binary: bool,
}

impl CompileTarget {
    /// Returns the target for a compute capability, given those the compiler supports (times 10).
    ///
    /// For a GPU newer than the compiler it is PTX of the newest supported architecture, which the driver compiles at load.
    pub fn for_capability(major: i32, minor: i32, supported: &[i32]) -> CompileTarget {
        let own = major * 10 + minor;
        if supported.is_empty() || supported.contains(&own) {
            // Architecture-specific instructions need the `a` variant.
            let suffix = if major >= 9 { "a" } else { "" };
            return CompileTarget { arch: format!("sm_{own}{suffix}"), binary: true };
        }
        let newest = supported.iter().copied().filter(|&arch| arch < own).max().unwrap_or(80);
        CompileTarget { arch: format!("compute_{newest}"), binary: false }
    }

    /// Command-line options for NVRTC.
    pub fn options(&self) -> Vec<String> {
        vec![format!("--gpu-architecture={}", self.arch), "--std=c++17".into()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_gpu_gets_machine_code_of_its_own() {
        let supported = [75, 80, 86, 89, 90, 100, 120];
        for (gpu, arch) in [
            ((8, 0), "sm_80"),
            ((8, 9), "sm_89"),
            ((9, 0), "sm_90a"),
            ((10, 0), "sm_100a"),
            ((12, 0), "sm_120a"),
        ] {
            assert_eq!(
                CompileTarget::for_capability(gpu.0, gpu.1, &supported),
                CompileTarget { arch: arch.into(), binary: true }
            );
        }
    }

    #[test]
    fn a_gpu_newer_than_the_compiler_gets_ptx_of_the_newest_it_knows() {
        let target = CompileTarget::for_capability(12, 1, &[80, 89, 90]);
        assert_eq!(target, CompileTarget { arch: "compute_90".into(), binary: false });
    }

    #[test]
    fn headers_replace_the_lines_that_include_them() {
        assert!(kernel_sources().count() > 20);
        for source in kernel_sources() {
            let text = source.full_text();
            assert!(!text.contains("#include"), "{}", source.name);
            assert!(text.starts_with(file(COMMON)) && !file(COMMON).is_empty(), "{}", source.name);
            assert!(source.text().contains("__global__"), "{}", source.name);
        }
        let norm = KernelSource { name: "norm" };
        assert!(norm.text().contains("#include \"e4m3.cuh\""));
        assert!(norm.full_text().contains(file("e4m3.cuh")));
    }
}
