//! Progress of `kiln generate`: bars on a terminal, plain lines elsewhere, JSON events with `--json`. Other commands have
//! a [`TaskDisplay`].

mod bars;
mod event;
mod lines;
mod task;

use std::io::{IsTerminal, Write};
use std::time::Instant;

use kiln_engine::Event;

use crate::args::GenerateArgs;
use crate::error::CliError;
use crate::terminal;
use bars::ProgressBars;
pub use event::{Phase, ProgressEvent};
use lines::ProgressLines;
pub use task::TaskDisplay;

/// Components to load, the length of the loading bar: tokenizer, text encoder, transformer, VAE.
const COMPONENTS: usize = 4;

/// How events are shown.
enum Display {
    Silent,
    Lines(ProgressLines),
    Bars(Box<ProgressBars>),
    Json { every_block: bool },
}

/// Turns the engine's events into progress events and shows them.
pub struct Reporter {
    display: Display,
    began: Instant,
    phase: Option<(Phase, Instant)>,
    components: usize,
    images: usize,
    /// Transformer calls per step: two with guidance.
    calls: usize,
    step_start: Instant,
    sigma: f32,
    steps: usize,
    blocks: usize,
    write_error: Option<std::io::Error>,
    /// The tile in progress of an image that is upscaled, and the number of its tiles.
    tile: Option<(usize, usize)>,
}

impl Reporter {
    pub fn new(args: &GenerateArgs) -> Reporter {
        Reporter::with_display(if args.json {
            Display::Json { every_block: args.verbose }
        } else if args.quiet {
            Display::Silent
        } else if std::io::stderr().is_terminal() {
            Display::Bars(Box::new(ProgressBars::new(args.verbose)))
        } else {
            Display::Lines(ProgressLines { verbose: args.verbose })
        })
    }

    /// Returns a reporter that shows nothing.
    pub fn silent() -> Reporter {
        Reporter::with_display(Display::Silent)
    }

    fn with_display(display: Display) -> Reporter {
        let now = Instant::now();
        Reporter {
            display,
            began: now,
            phase: None,
            components: 0,
            images: 1,
            calls: 1,
            step_start: now,
            sigma: 1.0,
            steps: 0,
            blocks: 0,
            write_error: None,
            tile: None,
        }
    }

    /// Draws an image above the progress bar. `draw` gets the number of lines printed since it last returned true, which
    /// says that it drew below them.
    pub fn draw(&mut self, draw: impl FnOnce(u32) -> bool) {
        match &mut self.display {
            Display::Bars(bars) => bars.draw(draw),
            Display::Silent | Display::Lines(_) | Display::Json { .. } => drop(draw(0)),
        }
    }

    /// Sets the number of images and of transformer calls per step.
    pub fn expect(&mut self, images: usize, calls: usize) {
        (self.images, self.calls, self.tile) = (images, calls, None);
    }

    pub fn report(&mut self, event: &ProgressEvent<'_>) {
        match &mut self.display {
            Display::Silent => {}
            Display::Lines(lines) => lines.report(event),
            Display::Bars(bars) => bars.report(event),
            Display::Json { every_block: false } if matches!(event, ProgressEvent::Progress { .. }) => {}
            Display::Json { .. } => self.write_json(event),
        }
    }

