//! Runs of rows that are modulated for one noise level.

use kiln_ops::Groups;

/// The noise level that a row is modulated for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Now = 0,
    /// t = 0, for reference tokens that are being extracted.
    Still = 1,
}

/// Runs of rows at one level each.
#[derive(Default)]
pub(super) struct Runs(Vec<(Level, usize)>);

impl Runs {
    pub(super) fn push(&mut self, level: Level, rows: usize) {
        match self.0.last_mut() {
            _ if rows == 0 => {}
            Some((last, count)) if *last == level => *count += rows,
            _ => self.0.push((level, rows)),
        }
    }

    pub(super) fn any_still(&self) -> bool {
        self.0.iter().any(|(level, _)| *level == Level::Still)
    }

    /// The level of every run.
    pub(super) fn levels(&self) -> impl Iterator<Item = Level> {
        self.0.iter().map(|(level, _)| *level)
    }

    pub(super) fn groups(&self) -> Groups {
        Groups::of_lengths(&self.0.iter().map(|(_, rows)| *rows).collect::<Vec<_>>())
    }
}
