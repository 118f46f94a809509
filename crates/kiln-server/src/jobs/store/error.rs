//! Why something can't be stored.

use std::path::PathBuf;

use crate::jobs::error::{ErrorCode, JobError};

/// An error of the database or of a file.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database failed.
    #[error("job database error: {0}")]
    Database(#[from] rusqlite::Error),
    /// A file or folder can't be written.
    #[error("can't write `{path}`: {source}")]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another server uses the folder.
    #[error("another server is using it")]
    InUse,
    /// The queue of the fleet can't be used.
    #[error("the queue can't be used: {0}")]
    Queue(String),
    /// No model of a worker can be loaded.
    #[error("no model can be loaded: {0}")]
    Model(String),
    /// A newer version of Kiln wrote the database.
    #[error("its database has version {found}, this version of Kiln knows up to {known}; use the newer Kiln")]
    Newer {
        /// The version of the database.
        found: u32,
        /// The newest version known here.
        known: u32,
    },
}

impl From<StoreError> for JobError {
    fn from(error: StoreError) -> JobError {
        JobError::new(ErrorCode::Storage, error.to_string())
    }
}