    fn write_json(&mut self, event: &ProgressEvent<'_>) {
        let Ok(mut line) = serde_json::to_string(event) else { return };
        line.push('\n');
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
            self.write_error.get_or_insert(error);
        }
    }

    pub fn note(&mut self, text: &str) {
        self.report(&ProgressEvent::Note { text });
    }

    pub fn warn(&mut self, text: &str) {
        self.report(&ProgressEvent::Warning { text });
    }

    /// Returns the seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Ends the current phase.
    pub fn end_phase(&mut self) {
        if let Some((phase, since)) = self.phase.take() {
            self.report(&ProgressEvent::PhaseDone { phase, seconds: since.elapsed().as_secs_f64() });
        }
    }

    fn enter(&mut self, phase: Phase) {
        if self.phase.is_none_or(|(current, _)| current != phase) {
            self.end_phase();
            self.phase = Some((phase, Instant::now()));
            self.report(&ProgressEvent::Phase { phase });
        }
    }

    fn progress(&mut self, phase: Phase, done: usize, total: usize, what: &str) {
        self.enter(phase);
        self.report(&ProgressEvent::Progress { phase, done, total, what });
    }

    /// Prints an error to standard error, with `--json` also as an event.
    pub fn fail(&mut self, error: &CliError) {
        if let Display::Bars(bars) = &mut self.display {
            bars.clear();
        }
        terminal::tell(&error.to_string());
        if matches!(self.display, Display::Json { .. }) {
            let (message, context) = (&error.message, &error.context);
            self.write_json(&ProgressEvent::Error { message, context, hint: error.hint.as_deref() });
        }
    }

    /// Returns whether writing an event failed.
    pub fn has_write_error(&self) -> bool {
        self.write_error.is_some()
    }

    /// Takes the error that writing an event failed with.
    pub fn take_write_error(&mut self) -> Option<std::io::Error> {
        self.write_error.take()
    }

    /// Reports an engine event.
    pub fn handle(&mut self, event: &Event) {
        match *event {
            Event::Loading { component } => {
                self.components += 1;
                self.progress(Phase::Load, self.components - 1, COMPONENTS, component);
            }
            Event::BlockQuantized { done, total } => {
                let (before, all) = (self.components.saturating_sub(1) * total, COMPONENTS * total);
                let what = format!("quantizing the transformer, {done}/{total}");
                self.progress(Phase::Load, before + done, all, &what);
            }
            Event::LoraApplied { ref report } => self.report(&ProgressEvent::Lora { report }),
            Event::Note(ref text) => self.note(text),
            Event::TextLayer { prompt, prompts, done, total } => {
                let what = if prompts > 1 { format!("{}/{prompts}", prompt + 1) } else { String::new() };
                self.progress(Phase::Text, prompt * total + done, prompts * total, &what);
            }
            Event::TileStarted { image, tile, tiles } => {
                if tile == 0 {
                    self.end_phase();
                    self.blocks = 0;
                }
                self.tile = Some((tile, tiles));
                self.enter(Phase::Steps);
                self.report(&ProgressEvent::Tile { image, tile: tile + 1, tiles });
            }
            // Each tile has these phases: one bar shows all tiles.
            Event::EncodingReference { .. } | Event::DecodingImage { .. } | Event::TileDecoded { .. }
                if self.tile.is_some() => {}
            Event::EncodingReference { index, total } => {
                self.progress(Phase::Encode, index, total, &format!("{}/{total}", index + 1));
            }
            Event::StepStarted { image, images: batch, step, steps, sigma, .. } => {
                if step == 0 && self.tile.is_none() {
                    self.end_phase();
                    self.enter(Phase::Steps);
                    self.blocks = 0;
                }
                (self.step_start, self.sigma, self.steps) = (Instant::now(), sigma, steps);
                let images = self.images;
                self.report(&ProgressEvent::StepStarted { image, batch, images, step, steps, sigma });
            }
            Event::Block { total, .. } => {
                self.blocks += 1;
                let tiles = self.tile.map_or(1, |(_, tiles)| tiles);
                self.progress(Phase::Steps, self.blocks, total * self.calls * self.steps * tiles, "");
            }
            Event::StepFinished { image, images: batch, step, steps, reused } => {
                let (sigma, images) = (self.sigma, self.images);
                let seconds = self.step_start.elapsed().as_secs_f64();
                let step = step + 1;
                self.report(&ProgressEvent::Step {
                    image,
                    batch,
                    images,
                    step,
                    steps,
                    sigma,
                    reused,
                    seconds,
                });
            }
            Event::DecodingImage { .. } => {
                self.end_phase();
                self.enter(Phase::Decode);
            }
            Event::TileDecoded { done, total } => self.progress(Phase::Decode, done, total, ""),
        }
    }
}
