//! Messages on standard error. File names, metadata and recipes in them can't control the terminal.

use std::io::Write;

use kiln_base::printable;

/// Prints a message. If standard error is closed, nobody wants to know.
pub fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(text));
}
