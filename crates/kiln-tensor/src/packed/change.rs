use std::fmt;
use std::sync::Arc;

use crate::DType;

/// What becomes of a matrix's values where they are read, so that a changed matrix needs no copy of itself.
pub trait Change: fmt::Debug + Send + Sync {
    /// Changes `values`, which are those of `row` from column `from` on. Each piece of a row must come out as it would with
    /// the whole row.
    fn change(&self, row: usize, from: usize, values: &mut [f32]);
}

/// A change, for a matrix whose first row is its row `first`.
#[derive(Clone, Debug)]
pub(super) struct Changed {
    pub change: Arc<dyn Change>,
    pub first: usize,
    /// What the values are rounded to when they are all written out.
    pub dtype: DType,
}

impl PartialEq for Changed {
    fn eq(&self, other: &Changed) -> bool {
        Arc::ptr_eq(&self.change, &other.change) && self.first == other.first && self.dtype == other.dtype
    }
}
