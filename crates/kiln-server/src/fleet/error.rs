//! Why a fleet can't be used.

use crate::jobs::store::StoreError;

/// Why a fleet can't be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FleetError(pub(crate) String);

impl From<FleetError> for StoreError {
    fn from(error: FleetError) -> StoreError {
        StoreError::Queue(error.0)
    }
}

pub(super) type Result<T> = std::result::Result<T, FleetError>;

pub(super) fn failed(what: &str) -> impl Fn(&dyn std::fmt::Display) -> FleetError + '_ {
    move |error| FleetError(format!("{what}: {error}"))
}
