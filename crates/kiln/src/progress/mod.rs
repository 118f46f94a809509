//! Telling how a run goes: bars on a terminal, plain lines elsewhere, JSON for programs, or nothing.

mod bars;
mod lines;
mod told;

use std::cell::RefCell;
use std::io::{IsTerminal, Write};
use std::time::Instant;

use kiln_model::{Error, Event, Observer, Result};
use kiln_ops::Backend;

use crate::args::GenerateArgs;
use crate::cancel::Cancel;
use crate::failure::Failure;
use bars::Bars;
use lines::Lines;
pub use told::{Phase, Told};

/// Parts that are loaded, for the bar: tokenizer, text encoder, transformer, vae.
const PARTS: usize = 4;

enum Voice {
    Silent,
    Lines(Lines),
    Bars(Box<Bars>),
    Json { every_block: bool },
}

/// Follows a run, tells about it, and stops it on Ctrl-C.
pub struct Reporter {
    voice: Voice,
    cancel: Cancel,
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
    trouble: Option<std::io::Error>,
}

impl Reporter {
    pub fn new(args: &GenerateArgs, cancel: Cancel) -> Reporter {
        let voice = match () {
            () if args.json => Voice::Json { every_block: args.verbose },
            () if args.quiet => Voice::Silent,
            () if std::io::stderr().is_terminal() => Voice::Bars(Box::new(Bars::new(args.verbose))),
            () => Voice::Lines(Lines { verbose: args.verbose }),
        };
        let now = Instant::now();
        Reporter {
            voice,
            cancel,
            began: now,
            phase: None,
            parts: 0,
            pictures: 1,
            calls: 1,
            step: now,
            sigma: 1.0,
            steps: 0,
            blocks: 0,
            trouble: None,
        }
    }

    /// How many pictures there will be, and transformer calls in each of their steps.
    pub fn expect(&mut self, pictures: usize, calls: usize) {
        (self.pictures, self.calls) = (pictures, calls);
    }

    pub fn tell(&mut self, told: &Told<'_>) {
        match &mut self.voice {
            Voice::Silent => {}
            Voice::Lines(lines) => lines.tell(told),
            Voice::Bars(bars) => bars.tell(told),
            Voice::Json { every_block: false } if matches!(told, Told::Progress { .. }) => {}
            Voice::Json { .. } => self.write_json(told),
        }
    }

    fn write_json(&mut self, told: &Told<'_>) {
        let Ok(mut line) = serde_json::to_string(told) else { return };
        line.push('\n');
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
            self.trouble.get_or_insert(error);
        }
    }

    pub fn note(&mut self, text: &str) {
        self.tell(&Told::Note { text });
    }

    pub fn warn(&mut self, text: &str) {
        self.tell(&Told::Warning { text });
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Ends the phase in progress.
    pub fn end_phase(&mut self) {
        if let Some((phase, since)) = self.phase.take() {
            self.tell(&Told::PhaseDone { phase, seconds: since.elapsed().as_secs_f64() });
        }
    }

    fn enter(&mut self, phase: Phase) {
        if self.phase.is_none_or(|(now, _)| now != phase) {
            self.end_phase();
            self.phase = Some((phase, Instant::now()));
            self.tell(&Told::Phase { phase });
        }
    }

    fn progress(&mut self, phase: Phase, done: usize, total: usize, what: &str) {
        self.enter(phase);
        self.tell(&Told::Progress { phase, done, total, what });
    }

    /// Tells of a failure: on standard error for people, and as an event for programs.
    pub fn fail(&mut self, failure: &Failure) {
        if let Voice::Bars(bars) = &mut self.voice {
            bars.clear();
        }
        let _ = writeln!(std::io::stderr(), "{failure}");
        if matches!(self.voice, Voice::Json { .. }) {
            let (message, context) = (&failure.message, &failure.context);
            self.write_json(&Told::Error { message, context, hint: failure.hint.as_deref() });
        }
    }

    /// An error when the user or the reader of our events wants no more.
    fn go_on(&self) -> Result<()> {
        match self.cancel.is_asked() || self.trouble.is_some() {
            true => Err(Error::Cancelled),
            false => Ok(()),
        }
    }

    /// What kept events from being written, if it was that which ended the run.
    pub fn take_trouble(&mut self) -> Option<std::io::Error> {
        self.trouble.take()
    }

    fn handle(&mut self, event: Event) {
        match event {
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
            Event::Lora { report } => self.tell(&Told::Lora { report: &report }),
            Event::Note(text) => self.note(&text),
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
                self.tell(&Told::StepStarted { picture, together, pictures, step, steps, sigma });
            }
            Event::Block { total, .. } => {
                self.blocks += 1;
                self.progress(Phase::Steps, self.blocks, total * self.calls * self.steps, "");
            }
            Event::StepFinished { picture, own: together, step, steps } => {
                let (sigma, pictures) = (self.sigma, self.pictures);
                let seconds = self.step.elapsed().as_secs_f64();
                let step = step + 1;
                self.tell(&Told::Step { picture, together, pictures, step, steps, sigma, seconds });
            }
            Event::Decoding { .. } => {
                self.end_phase();
                self.enter(Phase::Decode);
            }
            Event::Decode { done, total } => self.progress(Phase::Decode, done, total, ""),
        }
    }
}

impl<B: Backend> Observer<B> for Reporter {
    fn event(&mut self, event: Event) -> Result<()> {
        self.handle(event);
        self.go_on()
    }

    // Called after every stage of every part, also where there is no event.
    fn see(&mut self, _: &str, _: &B::Tensor) -> Result<()> {
        self.go_on()
    }

    fn looks_inside(&self) -> bool {
        false
    }
}

/// A reporter that is lent to a pipeline and still used beside it, by turns.
pub struct Shared<'a, 'r>(pub &'a RefCell<&'r mut Reporter>);

impl<B: Backend> Observer<B> for Shared<'_, '_> {
    fn event(&mut self, event: Event) -> Result<()> {
        Observer::<B>::event(&mut **self.0.borrow_mut(), event)
    }

    fn see(&mut self, name: &str, x: &B::Tensor) -> Result<()> {
        Observer::<B>::see(&mut **self.0.borrow_mut(), name, x)
    }

    fn looks_inside(&self) -> bool {
        Observer::<B>::looks_inside(&**self.0.borrow())
    }
}
