//! The gallery: every image that was made and not deleted.

use kiln_engine::Request;
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};
use serde::Serialize;
use utoipa::ToSchema;

use super::{Store, StoreError, json, request_from};

/// An image as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct PictureRow {
    /// Its name: its job's and its number.
    pub id: String,
    /// The job it was made for.
    pub job: String,
    /// Its number in the job, from 0.
    pub number: u32,
    /// When it was made, in milliseconds since 1970.
    pub created: i64,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Its seed, as text: it may be larger than a script's numbers.
    pub seed: Option<String>,
    /// Its file's name.
    #[serde(skip)]
    pub file: String,
    /// Its file's size.
    pub bytes: u64,
    /// Its prompt: one of the job's.
    pub prompt: String,
    /// The model that made it.
    pub model: String,
    /// What the job asks for.
    #[serde(rename = "order")]
    pub request: Request,
    /// How it was made, as JSON in a string.
    #[serde(skip)]
    pub recipe: String,
}

/// Which images.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Words that all occur in the prompt, the model's name or the seed.
    pub words: String,
    /// Only images older than the one of this name.
    pub before: Option<String>,
    /// How many at most.
    pub most: u32,
}

const SELECT: &str = "SELECT id, job, number, created, width, height, seed, file, bytes, prompt, model, request, recipe FROM pictures";

fn picture_row(row: &Row<'_>) -> rusqlite::Result<PictureRow> {
    Ok(PictureRow {
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
        request: request_from(&row.get::<_, String>(11)?),
        recipe: row.get(12)?,
    })
}

impl PictureRow {
    pub(super) fn insert(&self, db: &Connection) -> rusqlite::Result<usize> {
        db.execute(
            "INSERT OR REPLACE INTO pictures
             (id, job, number, created, width, height, seed, file, bytes, prompt, model, request, recipe)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                self.id,
                self.job,
                self.number,
                self.created,
                self.width,
                self.height,
                self.seed,
                self.file,
                self.bytes as i64,
                self.prompt,
                self.model,
                json(&self.request),
                self.recipe
            ],
        )
    }
}

impl Store {
    /// The image of this name.
    pub fn picture(&self, id: &str) -> Result<Option<PictureRow>, StoreError> {
        let db = self.db();
        let mut query = db.prepare(&format!("{SELECT} WHERE id = ?"))?;
        Ok(query.query_row([id], picture_row).optional()?)
    }

    /// The images of a job.
    pub fn pictures_of(&self, job: &str) -> Result<Vec<PictureRow>, StoreError> {
        let db = self.db();
        let mut query = db.prepare(&format!("{SELECT} WHERE job = ? ORDER BY number"))?;
        Ok(query.query_map([job], picture_row)?.collect::<Result<_, _>>()?)
    }

    /// Images that match, newest first.
    pub fn search(&self, search: &Search) -> Result<Vec<PictureRow>, StoreError> {
        let words: Vec<String> =
            search.words.split_whitespace().take(16).map(|word| format!("%{}%", escape(word))).collect();
        let mut sql = format!("{SELECT} WHERE 1");
        let mut values: Vec<&dyn ToSql> = Vec::new();
        for word in &words {
            sql += " AND (prompt LIKE ? ESCAPE '\\' OR model LIKE ? ESCAPE '\\' OR seed LIKE ? ESCAPE '\\')";
            values.extend([word as &dyn ToSql; 3]);
        }
        if let Some(before) = &search.before {
            sql += " AND seq < (SELECT seq FROM pictures WHERE id = ?)";
            values.push(before);
        }
        sql += " ORDER BY seq DESC LIMIT ?";
        values.push(&search.most);
        let db = self.db();
        let mut query = db.prepare(&sql)?;
        Ok(query.query_map(&values[..], picture_row)?.collect::<Result<_, _>>()?)
    }

    /// How many images there are.
    pub fn count_pictures(&self) -> Result<u64, StoreError> {
        Ok(self.db().query_row("SELECT count(*) FROM pictures", [], |row| row.get::<_, i64>(0))?.max(0)
            as u64)
    }

    /// Removes an image and its files; whether there was one.
    pub fn delete_picture(&self, id: &str) -> Result<bool, StoreError> {
        let Some(picture) = self.picture(id)? else { return Ok(false) };
        // Files first: on a full disk the database needs the room that they take.
        self.remove_files(&picture.file);
        self.db().execute("DELETE FROM pictures WHERE id = ?", [id])?;
        Ok(true)
    }

    /// Forgets all but the newest images, and jobs without any; returns the files that are no longer needed.
    pub(super) fn forget_beyond(&self, keep: u32) -> Result<Vec<String>, StoreError> {
        /// Jobs without images that are remembered.
        const JOBS: u32 = 1000;
        let mut db = self.db();
        let transaction = db.transaction()?;
        let beyond = "seq <= (SELECT seq FROM pictures ORDER BY seq DESC LIMIT 1 OFFSET ?)";
        let gone = {
            let mut query = transaction.prepare(&format!("SELECT file FROM pictures WHERE {beyond}"))?;
            query.query_map([keep], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?
        };
        transaction.execute(&format!("DELETE FROM pictures WHERE {beyond}"), [keep])?;
        transaction.execute(
            "DELETE FROM jobs WHERE state IN ('done', 'failed', 'cancelled')
             AND seq <= (SELECT seq FROM jobs ORDER BY seq DESC LIMIT 1 OFFSET ?)
             AND NOT EXISTS (SELECT 1 FROM pictures WHERE pictures.job = jobs.id)",
            [JOBS],
        )?;
        transaction.commit()?;
        Ok(gone)
    }
}

/// `LIKE` without its wildcards.
fn escape(word: &str) -> String {
    word.replace('\\', r"\\").replace('%', r"\%").replace('_', r"\_")
}
