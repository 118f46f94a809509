//! The gallery: all generated images that were not deleted.

use kiln_engine::Request;
use rusqlite::{Row, ToSql, Transaction, params};
use serde::Serialize;

use super::jobs::{ListBudget, parse_request, to_json};
use super::{Store, StoreError};

/// A generated image.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ImageRow {
    /// Its id: the job's id and its number.
    pub id: String,
    /// The id of its job.
    pub job: String,
    /// Its number in the job, from 0.
    pub number: u32,
    /// When it was generated, in milliseconds since 1970.
    pub created: i64,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Its seed, as a string: it may be too large for JavaScript's numbers.
    pub seed: Option<String>,
    /// The name of its file.
    #[serde(skip)]
    pub file: String,
    /// The size of its file in bytes.
    pub bytes: u64,
    /// Its prompt: one of the job's prompts.
    pub prompt: String,
    /// The model that generated it.
    pub model: String,
    /// The job's request.
    pub request: Request,
    /// Its recipe: every setting it was generated with, as JSON.
    #[serde(skip)]
    pub recipe: String,
    /// Whether it is marked as a favourite.
    pub favourite: bool,
    /// When it was moved to the trash, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trashed: Option<i64>,
}

#[cfg(test)]
impl ImageRow {
    /// An image for the tests of the store.
    pub(crate) fn test(id: &str) -> ImageRow {
        ImageRow {
            id: id.into(),
            job: "job".into(),
            number: 0,
            created: 0,
            width: 1,
            height: 1,
            seed: None,
            file: format!("{id}.png"),
            bytes: 0,
            prompt: String::new(),
            model: String::new(),
            request: Request::default(),
            recipe: String::new(),
            favourite: false,
            trashed: None,
        }
    }
}

/// A query of the gallery.
#[derive(Clone, Debug, Default)]
pub struct ImageQuery {
    /// Words that all occur in the prompt, the model's name or the seed.
    pub words: String,
    /// Only images older than the one with this id.
    pub before: Option<String>,
    /// Only favourites.
    pub favourites: bool,
    /// Only images in the trash, instead of only those that are not.
    pub trash: bool,
    /// Maximum number of results, at least 1.
    pub limit: u32,
    /// Only images of this client's jobs.
    pub client: Option<String>,
}

/// What a search looks through: linear in its length for every word, where `LIKE` is not.
const SEARCHED: &str = "lower(prompt || char(10) || model || char(10) || coalesce(seed, ''))";

const SELECT: &str = "SELECT id, job, number, created, width, height, seed, file, bytes, prompt, model, request, recipe, favourite, trashed FROM pictures LEFT JOIN marks ON picture = id";

fn image_row(row: &Row<'_>) -> rusqlite::Result<ImageRow> {
    Ok(ImageRow {
        id: row.get(0)?,
        job: row.get(1)?,
        number: row.get(2)?,
        created: row.get(3)?,
        width: row.get(4)?,
        height: row.get(5)?,
        seed: row.get(6)?,
        file: row.get(7)?,
        bytes: row.get::<_, i64>(8)?.max(0) as u64,
        prompt: row.get(9)?,
        model: row.get(10)?,
        request: parse_request(row.get_ref(11)?).unwrap_or_default(),
        recipe: row.get(12)?,
        favourite: row.get::<_, Option<bool>>(13)?.unwrap_or(false),
        trashed: row.get(14)?,
    })
}

impl Store {
    /// Stores an image, in place of one with the same id; at the end of the gallery, or at this place.
    pub(crate) fn insert_image(&self, image: &ImageRow, place: Option<i64>) -> Result<(), StoreError> {
        self.execute(
            "INSERT OR REPLACE INTO pictures
             (seq, id, job, number, created, width, height, seed, file, bytes, prompt, model, request, recipe)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                place,
                image.id,
                image.job,
                image.number,
                image.created,
                image.width,
                image.height,
                image.seed,
                image.file,
                image.bytes as i64,
                image.prompt,
                image.model,
                to_json(&image.request),
                image.recipe
            ],
        )
    }

    /// The image with this id.
    pub fn image(&self, id: &str) -> Result<Option<ImageRow>, StoreError> {
        self.row(&format!("{SELECT} WHERE id = ?"), [id], image_row)
    }

    /// The images of a job.
    pub fn images_of(&self, job: &str) -> Result<Vec<ImageRow>, StoreError> {
        self.rows(&format!("{SELECT} WHERE job = ? ORDER BY number"), [job], image_row)
    }

    /// The images that match a query, newest first, and whether there are more.
    pub fn search(&self, query: &ImageQuery) -> Result<(Vec<ImageRow>, bool), StoreError> {
        let words: Vec<String> =
            query.words.split_whitespace().take(16).map(str::to_ascii_lowercase).collect();
        let place = if query.trash { "trashed IS NOT NULL" } else { "trashed IS NULL" };
        let mut sql = format!("{SELECT} WHERE {place}");
        if query.favourites {
            sql += " AND favourite";
        }
        let mut values: Vec<&dyn ToSql> = Vec::new();
        for word in &words {
            sql += &format!(" AND instr({SEARCHED}, ?)");
            values.push(word);
        }
        if let Some(client) = &query.client {
            sql += " AND job IN (SELECT id FROM jobs WHERE client = ?)";
            values.push(client);
        }
        if let Some(before) = &query.before {
            sql += " AND seq < (SELECT seq FROM pictures WHERE id = ?)";
            values.push(before);
        }
        sql += " ORDER BY seq DESC LIMIT ?";
        let limit = query.limit.saturating_add(1);
        values.push(&limit);
        let db = self.reader();
        let mut statement = db.prepare(&sql)?;
        let mut rows = statement.query(&values[..])?;
        let (mut images, mut budget) = (Vec::new(), ListBudget::default());
        while let Some(row) = rows.next()? {
            if images.len() == query.limit as usize || !budget.take(row.get_ref(11)?) {
                return Ok((images, true));
            }
            images.push(image_row(row)?);
        }
        Ok((images, false))
    }

    /// The number of images.
    pub fn count_images(&self) -> Result<u64, StoreError> {
        Ok(self.reader().query_row("SELECT count(*) FROM pictures", [], |row| row.get::<_, i64>(0))?.max(0)
            as u64)
    }

    /// Deletes the rows of a job's images, not their files: another attempt writes them again.
    pub(crate) fn delete_images_of(&self, job: &str) -> Result<(), StoreError> {
        self.execute("DELETE FROM pictures WHERE job = ?", [job])
    }

    /// Deletes an image and its files; returns whether it existed.
    pub fn delete_image(&self, id: &str) -> Result<bool, StoreError> {
        let Some(image) = self.image(id)? else { return Ok(false) };
        // Files first: on a full disk the database needs the space they free.
        self.remove_files(&image.file);
        self.execute("DELETE FROM pictures WHERE id = ?", [id])?;
        Ok(true)
    }
}

/// Deletes the images that a condition with one value describes; returns their files.
pub(super) fn delete_images(
    transaction: &Transaction<'_>,
    condition: &str,
    value: i64,
) -> Result<Vec<String>, StoreError> {
    let files = {
        let mut query = transaction.prepare(&format!("SELECT file FROM pictures WHERE {condition}"))?;
        query.query_map([value], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?
    };
    transaction.execute(&format!("DELETE FROM pictures WHERE {condition}"), [value])?;
    Ok(files)
}
