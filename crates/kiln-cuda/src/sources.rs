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

macro_rules! sources {
    ($($NAME:ident = $name:literal;)*) => {
        $(pub(crate) const $NAME: KernelSource = KernelSource { name: $name };)*

        /// All kernel source files.
        pub const KERNEL_SOURCES: &[KernelSource] = &[$($NAME),*];
    };
}

sources! {
    ADAPTER = "adapter";
    ATTENTION = "attention";
    ATTENTION_BACKWARD = "attention_backward";
    ATTENTION_BACKWARD_HOPPER = "attention_backward_hopper";
    ATTENTION_BACKWARD_MMA = "attention_backward_mma";
    ATTENTION_F32 = "attention_f32";
    ATTENTION_FEW = "attention_few";
    ATTENTION_HOPPER = "attention_hopper";
    ATTENTION_PLAIN = "attention_plain";
    BACKWARD = "backward";
    CONV = "conv";
    CONV_F32 = "conv_f32";
    CONV_HOPPER = "conv_hopper";
    ELEMENTWISE = "elementwise";
    GEMV = "gemv";
    FP8 = "fp8";
    GROUP_NORM = "group_norm";
    INT8 = "int8";
    LOW_RANK = "low_rank";
    MOVEMENT = "movement";
    NORM = "norm";
    OPTIMIZER = "optimizer";
    EPILOGUE = "epilogue";
    REDUCE = "reduce";
    ROPE = "rope";
    SOFTMAX = "softmax";
    DEQUANTIZE = "dequantize";
}

/// Types, conversions and instructions used by all kernels.
const COMMON: &str = "common.cuh";
/// Hopper instructions.
const HOPPER: &str = "hopper.cuh";
/// Arguments and output of convolutions.
const CONVOLUTION: &str = "conv.cuh";
/// Quantization of rows to fp8.
const E4M3: &str = "e4m3.cuh";

impl KernelSource {
    /// Sources that every image needs on a GPU of this compute capability.
    pub(crate) fn compiled_at_start(capability: (i32, i32)) -> [&'static KernelSource; 10] {
        let [attention, conv] = match capability {
            (9, 0) => [&ATTENTION_HOPPER, &CONV_HOPPER],
            _ => [&ATTENTION, &CONV],
        };
        [attention, conv, &ELEMENTWISE, &GEMV, &GROUP_NORM, &MOVEMENT, &NORM, &EPILOGUE, &ROPE, &SOFTMAX]
    }

    /// The file's own text, without the shared headers.
    pub(crate) fn text(&self) -> &'static str {
        file(&format!("{}.cu", self.name))
    }

    /// Returns the compiler's input: headers and text. Nothing is included from the toolkit, since NVRTC would need its path.
    pub fn full_text(&self) -> String {
        let further = match self.name {
            "attention_hopper" | "attention_backward_hopper" | "conv_hopper" => file(HOPPER),
            "conv" | "conv_f32" => file(CONVOLUTION),
            "fp8" | "norm" => file(E4M3),
            _ => "",
        };
        let common = file(COMMON);
        format!("{common}\n{further}\n#line 1 \"{}.cu\"\n{}", self.name, self.text())
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
    fn kernels_include_no_files_and_share_the_common_header() {
        for source in KERNEL_SOURCES {
            let text = source.full_text();
            assert!(!text.contains("#include"), "{}", source.name);
            assert!(text.starts_with(file(COMMON)), "{}", source.name);
            assert!(source.text().contains("__global__"), "{}", source.name);
        }
        for header in [COMMON, HOPPER, CONVOLUTION, E4M3] {
            assert!(!file(header).is_empty(), "{header}");
        }
    }
}
