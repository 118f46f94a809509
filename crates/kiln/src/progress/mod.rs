//! Telling how a run goes: bars on a terminal, plain lines elsewhere, JSON for programs, or nothing.

mod bars;
mod lines;
mod report;

use std::io::{IsTerminal, Write};
use std::time::Instant;

use kiln_engine::Event;

use crate::args::GenerateArgs;
use crate::failure::Failure;
use bars::Bars;
use lines::Lines;
pub use report::{Phase, Report};

/// Parts that are loaded, for the bar: tokenizer, text encoder, transformer, vae.
const PARTS: usize = 4;

enum Voice {
    Silent,
    Lines(Lines),
    Bars(Box<Bars>),
    Json { every_block: bool },
}

/// Follows a run and reports on it.
pub struct Reporter {
    voice: Voice,
    began: Instant,
    phase: Option<(Phase, Instant)>,
    parts: usize,
    pictures: usize,
    /// Transformer calls of one step: two with guidance.
    calls: usize,
    step: Instant,
    sigma: f32,
    steps: usize,
    blocks: usize,
    write_error: Option<std::io::Error>,
}

impl Reporter {
    pub fn new(args: &GenerateArgs) -> Reporter {
        let voice = match () {
            () if args.json => Voice::Json { every_block: args.verbose },
            () if args.quiet => Voice::Silent,
            () if std::io::stderr().is_terminal() => Voice::Bars(Box::new(Bars::new(args.verbose))),
            () => Voice::Lines(Lines { verbose: args.verbose }),
        };
        Reporter::with(voice)
    }

    /// Reports nothing.
    pub fn silent() -> Reporter {
        Reporter::with(Voice::Silent)
    }

    fn with(voice: Voice) -> Reporter {
        let now = Instant::now();
        Reporter {
            voice,
            began: now,
            phase: None,
            parts: 0,
            pictures: 1,
            calls: 1,
            step: now,
            sigma: 1.0,
            steps: 0,
            blocks: 0,
            write_error: None,
        }
    }

    /// How many pictures there will be, and transformer calls in each of their steps.
    pub fn expect(&mut self, pictures: usize, calls: usize) {
        (self.pictures, self.calls) = (pictures, calls);
    }

    pub fn report(&mut self, report: &Report<'_>) {
        match &mut self.voice {
            Voice::Silent => {}
            Voice::Lines(lines) => lines.report(report),
            Voice::Bars(bars) => bars.report(report),
            Voice::Json { every_block: false } if matches!(report, Report::Progress { .. }) => {}
            Voice::Json { .. } => self.write_json(report),
        }
    }

    fn write_json(&mut self, report: &Report<'_>) {
        let Ok(mut line) = serde_json::to_string(report) else { return };
        line.push('\n');
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
            self.write_error.get_or_insert(error);
        }
    }

    pub fn note(&mut self, text: &str) {
        self.report(&Report::Note { text });
    }

    pub fn warn(&mut self, text: &str) {
        self.report(&Report::Warning { text });
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Ends the phase in progress.
    pub fn end_phase(&mut self) {
        if let Some((phase, since)) = self.phase.take() {
            self.report(&Report::PhaseDone { phase, seconds: since.elapsed().as_secs_f64() });
        }
    }

    fn enter(&mut self, phase: Phase) {
        if self.phase.is_none_or(|(now, _)| now != phase) {
            self.end_phase();
            self.phase = Some((phase, Instant::now()));
            self.report(&Report::Phase { phase });
        }
    }

    fn progress(&mut self, phase: Phase, done: usize, total: usize, what: &str) {
        self.enter(phase);
        self.report(&Report::Progress { phase, done, total, what });
    }

    /// Tells of a failure: on standard error for people, and as an event for programs.
    pub fn fail(&mut self, failure: &Failure) {
        if let Voice::Bars(bars) = &mut self.voice {
            bars.clear();
        }
        let _ = writeln!(std::io::stderr(), "{failure}");
        if matches!(self.voice, Voice::Json { .. }) {
            let (message, context) = (&failure.message, &failure.context);
            self.write_json(&Report::Error { message, context, hint: failure.hint.as_deref() });
        }
    }

    /// Whether events could not be written.
    pub fn has_write_error(&self) -> bool {
        self.write_error.is_some()
    }

    /// What kept events from being written, if it was that which ended the run.
    pub fn take_write_error(&mut self) -> Option<std::io::Error> {
        self.write_error.take()
    }

    /// Reports an event of the engine.
    pub fn handle(&mut self, event: &Event) {
        match *event {
            Event::Loading { part } => {
                self.parts += 1;
                self.progress(Phase::Load, self.parts - 1, PARTS, part);
            }
            Event::Rounded { done, total } => {
                let (before, all) = (self.parts.saturating_sub(1) * total, PARTS * total);
                self.progress(
                    Phase::Load,
                    before + done,
                    all,
                    &format!("transformer in 8 bits, {done}/{total}"),
                );
            }
            Event::Lora { ref report } => self.report(&Report::Lora { report }),
            Event::Note(ref text) => self.note(text),
            Event::Text { prompt, prompts, done, total } => {
                let what = if prompts > 1 { format!("{}/{prompts}", prompt + 1) } else { String::new() };
                self.progress(Phase::Text, prompt * total + done, prompts * total, &what);
            }
            Event::Reference { index, total } => {
                self.progress(Phase::Encode, index, total, &format!("{}/{total}", index + 1));
            }
            Event::StepStarted { picture, own: together, step, steps, sigma, .. } => {
                if step == 0 {
                    self.end_phase();
                    self.enter(Phase::Steps);
                    self.blocks = 0;
                }
                (self.step, self.sigma, self.steps) = (Instant::now(), sigma, steps);
                let pictures = self.pictures;
                self.report(&Report::StepStarted { picture, together, pictures, step, steps, sigma });
            }
            Event::Block { total, .. } => {
                self.blocks += 1;
                self.progress(Phase::Steps, self.blocks, total * self.calls * self.steps, "");
            }
            Event::StepFinished { picture, own: together, step, steps } => {
                let (sigma, pictures) = (self.sigma, self.pictures);
                let seconds = self.step.elapsed().as_secs_f64();
                let step = step + 1;
                self.report(&Report::Step { picture, together, pictures, step, steps, sigma, seconds });
            }
            Event::Decoding { .. } => {
                self.end_phase();
                self.enter(Phase::Decode);
            }
            Event::Decode { done, total } => self.progress(Phase::Decode, done, total, ""),
        }
    }
}
