use std::path::PathBuf;

/// How a [`CudaBackend`](crate::CudaBackend) is to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The GPU's number.
    pub device: usize,
    /// Where compiled kernels and chosen ways to multiply are kept; the system's usual place when absent.
    pub cache: Option<PathBuf>,
    /// Whether they are kept at all where `cache` names no place.
    pub keep: bool,
    /// Whether matrix products are made without cuBLASLt, by Kiln's own kernels alone.
    pub own_products: bool,
    /// The most bytes of the GPU's memory that tensors and weights take together.
    pub memory_limit: Option<usize>,
    /// Whether work that is asked for again and again is recorded and replayed.
    pub graphs: Graphs,
}

/// When work is recorded as a CUDA graph, which is one launch instead of hundreds ([`kiln_ops::Backend::replay`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    /// Where launching takes the processor about as long as the work takes the GPU; not under a memory limit.
    #[default]
    Auto,
    /// Wherever it can be: the second time that it is asked for.
    Always,
    /// Nowhere.
    Never,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            device: 0,
            cache: None,
            keep: true,
            own_products: false,
            memory_limit: None,
            graphs: Graphs::Auto,
        }
    }
}
