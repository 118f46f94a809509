//! The terminal: its size, and messages on standard error. File names, metadata and recipes in them can't control it.

use std::io::Write;
use std::sync::OnceLock;

use kiln_base::printable;

static ESCAPES: OnceLock<bool> = OnceLock::new();

/// Whether the terminal acts upon escape sequences, which consoles of Windows do only if they are asked to.
pub fn has_escapes() -> bool {
    *ESCAPES.get_or_init(|| {
        #[cfg(windows)]
        return kiln_windows::console::enable_escapes();
        #[cfg(not(windows))]
        true
    })
}

/// Whether the program has a window of its own, as after a double click: it closes with the program.
pub fn has_own_window() -> bool {
    #[cfg(windows)]
    return kiln_windows::console::is_own();
    #[cfg(not(windows))]
    false
}

/// Keeps a server running whose window somebody clicks into: consoles of Windows stop a program while text is selected.
pub fn ignore_clicks() {
    // Windows Terminal never stops a program.
    #[cfg(windows)]
    let _ = kiln_windows::console::ignore_clicks();
}

/// Keeps the program's own window open until its last words are read.
pub fn wait_for_enter() {
    tell("press Enter to close this window");
    let _ = std::io::stdin().read_line(&mut String::new());
}

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
