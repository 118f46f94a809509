//! Where the files of a fleet are: in NATS' object store, or in a bucket of an S3-compatible service.

use std::time::Duration;

use bytes::Bytes;
use kiln_base::hex;
use serde::{Deserialize, Serialize};

use super::content::{Content, StoredObject};
use super::nats::NatsFiles;
#[cfg(feature = "s3")]
use super::s3::Bucket;
use crate::fleet::bucket::WriteOutcome;
use crate::fleet::error::{FleetError, Result};
use crate::fleet::link::Link;
use crate::jobs::random::random_bytes;

/// The key of [`FilesRecord`].
const RECORD: &str = "fleet.files";
/// The object that names the fleet whose files a bucket holds.
#[cfg(feature = "s3")]
const OWNER: &str = "fleet";

/// Where a fleet keeps its files.
#[derive(Debug, Serialize, Deserialize)]
struct FilesRecord {
    storage: String,
    /// The fleet's id: tells it apart from others that use the same bucket.
    fleet: String,
}

/// The files of a fleet. Errors are strings: the caller retries whatever they are.
pub(super) enum Storage {
    Nats(Box<NatsFiles>),
    #[cfg(feature = "s3")]
    S3(Bucket),
}

impl Storage {
    /// Opens the storage that the configuration names. All processes of a fleet must use the same one.
    pub(super) async fn open(link: &Link) -> Result<Storage> {
        let Some(config) = &link.config.s3 else {
            check_storage_record(link, "nats").await?;
            return Ok(Storage::Nats(Box::new(NatsFiles::open(link).await?)));
        };
        #[cfg(feature = "s3")]
        {
            let bucket = Bucket::open(config)?;
            let unusable = |error: String| {
                FleetError(format!("can't use the bucket `{}` for files: {error}", config.url))
            };
            bucket.check().await.map_err(unusable)?;
            let fleet = check_storage_record(link, config.url.trim_end_matches('/')).await?;
            // Files that no record names are deleted: two fleets with one bucket would delete each other's files.
            match bucket.get(OWNER).await.map_err(unusable)? {
                None => bucket.put(OWNER, fleet.into()).await.map_err(unusable)?,
                Some(owner) if owner == fleet.as_bytes() => {}
                Some(_) => {
                    let reason = format!(
                        "another fleet uses it (the object `{OWNER}` names it); choose another prefix"
                    );
                    return Err(unusable(reason));
                }
            }
            Ok(Storage::S3(bucket))
        }
        #[cfg(not(feature = "s3"))]
        Err(FleetError(format!(
            "can't use the bucket `{}` for files: this program was built without S3 (cargo feature `s3`)",
            config.url
        )))
    }

    pub(super) async fn get(&self, name: &str, hash: &[u8; 32]) -> std::result::Result<Content, String> {
        match self {
            Storage::Nats(files) => files.get(name, hash).await,
            #[cfg(feature = "s3")]
            Storage::S3(bucket) => {
                let found = bucket.get(name).await?;
                Ok(found.map_or(Content::Missing, |bytes| Content::checked(bytes, hash)))
            }
        }
    }

    /// Stores a file. One that was stored less than `fresh` ago may stay as it is: files are named by their content.
    pub(super) async fn put(
        &self,
        name: &str,
        hash: &[u8; 32],
        bytes: Bytes,
        fresh: Duration,
    ) -> std::result::Result<(), String> {
        match self {
            Storage::Nats(files) => files.put(name, hash, bytes, fresh).await,
            #[cfg(feature = "s3")]
            Storage::S3(bucket) => bucket.put(name, bytes).await,
        }
    }

    pub(super) async fn delete(&self, name: &str) -> std::result::Result<(), String> {
        match self {
            Storage::Nats(files) => files.delete(name).await,
            #[cfg(feature = "s3")]
            Storage::S3(bucket) => bucket.delete(name).await,
        }
    }

    /// All files.
    pub(super) async fn list(&self) -> std::result::Result<Vec<StoredObject>, String> {
        match self {
            Storage::Nats(files) => files.list().await,
            #[cfg(feature = "s3")]
            Storage::S3(bucket) => bucket.list().await,
        }
    }
}

/// Records where the files are, or compares with what the fleet's first process recorded. Returns the fleet's id.
async fn check_storage_record(link: &Link, storage: &str) -> Result<String> {
    let own = FilesRecord { storage: storage.to_owned(), fleet: hex(random_bytes::<16>()) };
    if let WriteOutcome::Revision(_) = link.create(RECORD, &own).await? {
        return Ok(own.fleet);
    }
    let entry = link.entry(RECORD).await?;
    let recorded = entry.and_then(|entry| serde_json::from_slice::<FilesRecord>(&entry.value).ok());
    let recorded = recorded.ok_or_else(|| FleetError(format!("the record `{RECORD}` can't be read")))?;
    if recorded.storage != storage {
        return Err(FleetError(format!(
            "this fleet keeps its files in `{}`, not in `{storage}`: start all its processes with the same --queue-files",
            recorded.storage
        )));
    }
    Ok(recorded.fleet)
}
