use std::path::PathBuf;

use crate::error::{Error, Result};

/// Settings of a [`CudaBackend`](crate::CudaBackend).
#[derive(Clone, Debug)]
pub struct Options {
    /// Index of the GPU.
    pub device: usize,
    /// Folder for compiled kernels and chosen cuBLASLt algorithms; `None` is the user's cache folder.
    pub cache: Option<PathBuf>,
    /// Whether to use the user's cache folder where `cache` is `None`.
    pub use_cache: bool,
    /// Runs matrix products on Kiln's own kernels instead of cuBLASLt.
    pub disable_cublaslt: bool,
    /// Maximum bytes of GPU memory for tensors and weights together.
    pub memory_limit: Option<usize>,
    /// Whether repeated work is captured as CUDA graphs.
    pub graphs: Graphs,
    /// Compute capability whose kernels run instead of the GPU's own, to test those of older GPUs: 8.0 to 8.9. `None` is
    /// what `KILN_CUDA_KERNELS` says, such as `8.6`.
    pub kernels: Option<(i32, i32)>,
}

impl Options {
    /// The compute capability whose kernels run, unless it is the GPU's own.
    pub(crate) fn kernels(&self) -> Result<Option<(i32, i32)>> {
        match std::env::var("KILN_CUDA_KERNELS") {
            Ok(text) if self.kernels.is_none() && !text.is_empty() => match parse_capability(&text) {
                Some(capability) => Ok(Some(capability)),
                None => Err(Error::Capability { text }),
            },
            _ => Ok(self.kernels),
        }
    }
}

/// Parses a compute capability, such as `8.6`.
fn parse_capability(text: &str) -> Option<(i32, i32)> {
    let (major, minor) = text.split_once('.')?;
    let digits = |part: &str| part.parse::<u8>().ok().map(i32::from);
    Some((digits(major)?, digits(minor)?))
}

/// When to capture repeated work as a CUDA graph: one launch instead of hundreds ([`kiln_ops::Backend::replay`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    /// Where work is launch-bound, and no memory limit is set: a graph keeps its memory.
    #[default]
    Auto,
    /// Whenever possible, on the second call.
    Always,
    /// Never.
    Never,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            device: 0,
            cache: None,
            use_cache: true,
            disable_cublaslt: false,
            memory_limit: None,
            graphs: Graphs::Auto,
            kernels: None,
        }
    }
}
