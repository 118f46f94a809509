use std::fmt;
use std::sync::Arc;

use crate::DType;

/// A change of a tensor's values that is applied while they are read, so that no patched copy is needed (merged LoRAs).
pub trait Patch: fmt::Debug + Send + Sync {
    /// Changes `values`, the values of `row` from column `from` on. The result must not depend on how a row is cut into
    /// pieces.
    fn apply(&self, row: usize, from: usize, values: &mut [f32]);
}

/// A patch of a tensor whose row 0 is the patch's row `first_row`.
#[derive(Clone, Debug)]
pub(super) struct AppliedPatch {
    pub patch: Arc<dyn Patch>,
    pub first_row: usize,
    /// The dtype of the patched values when the whole tensor is dequantized.
    pub dtype: DType,
}

impl PartialEq for AppliedPatch {
    fn eq(&self, other: &AppliedPatch) -> bool {
        Arc::ptr_eq(&self.patch, &other.patch)
            && self.first_row == other.first_row
            && self.dtype == other.dtype
    }
}
