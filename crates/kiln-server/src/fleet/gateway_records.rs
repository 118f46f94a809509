//! What the clients of a gateway have besides jobs, as records of the queue.

use kiln_base::hex;
use serde::Serialize;

use super::gateway::Gateway;
use super::records::{InputRecord, MarkRecord};
use crate::jobs::roles::Keeping;
use crate::jobs::sessions::Session;
use crate::jobs::store::{Claim, FileKind, Files, InputFiles, Marks, PlotRow, StoreError, now};

type Result<T> = std::result::Result<T, StoreError>;

impl Gateway {
    /// Writes a record and waits until the replica has it.
    fn put(&self, key: &str, value: &impl Serialize) -> Result<()> {
        let revision = self.link.wait(self.link.put(key, value))?;
        Ok(self.replica.wait_for(revision)?)
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.link.wait(self.link.delete(key))?;
        Ok(self.replica.catch_up(&self.link)?)
    }

    fn touch_sized(&self, name: &str, client: &str, bytes: u64) -> Result<()> {
        let hash = InputFiles::hash(name);
        let record = InputRecord { hash: hash.to_owned(), client: client.to_owned(), bytes, used: now() };
        self.put(&InputRecord::record_key(hash, client), &record)
    }
}

impl Keeping for Gateway {
    fn delete_image(&self, id: &str) -> Result<bool> {
        let Some(image) = self.jobs.store.image(id)? else { return Ok(false) };
        if !self.jobs.store.is_file_shared(&image.file)? {
            self.files.remove(FileKind::Image, &image.file);
        }
        self.delete(&format!("image.{id}"))?;
        Ok(true)
    }

    fn mark(&self, ids: &[String], marks: Marks) -> Result<Option<String>> {
        let mut changes = Vec::new();
        for id in ids {
            let Some(image) = self.jobs.store.image(id)? else { return Ok(Some(id.clone())) };
            let favourite = marks.favourite.unwrap_or(image.favourite);
            let trashed = marks.trash.map_or(image.trashed, |trash| trash.then(now));
            changes.push((format!("mark.{id}"), MarkRecord { favourite, trashed }));
        }
        for (key, record) in changes {
            self.put(&key, &record)?;
        }
        Ok(None)
    }

    fn insert_plot(&self, plot: &PlotRow) -> Result<()> {
        self.put(&format!("plot.{}", plot.id), plot)
    }

    fn insert_session(&self, session: &Session) -> Result<()> {
        self.put(&format!("session.{}", hex(session.hash)), session)
    }

    fn delete_session(&self, session: &Session) -> Result<()> {
        self.delete(&format!("session.{}", hex(session.hash)))
    }

    fn remove_webhook(&self, job: &str) -> Result<()> {
        self.change(job, |job| job.webhook.take().is_some())
    }

    fn claim_input(&self, name: &str, client: &str, bytes: u64, quota: u64) -> Result<Claim> {
        // The replica decides; what it grants and evicts is written to the queue, for all gateways.
        let claim = self.jobs.store.inputs().claim(name, client, bytes, quota)?;
        if let Claim::Granted { evicted } = &claim {
            for name in evicted {
                self.delete(&InputRecord::record_key(InputFiles::hash(name), client))?;
                self.files.remove(FileKind::Input, InputFiles::hash(name));
            }
            self.touch_sized(name, client, bytes)?;
        }
        Ok(claim)
    }

    fn touch_input(&self, name: &str, client: &str) -> Result<()> {
        let hash = InputFiles::hash(name);
        let size = self.files.path(FileKind::Input, hash)?.and_then(|path| path.metadata().ok());
        self.touch_sized(name, client, size.map_or(0, |metadata| metadata.len()))
    }
}
