//! Which rows of a tensor are modulated for which noise level.

use kiln_ops::RowGroups;

/// The noise level that a row is modulated for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum NoiseLevel {
    /// That of the step.
    Current = 0,
    /// t = 0, for reference tokens whose keys and values are being extracted.
    Clean = 1,
}

/// The noise level of every row, as runs of equal levels.
#[derive(Default)]
pub(super) struct RowLevels(Vec<(NoiseLevel, usize)>);

impl RowLevels {
    pub(super) fn push(&mut self, level: NoiseLevel, rows: usize) {
        if rows == 0 {
            return;
        }
        match self.0.last_mut() {
            Some((last, count)) if *last == level => *count += rows,
            _ => self.0.push((level, rows)),
        }
    }

    pub(super) fn has_clean(&self) -> bool {
        self.0.iter().any(|(level, _)| *level == NoiseLevel::Clean)
    }

    /// The level of each run.
    pub(super) fn levels(&self) -> impl Iterator<Item = NoiseLevel> {
        self.0.iter().map(|(level, _)| *level)
    }

    /// One group of rows per run.
    pub(super) fn groups(&self) -> RowGroups {
        RowGroups::from_lengths(&self.0.iter().map(|(_, rows)| *rows).collect::<Vec<_>>())
    }
}
