//! The loop of a training: steps, log, checkpoints, samples, and the end.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use kiln_weights::TrainedModule;

use crate::checkpoint::{RunRecord, save_state};
use crate::guard::LossGuard;
use crate::log::Log;
use crate::norms::UpdateNorms;
use crate::output::{LoraFormat, RunFiles, write_lora};
use crate::{Error, PreparedExample, Result, StepReport, TrainerState};

/// What takes the steps.
pub trait Stepper {
    /// Takes one optimizer step over these batches.
    fn step(&mut self, batches: &[Vec<PreparedExample>]) -> Result<StepReport>;

    /// Steps taken so far.
    fn steps(&self) -> u64;

    /// What it needs to continue.
    fn state(&self) -> Result<TrainerState>;

    /// The adapter to write: the moving average if there is one.
    fn adapter(&self) -> Result<Vec<TrainedModule>>;
}

/// How long to train, and what to save.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Steps in all.
    pub steps: u64,
    /// Steps between states and checkpoints.
    pub save_every: u64,
    /// Steps between samples; `None` takes none.
    pub sample_every: Option<u64>,
    /// How LoRAs are written.
    pub format: LoraFormat,
    /// Whether TensorBoard's files are written.
    pub tensorboard: bool,
}

/// Where a training stands.
#[derive(Clone, Copy, Debug)]
pub struct Status {
    /// The last step.
    pub report: StepReport,
    /// The smoothed loss.
    pub smoothed: f32,
    /// Time of a step: the mean of the last ones.
    pub step_time: Duration,
    /// Steps in all.
    pub steps: u64,
}

impl Status {
    /// Time that the other steps will take.
    pub fn remaining(&self) -> Duration {
        self.step_time.mul_f64(self.steps.saturating_sub(self.report.step) as f64)
    }
}

/// Follows a training.
pub trait Watcher {
    /// A step is done.
    fn stepped(&mut self, status: &Status);

    /// Whether to stop after this step.
    fn is_cancelled(&self) -> bool;

    /// A LoRA was written after this step; `is_sample` if samples are due.
    fn saved(&mut self, step: u64, lora: &std::path::Path, is_sample: bool) -> Result<()> {
        let _ = (step, lora, is_sample);
        Ok(())
    }
}

/// How a training ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The last step.
    pub step: u64,
    /// Whether it was cancelled before the last of its steps.
    pub cancelled: bool,
    /// The adapter's norms.
    pub norms: UpdateNorms,
}

/// Trains until the last step, or until it is cancelled. `batches` returns those of a step, counted from 0; a thread calls it while
/// the step before is computed. With `judge_anew` an earlier rise of the loss does not count: its settings have changed.
pub fn run(
    stepper: &mut dyn Stepper,
    batches: &mut (dyn FnMut(u64) -> Result<Vec<Vec<PreparedExample>>> + Send),
    files: &RunFiles,
    record: &RunRecord,
    options: &RunOptions,
    judge_anew: bool,
    watcher: &mut dyn Watcher,
) -> Result<Outcome> {
    let (send, receive) = mpsc::sync_channel(1);
    let steps = stepper.steps()..options.steps;
    thread::scope(|scope| {
        scope.spawn(move || {
            for step in steps {
                let batches = batches(step);
                let failed = batches.is_err();
                // Nobody receives after the training was stopped.
                if send.send(batches).is_err() || failed {
                    return;
                }
            }
        });
        // Dropped at the end, which stops the thread.
        take_steps(stepper, receive, files, record, options, judge_anew, watcher)
    })
}

