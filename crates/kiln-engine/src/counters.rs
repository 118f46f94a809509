//! What an engine counts for benchmarks.

/// Counters of an engine since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Transformer calls that replayed a CUDA graph.
    pub graph_replays: usize,
    /// Peak device memory in bytes; 0 on the CPU.
    pub peak_memory: u64,
}
