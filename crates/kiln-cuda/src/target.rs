//! The architectures kernels are compiled for.

use crate::cache::CacheKey;
use crate::sources::KernelSource;

/// The architecture kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileTarget {
    /// Such as `sm_90a`, or `compute_90` for PTX.
    pub arch: String,
}

/// The architectures of the built-in kernels.
///
/// `sm_100f` and `sm_120f` run on every GPU of their family: 10.0 and 10.3, 12.0 and 12.1. The PTX is for GPUs that these
/// don't cover; it is of the oldest architecture after which one is missing.
const BUILT_IN: [&str; 7] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_120f", "compute_100"];

impl CompileTarget {
    /// An architecture by its name.
    pub fn new(arch: impl Into<String>) -> CompileTarget {
        CompileTarget { arch: arch.into() }
    }

    /// Machine code for GPUs of this compute capability.
    pub fn machine_code((major, minor): (i32, i32)) -> CompileTarget {
        // Architecture-specific instructions need the `a` variant.
        CompileTarget::new(format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" }))
    }

    /// PTX that the driver compiles at load, for GPUs of this compute capability or a later one.
    pub fn ptx((major, minor): (i32, i32)) -> CompileTarget {
        CompileTarget::new(format!("compute_{major}{minor}"))
    }

    /// All targets of the built-in kernels.
    pub fn built_in() -> impl Iterator<Item = CompileTarget> {
        BUILT_IN.into_iter().map(CompileTarget::new)
    }

    /// The target of the built-in kernels that a GPU of this compute capability runs.
    pub fn built_in_for(capability: (i32, i32)) -> Option<CompileTarget> {
        // Machine code runs on later minor versions, except that of an architecture (`a`) or a family (`f`).
        let arch = match capability {
            (8, 0..=5) => "sm_80",
            (8, 6..=8) => "sm_86",
            (8, 9..) => "sm_89",
            (9, 0) => "sm_90a",
            (10, 0 | 3) => "sm_100f",
            (12, 0 | 1) => "sm_120f",
            (10.., _) => "compute_100",
            _ => return None,
        };
        Some(CompileTarget::new(arch))
    }

    /// The compute capability that it is for, as in `9.0`; that of PTX is the oldest.
    pub fn capability(&self) -> String {
        let digits: String = self.arch.chars().filter(char::is_ascii_digit).collect();
        let (major, minor) = digits.split_at(digits.len().saturating_sub(1));
        format!("{major}.{minor}")
    }

    /// The built-in target whose machine code this target's differs little from, and is compressed against: all kernels for
    /// 8.9 take 30 KB instead of 460, those for 8.0 200 instead of 450.
    pub(crate) fn similar(&self) -> Option<CompileTarget> {
        matches!(self.arch.as_str(), "sm_80" | "sm_89").then(|| CompileTarget::new("sm_86"))
    }

    /// Whether the compiler's output is machine code instead of PTX.
    pub fn is_machine_code(&self) -> bool {
        self.arch.starts_with("sm_")
    }

    /// Whether a source is compiled for this target: kernels of nvfp4 have instructions of 12.0 and 12.1 alone.
    pub fn takes(&self, source: &KernelSource) -> bool {
        let has_nvfp4 = self.is_machine_code() && self.capability().starts_with("12.");
        has_nvfp4 || !source.name.ends_with("nvfp4")
    }

    /// Command-line options for NVRTC.
    pub fn options(&self) -> Vec<String> {
        vec![format!("--gpu-architecture={}", self.arch), "--std=c++17".into()]
    }

    /// The name of a source's compiled form. It does not contain the compiler's version: machine code stays usable when
    /// the compiler is gone.
    pub(crate) fn key(&self, source: &KernelSource) -> CacheKey {
        let (text, options) = (source.full_text(), self.options().join(" "));
        CacheKey::new(&format!("{}-{}", source.name, self.arch), &[text.as_bytes(), options.as_bytes()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_runs_built_in_kernels_of_its_own_architecture_or_of_the_nearest_older_one() {
        for (capability, arch) in [
            ((8, 0), Some("sm_80")),
            ((8, 6), Some("sm_86")),
            ((8, 7), Some("sm_86")),
            ((8, 9), Some("sm_89")),
            ((9, 0), Some("sm_90a")),
            ((10, 0), Some("sm_100f")),
            ((10, 1), Some("compute_100")),
            ((10, 3), Some("sm_100f")),
            ((11, 0), Some("compute_100")),
            ((12, 0), Some("sm_120f")),
            ((12, 1), Some("sm_120f")),
            ((13, 0), Some("compute_100")),
            ((7, 5), None),
        ] {
            assert_eq!(
                CompileTarget::built_in_for(capability),
                arch.map(CompileTarget::new),
                "{capability:?}"
            );
            assert!(arch.is_none_or(|arch| BUILT_IN.contains(&arch)));
        }
    }

    #[test]
    fn architecture_specific_instructions_are_compiled_where_there_are_any() {
        assert_eq!(CompileTarget::machine_code((8, 9)).arch, "sm_89");
        assert_eq!(CompileTarget::machine_code((9, 0)).arch, "sm_90a");
        assert_eq!(CompileTarget::machine_code((12, 0)).arch, "sm_120a");
        assert!(!CompileTarget::ptx((8, 0)).is_machine_code());
        assert_eq!(["sm_90a", "sm_120f"].map(|arch| CompileTarget::new(arch).capability()), ["9.0", "12.0"]);
    }

    #[test]
    fn nvfp4_is_compiled_for_gpus_that_have_it() {
        let takes = |arch: &str, name| CompileTarget::new(arch).takes(&KernelSource { name });
        assert!(["sm_120a", "sm_121a", "sm_120f"].iter().all(|arch| takes(arch, "gemm_mma_nvfp4")));
        assert!(!["sm_90a", "sm_100f", "compute_100", "compute_120"].iter().any(|arch| takes(arch, "nvfp4")));
        assert!(BUILT_IN.iter().all(|arch| takes(arch, "dequantize")));
    }

    #[test]
    fn another_source_or_architecture_is_another_key() {
        let (hopper, norm) = (CompileTarget::new("sm_90a"), KernelSource { name: "norm" });
        let key = hopper.key(&norm);
        assert_eq!(key, hopper.clone().key(&norm));
        assert_ne!(key, hopper.key(&KernelSource { name: "rope" }));
        assert_ne!(key, CompileTarget::new("sm_80").key(&norm));
        assert_ne!(key, CompileTarget::new("compute_90").key(&norm));
    }
}
