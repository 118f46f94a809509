use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::lines::{line, which};
use super::{Phase, Told};

/// A bar for each phase on standard error, with time left; what is over stays above.
pub(super) struct Bars {
    verbose: bool,
    bar: Option<ProgressBar>,
}

impl Bars {
    pub fn new(verbose: bool) -> Bars {
        Bars { verbose, bar: None }
    }

    pub fn tell(&mut self, told: &Told<'_>) {
        match told {
            Told::Phase { phase } => self.begin(*phase),
            Told::Progress { done, total, what, .. } => self.advance(*done, *total, what),
            Told::StepStarted { picture, pictures, step, steps, sigma } => {
                let which = which(*picture, *pictures);
                self.message(format!("{which}step {}/{steps} sigma {sigma:.3}", step + 1));
            }
            Told::PhaseDone { .. } => self.end(),
            // The bar has said it.
            Told::Step { .. } if !self.verbose => {}
            _ => {
                if let Some(line) = line(told, self.verbose) {
                    self.print(&line);
                }
            }
        }
    }

    /// Takes an unfinished bar off the screen.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn begin(&mut self, phase: Phase) {
        self.end();
        // Without a length there is no time left to tell; the first progress gives one.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        bar.set_style(style("{prefix:>10} {bar:32.cyan/dim} {elapsed:>4}, {eta} left  {msg}"));
        bar.set_prefix(phase.to_string());
        bar.enable_steady_tick(Duration::from_millis(200));
        self.bar = Some(bar);
    }

    fn advance(&mut self, done: usize, total: usize, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        }
        if !what.is_empty() {
            self.message(what.to_owned());
        }
    }

    fn message(&mut self, text: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(text);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.set_position(bar.length().unwrap_or(0));
            bar.set_style(style("{prefix:>10} {bar:32.green/dim} {elapsed:>4}  {msg}"));
            bar.finish();
        }
    }

    fn print(&self, line: &str) {
        let write = || drop(writeln!(std::io::stderr(), "{line}"));
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are the two above; should one be wrong, a plain bar still does.
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━━─")
}
