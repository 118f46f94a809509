use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::lines::{line, which};
use super::{Phase, Report};

/// A bar for each phase on standard error, with time left; what is over stays above.
pub(super) struct Bars {
    verbose: bool,
    bar: Option<ProgressBar>,
}

impl Bars {
    pub fn new(verbose: bool) -> Bars {
        Bars { verbose, bar: None }
    }

    pub fn report(&mut self, report: &Report<'_>) {
        match report {
            Report::Phase { phase } => self.begin(*phase),
            Report::Progress { done, total, what, .. } => self.advance(*done, *total, what),
            Report::StepStarted { picture, together, pictures, step, steps, sigma } => {
                let which = which(*picture, *together, *pictures);
                self.message(format!("{which}step {}/{steps} sigma {sigma:.3}", step + 1));
            }
            Report::PhaseDone { .. } => self.end(),
            // The bar has said it.
            Report::Step { .. } if !self.verbose => {}
            _ => {
                if let Some(line) = line(report, self.verbose) {
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
        // The first progress tells the true length.
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        bar.set_style(style("{prefix:>6} {bar:20.cyan/dim} {elapsed:>4}{left}  {wide_msg}"));
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
            bar.set_style(style("{prefix:>6} {bar:20.green/dim} {elapsed:>4}  {wide_msg}"));
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
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    // Before anything is done there is nothing to reckon from.
    let left = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        if state.pos() > 0 {
            let _ = write!(out, ", {} left", format_left(state.eta()));
        }
    };
    style.with_key("left", left).progress_chars("━━─")
}

/// `40s`, `3m 5s`, `2h 10m`
fn format_left(left: Duration) -> String {
    let seconds = left.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {}s", seconds / 60, seconds % 60),
        _ => format!("{}h {}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_told_in_the_two_units_that_matter() {
        let told = |seconds| format_left(Duration::from_secs(seconds));
        assert_eq!([told(0), told(59), told(61), told(7261)], ["0s", "59s", "1m 1s", "2h 1m"]);
    }
}
