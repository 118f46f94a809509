//! Whether a process can do its work, as probes and metrics tell it.

use crate::jobs::metrics_text::MetricsText;
use crate::jobs::store::StoreError;

/// Tells whether jobs can be stored, and what metrics there are besides those of every server.
pub(crate) trait Health: Send + Sync {
    /// Checks that records can be written.
    fn check(&self) -> Result<(), StoreError>;

    /// Adds metrics.
    fn metrics(&self, out: &mut MetricsText) {
        let _ = out;
    }
}
