//! The terminal: its size, and messages on standard error. File names, metadata and recipes in them can't control it.

use std::io::Write;

use kiln_base::printable;

/// Prints a message. If standard error is closed, nobody wants to know.
pub fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(text));
}

/// Returns the columns and rows of the terminal.
pub fn size() -> (u32, u32) {
    let size = terminal_size::terminal_size().map(|(columns, rows)| (columns.0.into(), rows.0.into()));
    // A size of 0 is unknown.
    size.filter(|size| *size > (1, 1)).unwrap_or((80, 25))
}
