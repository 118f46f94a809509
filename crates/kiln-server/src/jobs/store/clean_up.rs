//! Deletes what is not kept: images beyond the limits, inputs that no job uses, leftovers of interrupted writes.

use std::fs::{self, DirEntry};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::{GalleryLimits, Store, StoreError, now};

/// How long unfinished files, and uploaded images that no job uses, are kept.
const MAX_UNUSED_AGE: Duration = Duration::from_secs(6 * 3600);

impl Store {
    /// Deletes images beyond the limits, images that lay in the trash long enough, old jobs without images, inputs that no
    /// job uses, and leftovers of interrupted writes.
    pub fn clean_up(&self, limits: GalleryLimits) -> Result<(), StoreError> {
        for file in self.delete_beyond(limits)?.into_iter().chain(self.empty_trash(now())?) {
            self.remove_files(&file);
        }
        for entry in entries(&self.folder.join("inputs")).filter(is_old) {
            let hash = entry.file_name().to_string_lossy().into_owned();
            if !self.is_input_used(&hash)? {
                let _ = fs::remove_file(entry.path());
                self.inputs().release(&hash)?;
            }
        }
        for entry in entries(&self.folder.join("pictures")).filter(is_unfinished).filter(is_old) {
            let _ = fs::remove_file(entry.path());
        }
        Ok(())
    }

    /// Calls [`Store::clean_up`] on every 32nd call, and if the image files are too large.
    pub(crate) fn clean_up_occasionally(&self, limits: GalleryLimits) -> Result<(), StoreError> {
        const CALLS: u32 = 32;
        let is_due = self.clean_up_calls.fetch_add(1, Relaxed).is_multiple_of(CALLS);
        if is_due || self.is_too_large(limits)? {
            self.clean_up(limits)?;
        }
        Ok(())
    }

    fn is_input_used(&self, input: &str) -> Result<bool, StoreError> {
        let db = self.reader();
        let mut query = db.prepare("SELECT 1 FROM job_inputs WHERE input = ? LIMIT 1")?;
        Ok(query.exists([input])?)
    }
}

/// The entries of a folder; none if it can't be read.
fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

fn is_old(entry: &DirEntry) -> bool {
    let modified = entry.metadata().and_then(|metadata| metadata.modified()).ok();
    modified.and_then(|time| time.elapsed().ok()).is_some_and(|age| age > MAX_UNUSED_AGE)
}

/// Whether a file is the leftover of an interrupted write. Earlier versions wrote to `.part` files.
fn is_unfinished(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    let name = name.to_string_lossy();
    name.ends_with(".part") || (name.starts_with(".kiln-") && name.ends_with(".tmp"))
}
