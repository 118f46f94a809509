//! What the gallery keeps: a number of images, and optionally their bytes. Clients share it: who has the most loses first.

use super::images::delete_images;
use super::{Store, StoreError};

/// Limits of the gallery.
#[derive(Clone, Copy, Debug)]
pub struct GalleryLimits {
    /// Maximum number of images; of favourites, as many again.
    pub images: u32,
    /// Maximum bytes of all image files.
    pub bytes: Option<u64>,
}

/// Number of newest jobs to keep even without images.
const KEEP_JOBS: u32 = 1000;

/// Images beyond the first `?`, favourites and others counted apart: the place of an image among those of its client, and
/// by that its place among all.
const BEYOND_NUMBER: &str = "id IN (SELECT id FROM
     (SELECT id, row_number() OVER (PARTITION BY favourite ORDER BY own, seq DESC) AS place FROM
      (SELECT pictures.id, pictures.seq, coalesce(favourite, 0) AS favourite, row_number() OVER
       (PARTITION BY client, coalesce(favourite, 0) ORDER BY pictures.seq DESC) AS own
       FROM pictures LEFT JOIN jobs ON jobs.id = job LEFT JOIN marks ON picture = pictures.id))
     WHERE place > ?)";

/// Images beyond the first `?` bytes. The trash goes first; then, of the client with the most bytes, the oldest images, and
/// favourites last.
const BEYOND_BYTES: &str = "id IN (SELECT id FROM
     (SELECT id, sum(bytes) OVER (ORDER BY trash, own, seq DESC ROWS UNBOUNDED PRECEDING) AS total FROM
      (SELECT pictures.id, pictures.seq, bytes, trashed IS NOT NULL AS trash, sum(bytes) OVER
       (PARTITION BY client, trashed IS NOT NULL ORDER BY coalesce(favourite, 0) DESC, pictures.seq DESC
        ROWS UNBOUNDED PRECEDING) AS own
       FROM pictures LEFT JOIN jobs ON jobs.id = job LEFT JOIN marks ON picture = pictures.id))
     WHERE total > ?)";

/// Jobs without images beyond the first `?`.
const OLD_JOBS: &str = "state IN ('done', 'failed', 'cancelled')
     AND seq IN (SELECT seq FROM
      (SELECT seq, row_number() OVER (ORDER BY own, seq DESC) AS place FROM
       (SELECT seq, row_number() OVER (PARTITION BY client ORDER BY seq DESC) AS own FROM jobs))
      WHERE place > ?)
     AND NOT EXISTS (SELECT 1 FROM pictures WHERE pictures.job = jobs.id)";

/// The ids of images and of jobs beyond the limits.
pub(super) fn beyond(
    db: &rusqlite::Connection,
    limits: GalleryLimits,
) -> Result<(Vec<String>, Vec<String>), StoreError> {
    let ids = |table: &str, condition: &str, value: i64| -> Result<Vec<String>, StoreError> {
        let mut query = db.prepare(&format!("SELECT id FROM {table} WHERE {condition}"))?;
        Ok(query.query_map([value], |row| row.get(0))?.collect::<Result<_, _>>()?)
    };
    let mut images = ids("pictures", BEYOND_NUMBER, limits.images.into())?;
    if let Some(bytes) = limits.bytes {
        images.extend(ids("pictures", BEYOND_BYTES, i64::try_from(bytes).unwrap_or(i64::MAX))?);
    }
    images.extend(ids("pictures", super::marks::OLD_TRASH, super::now() - super::marks::TRASH_LIFETIME)?);
    Ok((images, ids("jobs", OLD_JOBS, KEEP_JOBS.into())?))
}

impl Store {
    /// Deletes images beyond the limits, and old jobs without images, from the database; returns the files of the images.
    pub(super) fn delete_beyond(&self, limits: GalleryLimits) -> Result<Vec<String>, StoreError> {
        self.transaction(|transaction| {
            let mut files = delete_images(transaction, BEYOND_NUMBER, limits.images.into())?;
            if let Some(bytes) = limits.bytes {
                let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
                files.extend(delete_images(transaction, BEYOND_BYTES, bytes)?);
            }
            transaction.execute(&format!("DELETE FROM jobs WHERE {OLD_JOBS}"), [KEEP_JOBS])?;
            Ok(files)
        })
    }

    /// Whether the image files have more bytes than they may.
    pub(super) fn is_too_large(&self, limits: GalleryLimits) -> Result<bool, StoreError> {
        let Some(limit) = limits.bytes else { return Ok(false) };
        let sum = "SELECT coalesce(sum(bytes), 0) FROM pictures";
        let bytes: i64 = self.reader().query_row(sum, [], |row| row.get(0))?;
        Ok(u64::try_from(bytes).is_ok_and(|bytes| bytes > limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::store::{ImageQuery, ImageRow, Marks};

    #[test]
    fn bytes_are_bounded_trash_first_and_favourites_last() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        for id in ["a", "b", "c", "d", "e"] {
            store.insert_image(&ImageRow { bytes: 100, ..ImageRow::test(id) }, None).unwrap();
        }
        let listed = |trash| {
            let query = ImageQuery { trash, limit: 9, ..ImageQuery::default() };
            store.search(&query).unwrap().0.into_iter().map(|row| row.id).collect::<String>()
        };
        store.mark(&["a".into()], Marks { favourite: Some(true), ..Marks::default() }).unwrap();
        store.mark(&["e".into()], Marks { trash: Some(true), ..Marks::default() }).unwrap();
        let limits = |bytes| GalleryLimits { images: 9, bytes };
        for (bytes, left, trash) in [
            (None, "dcba", "e"),
            (Some(500), "dcba", "e"),
            (Some(499), "dcba", ""),
            (Some(399), "dca", ""),
            (Some(200), "da", ""),
            (Some(199), "a", ""),
            (Some(99), "", ""),
        ] {
            assert_eq!(store.is_too_large(limits(bytes)).unwrap(), bytes.is_some_and(|bytes| bytes != 500));
            store.clean_up(limits(bytes)).unwrap();
            assert_eq!((listed(false).as_str(), listed(true).as_str()), (left, trash), "{bytes:?}");
        }
    }
}
