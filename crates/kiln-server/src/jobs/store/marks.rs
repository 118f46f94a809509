//! Marks on images of the gallery: favourites, and the trash.

use rusqlite::{OptionalExtension, TransactionBehavior, params};

use super::images::delete_images;
use super::{Store, StoreError, now};

/// How long images stay in the trash, in milliseconds: a week.
pub(super) const TRASH_LIFETIME: i64 = 7 * 24 * 3600 * 1000;

/// Images that were moved to the trash before `?`.
pub(super) const OLD_TRASH: &str = "id IN (SELECT picture FROM marks WHERE trashed < ?)";

/// Changes of an image's marks; absent fields stay as they are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Marks {
    /// Whether it is a favourite. A full gallery keeps as many favourites as other images.
    pub(crate) favourite: Option<bool>,
    /// Whether it is in the trash. The trash is emptied after a week.
    pub(crate) trash: Option<bool>,
}

impl Store {
    /// Changes the marks of these images, all or none. Returns the first id that doesn't exist, if any.
    pub(crate) fn mark(&self, ids: &[String], marks: Marks) -> Result<Option<String>, StoreError> {
        let mut db = self.writer()?;
        let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for id in ids {
            let mut exists = transaction.prepare("SELECT 1 FROM pictures WHERE id = ?")?;
            if exists.query_row([id], |_| Ok(())).optional()?.is_none() {
                return Ok(Some(id.clone()));
            }
            transaction.execute("INSERT OR IGNORE INTO marks (picture) VALUES (?)", [id])?;
            if let Some(favourite) = marks.favourite {
                transaction
                    .execute("UPDATE marks SET favourite = ? WHERE picture = ?", params![favourite, id])?;
            }
            if let Some(trash) = marks.trash {
                let time = trash.then(now);
                transaction.execute("UPDATE marks SET trashed = ? WHERE picture = ?", params![time, id])?;
            }
        }
        transaction.commit()?;
        Ok(None)
    }

    /// Deletes images that lay in the trash long enough from the database; returns their files.
    pub(super) fn empty_trash(&self, now: i64) -> Result<Vec<String>, StoreError> {
        let before = now - TRASH_LIFETIME;
        self.transaction(|transaction| {
            let files = delete_images(transaction, OLD_TRASH, before)?;
            transaction.execute("DELETE FROM marks WHERE picture NOT IN (SELECT id FROM pictures)", [])?;
            Ok(files)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::store::{GalleryLimits, ImageQuery, ImageRow};

    #[test]
    fn the_trash_is_emptied_after_a_week_and_favourites_outlive_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let rows = ["a", "b", "c", "d"].map(ImageRow::test);
        rows.iter().for_each(|row| store.insert_image(row, None).unwrap());
        let ids = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let listed = |trash| {
            let query = ImageQuery { trash, limit: 9, ..ImageQuery::default() };
            store.search(&query).unwrap().0.into_iter().map(|row| row.id).collect::<String>()
        };
        let trash = Marks { trash: Some(true), ..Marks::default() };
        assert_eq!(store.mark(&ids(&["c", "none"]), trash).unwrap().as_deref(), Some("none"));
        assert_eq!(listed(true), "", "all or none");
        store.mark(&ids(&["c"]), trash).unwrap();
        store.mark(&ids(&["a"]), Marks { favourite: Some(true), ..Marks::default() }).unwrap();
        assert_eq!((listed(true), listed(false)), ("c".into(), "dba".into()));
        assert!(store.empty_trash(now()).unwrap().is_empty());
        assert_eq!(store.empty_trash(now() + TRASH_LIFETIME + 1000).unwrap(), ["c.png"]);
        store.clean_up(GalleryLimits { images: 1, bytes: None }).unwrap();
        assert_eq!(listed(false), "da");
        store.mark(&ids(&["d"]), Marks { favourite: Some(true), ..Marks::default() }).unwrap();
        store.clean_up(GalleryLimits { images: 1, bytes: None }).unwrap();
        assert_eq!(listed(false), "d", "as many favourites as other images, at most");
    }
}
