use std::path::PathBuf;

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
        }
    }
}