fn take_steps(
    stepper: &mut dyn Stepper,
    batches: mpsc::Receiver<Result<Vec<Vec<PreparedExample>>>>,
    files: &RunFiles,
    record: &RunRecord,
    options: &RunOptions,
    judge_anew: bool,
    watcher: &mut dyn Watcher,
) -> Result<Outcome> {
    let tensorboard = options.tensorboard.then(|| files.tensorboard());
    let mut log = Log::open(&files.log(), stepper.steps(), tensorboard.as_deref())?;
    let mut guard = LossGuard::default();
    // So that the smoothed loss continues where it was.
    for line in Log::read(&files.log()) {
        let (step, loss, grad_norm, learning_rate) =
            (line.step, line.loss, line.grad_norm, line.learning_rate);
        let _ = guard.add(&StepReport { step, loss, grad_norm, learning_rate });
    }
    if judge_anew {
        guard.judge_anew();
    }
    let mut saved = Some(stepper.steps()).filter(|step| *step > 0);
    let mut times = StepTimes::default();
    let mut cancelled = watcher.is_cancelled();
    while stepper.steps() < options.steps && !cancelled {
        let begun = Instant::now();
        // The thread ends early only after an error, or if it panicked, which the scope passes on.
        let Ok(examples) = batches.recv() else { break };
        let report = stepper.step(&examples?).map_err(|error| diverged(error, saved))?;
        let step_time = times.add(begun.elapsed());
        let smoothed = guard.add(&report).map_err(|error| diverged(error, saved))?;
        log.add(&report, smoothed, begun.elapsed().as_secs_f32())?;
        watcher.stepped(&Status { report, smoothed, step_time, steps: options.steps });
        cancelled = watcher.is_cancelled();
        let step = report.step;
        let is_last = step >= options.steps;
        let is_sample = options.sample_every.is_some_and(|every| step.is_multiple_of(every)) || is_last;
        if step.is_multiple_of(options.save_every) || is_last || cancelled {
            save_state(&files.state(), &stepper.state()?, record)?;
            saved = Some(step);
            write_lora(&files.checkpoint(step), &stepper.adapter()?, record, step, &options.format)?;
            watcher.saved(step, &files.checkpoint(step), is_sample && options.sample_every.is_some())?;
        } else if is_sample && options.sample_every.is_some() {
            write_lora(&files.checkpoint(step), &stepper.adapter()?, record, step, &options.format)?;
            watcher.saved(step, &files.checkpoint(step), true)?;
        }
    }
    let step = stepper.steps();
    let adapter = stepper.adapter()?;
    let cancelled = step < options.steps;
    if !cancelled {
        write_lora(&files.output, &adapter, record, step, &options.format)?;
    }
    Ok(Outcome { step, cancelled, norms: UpdateNorms::new(&adapter)? })
}

/// Adds the last checkpoint to an error about the loss or gradient.
fn diverged(error: Error, saved: Option<u64>) -> Error {
    match error {
        Error::NotFinite { what, step } => {
            Error::Diverged { what: format!("{what} of step {step} is not a number"), saved }
        }
        Error::Diverged { what, .. } => Error::Diverged { what, saved },
        error => error,
    }
}

/// The mean time of the last steps. The first step counts only until there is another: it warms up.
#[derive(Default)]
struct StepTimes {
    last: std::collections::VecDeque<Duration>,
    count: usize,
}

impl StepTimes {
    const WINDOW: usize = 20;

    fn add(&mut self, time: Duration) -> Duration {
        if self.count == 1 || self.last.len() == StepTimes::WINDOW {
            self.last.pop_front();
        }
        self.count += 1;
        self.last.push_back(time);
        self.last.iter().sum::<Duration>() / self.last.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Example, TrainSettings};
    use kiln_tensor::{DType, HostTensor};
    use kiln_weights::LoraNaming;
    use std::collections::BTreeMap;
    use std::path::Path;

    /// A trainer of one number, which each step moves towards the examples' mean, by an amount that depends on its history.
    #[derive(Clone)]
    struct Toy {
        value: f32,
        momentum: f32,
        step: u64,
        fails_at: Option<u64>,
    }

    impl Stepper for Toy {
        fn step(&mut self, batches: &[Vec<PreparedExample>]) -> Result<StepReport> {
            let values = batches.iter().flatten().map(|e| e.example.latents.to_f32().unwrap()[0]);
            let difference = values.sum::<f32>() - self.value;
            self.momentum = 0.9 * self.momentum + 0.1 * difference;
            self.value += 0.3 * self.momentum;
            self.step += 1;
            if self.fails_at == Some(self.step) {
                return Err(Error::NotFinite { what: "the loss", step: self.step });
            }
            let (step, loss) = (self.step, difference * difference);
            Ok(StepReport { step, loss, grad_norm: difference.abs(), learning_rate: 0.3 })
        }

        fn steps(&self) -> u64 {
            self.step
        }

        fn state(&self) -> Result<TrainerState> {
            let tensor = HostTensor::from_f32([2], vec![self.value, self.momentum])?;
            let tensors = BTreeMap::from([("values".to_owned(), tensor)]);
            Ok(TrainerState { step: self.step, tensors, numbers: BTreeMap::new() })
        }

