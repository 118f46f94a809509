//! The kernels' source text, and what it is compiled for.

/// A file of kernels: its name for messages and its text, without what all files share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Stem of the file.
    pub name: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($NAME:ident = $name:literal;)*) => {
        $(pub(crate) const $NAME: Source =
            Source { name: $name, text: include_str!(concat!("../kernels/", $name, ".cu")) };)*

        /// Every file of kernels.
        pub const SOURCES: &[Source] = &[$($NAME),*];
    };
}

sources! {
    ATTENTION = "attention";
    ATTENTION_F32 = "attention_f32";
    ATTENTION_HOPPER = "attention_hopper";
    ATTENTION_PLAIN = "attention_plain";
    CONV = "conv";
    CONV_F32 = "conv_f32";
    CONV_HOPPER = "conv_hopper";
    ELEMENTWISE = "elementwise";
    FEW_ROWS = "few_rows";
    FP8 = "fp8";
    GROUP_NORM = "group_norm";
    INT8 = "int8";
    MOVEMENT = "movement";
    NORM = "norm";
    OUTPUT = "output";
    ROPE = "rope";
    SOFTMAX = "softmax";
    WIDEN = "widen";
}

/// Types, conversions and instructions that all kernels use.
const COMMON: &str = include_str!("../kernels/common.cuh");
/// Instructions of one generation.
const HOPPER: &str = include_str!("../kernels/hopper.cuh");
/// Convolutions as kernels take them.
const CONVOLUTION: &str = include_str!("../kernels/conv.cuh");
/// Rounding of rows to 8-bit floats.
const E4M3: &str = include_str!("../kernels/e4m3.cuh");

impl Source {
    /// The kernels that a picture needs on a GPU of this compute capability.
    pub(crate) fn usual(capability: (i32, i32)) -> [&'static Source; 10] {
        let [attention, conv] = match capability {
            (9, 0) => [&ATTENTION_HOPPER, &CONV_HOPPER],
            _ => [&ATTENTION, &CONV],
        };
        [attention, conv, &ELEMENTWISE, &FEW_ROWS, &GROUP_NORM, &MOVEMENT, &NORM, &OUTPUT, &ROPE, &SOFTMAX]
    }

    /// The file itself.
    #[cfg(test)]
    pub(crate) fn text(&self) -> &'static str {
        self.text
    }

    /// What the compiler gets. Nothing is included from the toolkit: NVRTC would need its folder.
    pub fn full_text(&self) -> String {
        let further = match self.name {
            "attention_hopper" | "conv_hopper" => HOPPER,
            "conv" | "conv_f32" => CONVOLUTION,
            "fp8" | "norm" => E4M3,
            _ => "",
        };
        format!("{COMMON}\n{further}\n#line 1 \"{}.cu\"\n{}", self.name, self.text)
    }
}

/// What kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Such as `sm_90a`, or `compute_90` where the driver has to do the rest.
    pub arch: String,
    /// Whether machine code comes out, not PTX.
    pub binary: bool,
}

impl Target {
    /// For a GPU of this compute capability, with a compiler that knows `supported` ones (times 10).
    ///
    /// A GPU newer than the compiler gets PTX of the newest one it knows, which the driver compiles at start.
    pub fn of(major: i32, minor: i32, supported: &[i32]) -> Target {
        let own = major * 10 + minor;
        if supported.is_empty() || supported.contains(&own) {
            // The instructions of one generation alone are in its `a` variant.
            let suffix = if major >= 9 { "a" } else { "" };
            return Target { arch: format!("sm_{own}{suffix}"), binary: true };
        }
        let newest = supported.iter().copied().filter(|&arch| arch < own).max().unwrap_or(80);
        Target { arch: format!("compute_{newest}"), binary: false }
    }

    /// The compiler's options.
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
            assert_eq!(Target::of(gpu.0, gpu.1, &supported), Target { arch: arch.into(), binary: true });
        }
    }

    #[test]
    fn a_gpu_newer_than_the_compiler_gets_ptx_of_the_newest_it_knows() {
        let target = Target::of(12, 1, &[80, 89, 90]);
        assert_eq!(target, Target { arch: "compute_90".into(), binary: false });
    }

    #[test]
    fn kernels_include_nothing_and_share_what_is_common() {
        for source in SOURCES {
            let text = source.full_text();
            assert!(!text.contains("#include"), "{}", source.name);
            assert!(text.starts_with(COMMON), "{}", source.name);
        }
    }
}
