//! The kernels' source text.

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
    pub(crate) fn needed_at_start(capability: (i32, i32)) -> impl Iterator<Item = KernelSource> {
        let own = match capability {
            (9, 0) => &[
                "attention_hopper",
                "attention_wide",
                "conv_hopper",
                "gemm_hopper_bf16",
                "gemm_hopper_swiglu",
            ][..],
            _ => &["attention", "conv", "gemm_mma_bf16"],
        };
        let all = [
            "elementwise",
            "gemv",
            "group_norm",
            "movement",
            "norm",
            "epilogue",
            "reduce",
            "rope",
            "softmax",
        ];
        own.iter().copied().chain(all).map(|name| KernelSource { name })
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

#[cfg(test)]
mod tests {
    use super::*;

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
