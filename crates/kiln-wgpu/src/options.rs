use crate::api::Api;

/// Settings of a [`WgpuBackend`](crate::WgpuBackend).
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The interface to the driver; `None` takes any.
    pub api: Option<Api>,
    /// Number of the adapter among those of [`adapters`](crate::adapters) that have this interface.
    pub number: usize,
    /// Maximum bytes of GPU memory for tensors and weights together.
    pub memory_limit: Option<usize>,
    /// Uses no more than what every adapter has: WebGPU's default limits and no optional features. For tests.
    pub minimal: bool,
}
