//! Progress as bars on a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use kiln_base::printable_line;

use super::lines::{image_label, line};
use super::{Phase, ProgressEvent};
use crate::terminal;
use crate::values::duration;

/// Shows a bar with the time left for each phase on standard error; bars of finished phases stay above it.
pub(super) struct ProgressBars {
    verbose: bool,
    bar: Option<ProgressBar>,
    /// The tile in progress, for the step's message.
    tile: String,
    /// Lines printed since an image was drawn.
    lines: u32,
}

impl ProgressBars {
    pub fn new(verbose: bool) -> ProgressBars {
        ProgressBars { verbose, bar: None, tile: String::new(), lines: 0 }
    }

    pub fn report(&mut self, event: &ProgressEvent<'_>) {
        match event {
            ProgressEvent::Phase { phase } => self.begin(*phase),
            ProgressEvent::Progress { done, total, what, .. } => self.advance(*done, *total, what),
            ProgressEvent::StepStarted { image, batch, images, step, steps, sigma } => {
                let label = image_label(*image, *batch, *images) + &self.tile;
                self.message(format!("{label}step {}/{steps} sigma {sigma:.3}", step + 1));
            }
            ProgressEvent::Tile { tile, tiles, .. } => self.tile = format!("tile {tile}/{tiles} "),
            ProgressEvent::PhaseDone { .. } => self.end(),
            // The bar shows the step already.
            ProgressEvent::Step { .. } if !self.verbose => {}
            _ => {
                if let Some(line) = line(event, self.verbose) {
                    self.print(&line);
                }
            }
        }
    }

    /// Draws an image above the bar; see [`Reporter::draw`](super::Reporter::draw).
    pub fn draw(&mut self, draw: impl FnOnce(u32) -> bool) {
        let is_new = match &self.bar {
            Some(bar) => bar.suspend(|| draw(self.lines)),
            None => draw(self.lines),
        };
        if is_new {
            self.lines = 0;
        }
    }

    /// Removes an unfinished bar from the screen.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn begin(&mut self, phase: Phase) {
        self.end();
        // The first progress event sets the true length.
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
            bar.set_message(printable_line(&text).into_owned());
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.set_position(bar.length().unwrap_or(0));
            bar.set_style(style("{prefix:>6} {bar:20.green/dim} {elapsed:>4}  {wide_msg}"));
            bar.finish();
            self.lines += 1;
        }
    }

    fn print(&mut self, line: &str) {
        self.lines += (line.chars().count() as u32).div_ceil(terminal::size().0).max(1);
        let write = || terminal::tell(line);
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    // The first unit must be done before the time left can be estimated.
    let left = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        if state.pos() > 0 {
            let _ = write!(out, ", {} left", duration(state.eta()));
        }
    };
    style.with_key("left", left).progress_chars("━━─")
}
