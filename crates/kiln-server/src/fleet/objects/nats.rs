//! Files in NATS' object store.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::time::{Duration, SystemTime};

use async_nats::HeaderMap;
use async_nats::header::NATS_ROLLUP;
use async_nats::jetstream::Context;
use async_nats::jetstream::object_store::{
    self, GetErrorKind, ObjectInfo, ObjectMetadata, ObjectOptions, ObjectStore,
};
use async_nats::jetstream::stream::Stream;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE;
use bytes::Bytes;
use futures_util::StreamExt;
use kiln_base::hex;
use tokio::io::AsyncReadExt;

use super::content::{Content, StoredObject, age};
use crate::fleet::connect::restore_stream;
use crate::fleet::error::{Result, failed};
use crate::fleet::link::Link;
use crate::jobs::random::random_bytes;

/// Bytes of a message. Few large ones are faster; by default servers refuse more than 1 MiB.
const CHUNK: usize = 512 << 10;

/// The object store of a fleet.
pub(super) struct NatsFiles {
    store: ObjectStore,
    /// The stream behind it.
    stream: Stream,
    jetstream: Context,
    bucket: String,
}

impl NatsFiles {
    /// Opens the store; creates it if it is missing.
    pub(super) async fn open(link: &Link) -> Result<NatsFiles> {
        let (jetstream, bucket) =
            (link.jetstream.clone(), format!("{}_FILES", link.config.prefix.to_uppercase()));
        let store = match jetstream.get_object_store(&bucket).await {
            Ok(store) => store,
            Err(_) => {
                let config = object_store::Config {
                    bucket: bucket.clone(),
                    description: Some("Kiln's inputs and images".into()),
                    num_replicas: link.config.replicas,
                    ..object_store::Config::default()
                };
                let created = jetstream.create_object_store(config).await;
                created.map_err(|error| failed("can't create the object store")(&error))?
            }
        };
        let stream = jetstream.get_stream(format!("OBJ_{bucket}")).await;
        let stream = stream.map_err(|error| failed("can't open the object store")(&error))?;
        Ok(NatsFiles { store, stream, jetstream, bucket })
    }

    pub(super) async fn get(&self, name: &str, hash: &[u8; 32]) -> std::result::Result<Content, String> {
        let mut found = match self.store.get(name).await {
            Ok(found) => found,
            Err(error) if error.kind() == GetErrorKind::NotFound => return Ok(Content::Missing),
            Err(error) => return Err(error.to_string()),
        };
        let mut bytes = Vec::with_capacity(found.info().size);
        match found.read_to_end(&mut bytes).await {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::InvalidData => return Ok(Content::Wrong),
            Err(error) => return Err(error.to_string()),
        }
        // The client has compared the content with this digest.
        if found.info().digest == Some(digest(hash)) {
            return Ok(Content::Right(bytes));
        }
        Ok(Content::checked(bytes, hash))
    }

    /// Stores a file, unless it was stored less than `fresh` ago: files are named by their content.
    pub(super) async fn put(
        &self,
        name: &str,
        hash: &[u8; 32],
        bytes: Bytes,
        fresh: Duration,
    ) -> std::result::Result<(), String> {
        let known = self.store.info(name).await.ok().filter(|info| !info.deleted);
        let Some(known) = known else {
            let stored = self.put_new(name, hash, bytes).await;
            if stored.is_err() {
                // The next try may find a store.
                restore_stream(&self.jetstream, &self.stream).await.map_err(|error| error.to_string())?;
            }
            return stored;
        };
        if known.size == bytes.len() && age(known.modified) < fresh {
            return Ok(());
        }
        let chunk_size = Some(CHUNK);
        let metadata = ObjectMetadata { name: name.into(), chunk_size, ..ObjectMetadata::default() };
        self.store.put(metadata, &mut &*bytes).await.map(|_| ()).map_err(|error| error.to_string())
    }

    /// Stores a new file as [`ObjectStore::put`] does, but faster: the digest is known, and chunks are sent without
    /// waiting for each other.
    async fn put_new(&self, name: &str, hash: &[u8; 32], bytes: Bytes) -> std::result::Result<(), String> {
        let id = hex(random_bytes::<11>());
        let subject = format!("$O.{}.C.{id}", self.bucket);
        let mut sent = Vec::new();
        for start in (0..bytes.len()).step_by(CHUNK) {
            let chunk = bytes.slice(start..bytes.len().min(start + CHUNK));
            let published = self.jetstream.publish(subject.clone(), chunk).await;
            sent.push(published.map_err(|error| error.to_string())?);
        }
        let chunks = sent.len();
        for stored in sent {
            stored.await.map_err(|error| error.to_string())?;
        }
        let info = ObjectInfo {
            name: name.to_owned(),
            description: None,
            metadata: HashMap::new(),
            headers: None,
            options: Some(ObjectOptions { link: None, max_chunk_size: Some(CHUNK) }),
            bucket: self.bucket.clone(),
            nuid: id,
            size: bytes.len(),
            chunks,
            modified: Some(SystemTime::now().into()),
            digest: Some(digest(hash)),
            deleted: false,
        };
        let info = serde_json::to_vec(&info).map_err(|error| error.to_string())?;
        let subject = format!("$O.{}.M.{}", self.bucket, BASE64_URL_SAFE.encode(name));
        let mut headers = HeaderMap::new();
        headers.insert(NATS_ROLLUP, "sub");
        let published = self.jetstream.publish_with_headers(subject, headers, info.into()).await;
        published.map_err(|error| error.to_string())?.await.map(|_| ()).map_err(|error| error.to_string())
    }

    pub(super) async fn delete(&self, name: &str) -> std::result::Result<(), String> {
        self.store.delete(name).await.map_err(|error| error.to_string())
    }

    pub(super) async fn list(&self) -> std::result::Result<Vec<StoredObject>, String> {
        let mut found = self.store.list().await.map_err(|error| error.to_string())?;
        let mut objects = Vec::new();
        while let Some(info) = found.next().await {
            let info = info.map_err(|error| error.to_string())?;
            objects.push(StoredObject { name: info.name, age: age(info.modified) });
        }
        Ok(objects)
    }
}

/// A hash as the object store writes it.
fn digest(hash: &[u8; 32]) -> String {
    format!("SHA-256={}", BASE64_URL_SAFE.encode(hash))
}
