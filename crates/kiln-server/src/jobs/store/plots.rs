//! Plots: grids of jobs that differ in one or two settings.

use rusqlite::{Row, params};
use serde::{Deserialize, Serialize};

use super::{Store, StoreError};

/// Number of newest plots to keep. Their jobs and images stay.
const KEEP_PLOTS: u32 = 200;

/// A plot in the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlotRow {
    pub(crate) id: String,
    pub(crate) client: String,
    /// When it was submitted, in milliseconds since 1970.
    pub(crate) created: i64,
    /// Its axes, as JSON.
    pub(crate) axes: String,
    /// The ids of its jobs by row, as JSON.
    pub(crate) jobs: String,
}

const SELECT: &str = "SELECT id, client, created, axes, jobs FROM plots";

fn plot_row(row: &Row<'_>) -> rusqlite::Result<PlotRow> {
    Ok(PlotRow {
        id: row.get(0)?,
        client: row.get(1)?,
        created: row.get(2)?,
        axes: row.get(3)?,
        jobs: row.get(4)?,
    })
}

impl Store {
    pub(crate) fn insert_plot(&self, plot: &PlotRow) -> Result<(), StoreError> {
        let db = self.writer()?;
        db.execute(
            "INSERT OR REPLACE INTO plots (id, client, created, axes, jobs) VALUES (?, ?, ?, ?, ?)",
            params![plot.id, plot.client, plot.created, plot.axes, plot.jobs],
        )?;
        // Clients share the places, as those of images.
        db.execute(
            "DELETE FROM plots WHERE seq IN (SELECT seq FROM
             (SELECT seq, row_number() OVER (ORDER BY own, seq DESC) AS place FROM
              (SELECT seq, row_number() OVER (PARTITION BY client ORDER BY seq DESC) AS own FROM plots))
             WHERE place > ?)",
            [KEEP_PLOTS],
        )?;
        Ok(())
    }

    pub(crate) fn plot(&self, id: &str) -> Result<Option<PlotRow>, StoreError> {
        self.row(&format!("{SELECT} WHERE id = ?"), [id], plot_row)
    }

    /// The latest plots, newest first; of one client or of all.
    pub(crate) fn plots(&self, limit: u32, client: Option<&str>) -> Result<Vec<PlotRow>, StoreError> {
        let sql = format!("{SELECT} WHERE ?1 IS NULL OR client = ?1 ORDER BY seq DESC LIMIT ?2");
        self.rows(&sql, params![client, limit], plot_row)
    }
}