        fn adapter(&self) -> Result<Vec<TrainedModule>> {
            let tensor = |value| HostTensor::from_f32([1, 1], vec![value]);
            Ok(vec![TrainedModule {
                layer: "transformer_blocks.0.attn.to_q".into(),
                rank: 1,
                alpha: 1.0,
                tensors: [
                    ("lora_A.weight".into(), tensor(1.0)?),
                    ("lora_B.weight".into(), tensor(self.value)?),
                ]
                .into(),
            }])
        }
    }

    fn restored(state: &TrainerState) -> Toy {
        let values = state.tensors["values"].to_f32().unwrap();
        Toy { value: values[0], momentum: values[1], step: state.step, fails_at: None }
    }

    #[derive(Default)]
    struct Recorder {
        steps: Vec<u64>,
        samples: Vec<u64>,
        cancel_at: Option<u64>,
    }

    impl Watcher for Recorder {
        fn stepped(&mut self, status: &Status) {
            self.steps.push(status.report.step);
        }

        fn is_cancelled(&self) -> bool {
            self.cancel_at.is_some_and(|step| self.steps.last() >= Some(&step))
        }

        fn saved(&mut self, step: u64, lora: &Path, is_sample: bool) -> Result<()> {
            assert!(lora.is_file());
            self.samples.extend(is_sample.then_some(step));
            Ok(())
        }
    }

    fn record() -> RunRecord {
        RunRecord {
            base: "toy".into(),
            base_fingerprint: String::new(),
            data: String::new(),
            batch: 1,
            accumulation: 1,
            settings: TrainSettings::default(),
        }
    }

    fn train(files: &RunFiles, toy: Toy, watcher: &mut Recorder) -> (Result<Outcome>, Toy) {
        files.prepare(true, true).or_else(|_| files.prepare(false, true)).unwrap();
        let format = LoraFormat { naming: LoraNaming::Diffusers, dtype: DType::F32, trigger: None };
        let options =
            RunOptions { steps: 10, save_every: 4, sample_every: Some(3), format, tensorboard: false };
        let mut toy = toy;
        let mut batches = |step: u64| {
            let latents = HostTensor::from_f32([1, 1], vec![1.0 + step as f32 % 3.0])?;
            let text = latents.clone();
            let example = Example { latents, height: 1, width: 1, references: Vec::new(), text };
            TrainSettings::default().prepare(step, &[&[example]])
        };
        let outcome = run(&mut toy, &mut batches, files, &record(), &options, false, watcher);
        (outcome, toy)
    }

    const START: Toy = Toy { value: 0.0, momentum: 0.0, step: 0, fails_at: None };

    #[test]
    fn a_training_that_is_killed_and_resumed_gives_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let whole = RunFiles::new(&folder.path().join("whole.safetensors"));
        let mut watcher = Recorder::default();
        let (outcome, _) = train(&whole, START, &mut watcher);
        assert_eq!((watcher.steps.len(), watcher.samples), (10, vec![3, 6, 9, 10]));
        assert!(!outcome.unwrap().norms.is_zero());
        // Killed in step 7, after the state of step 4 was saved.
        let killed = RunFiles::new(&folder.path().join("killed.safetensors"));
        let (outcome, _) = train(&killed, Toy { fails_at: Some(7), ..START }, &mut Recorder::default());
        assert!(matches!(outcome, Err(Error::Diverged { saved: Some(4), .. })) && !killed.output.exists());
        let state = crate::checkpoint::load_state(&killed.state(), &record()).unwrap().state;
        assert_eq!(state.step, 4);
        let (outcome, _) = train(&killed, restored(&state), &mut Recorder::default());
        assert_eq!(outcome.unwrap().step, 10);
        let read = |path: &Path| std::fs::read(path).unwrap();
        assert_eq!(read(&whole.output), read(&killed.output));
        let losses =
            |files: &RunFiles| Log::read(&files.log()).iter().map(|l| (l.step, l.loss)).collect::<Vec<_>>();
        assert_eq!(losses(&whole), losses(&killed));
    }

    #[test]
    fn cancelling_saves_the_state_of_the_last_step() {
        let folder = tempfile::tempdir().unwrap();
        let files = RunFiles::new(&folder.path().join("me.safetensors"));
        let mut watcher = Recorder { cancel_at: Some(6), ..Recorder::default() };
        let (outcome, toy) = train(&files, START, &mut watcher);
        let outcome = outcome.unwrap();
        assert!(outcome.cancelled && outcome.step == 6 && !files.output.exists());
        let state = crate::checkpoint::load_state(&files.state(), &record()).unwrap().state;
        assert_eq!(state.tensors, toy.state().unwrap().tensors);
        assert!(files.checkpoint(6).is_file());
    }
}
