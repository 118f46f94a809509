//! The display of one long task: a bar on a terminal, lines elsewhere, nothing if quiet.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressStyle};

use crate::cancel::before_exit;
use crate::terminal;

pub struct TaskDisplay {
    quiet: bool,
    bar: Option<ProgressBar>,
}

impl TaskDisplay {
    /// A display whose bar has this template of indicatif's.
    pub fn new(template: &str, quiet: bool) -> TaskDisplay {
        let style =
            || ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = (!quiet && stderr().is_terminal()).then(|| ProgressBar::new(1).with_style(style()));
        TaskDisplay { quiet, bar }
    }

    /// The bar, where there is one, at this position.
    pub fn advance(&self, done: u64, total: u64) -> Option<&ProgressBar> {
        let bar = self.bar.as_ref()?;
        bar.set_length(total);
        bar.set_position(done);
        Some(bar)
    }

    /// Prints a line above the bar, unless quiet.
    pub fn tell(&self, text: &str) {
        match &self.bar {
            _ if self.quiet => {}
            Some(bar) => bar.suspend(|| terminal::tell(text)),
            None => terminal::tell(text),
        }
    }

    /// Removes the bar also if a signal ends the process.
    pub fn finish_at_exit(&self) {
        if let Some(bar) = self.bar.clone() {
            before_exit(move || bar.finish_and_clear());
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
