//! One attempt at a job, from planning to its end: passes progress to watchers, saves images and records the result.
//! An image is in the database before anybody hears of it.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kiln_base::lock;
use kiln_engine::ImageOrigin;
use kiln_engine::{Phase, Progress, Request};
use kiln_filters::Refusal;
use kiln_image::RgbImage;

use crate::jobs::attempts::Attempts;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::generator::{FinishedImage, JobSink, name};
use crate::jobs::job::{JobEnd, JobState};
use crate::jobs::live::{LiveJob, Preview, SavedImage};
use crate::jobs::stopping_error;
use crate::jobs::store::{FileKind, ImageRow, now};
use crate::jobs::traces::{Span, SpanKind, TraceContext};

/// Fraction of the work that must be done before the time left is estimated; earlier estimates are noise.
const MIN_FRACTION_FOR_ESTIMATE: f32 = 0.05;

/// An attempt at a job. Ends the job exactly once, at the latest when the last reference is dropped.
pub(crate) struct JobAttempt {
    attempts: Attempts,
    pub(crate) live: Arc<LiveJob>,
    model: String,
    state: Mutex<AttemptState>,
    /// Locked while an image is being saved, so that the job can't end in between.
    saving: Mutex<()>,
    ended: AtomicBool,
    /// The place of the attempt in the job's trace.
    trace: Option<TraceContext>,
}

/// Timing and progress. Locked only briefly: the generator must not wait.
struct AttemptState {
    started: Instant,
    /// Number of jobs handed to the generator together, including this one.
    group_size: u32,
    phase: Option<(Phase, Instant)>,
    fraction: f32,
    previews: u32,
    /// Images that the check refused: each one's number, and what to tell the client.
    refused: Vec<(u32, String)>,
}

impl JobAttempt {
    pub(crate) fn new(attempts: &Attempts, live: &Arc<LiveJob>) -> Arc<JobAttempt> {
        let named = live.request.model.as_deref().map(|model| name(model).to_owned());
        Arc::new(JobAttempt {
            attempts: attempts.clone(),
            live: Arc::clone(live),
            model: named.or_else(|| attempts.catalogue.default_model()).unwrap_or_default(),
            state: Mutex::new(AttemptState {
                started: Instant::now(),
                group_size: 1,
                phase: None,
                fraction: 0.0,
                previews: 0,
                refused: Vec::new(),
            }),
            saving: Mutex::default(),
            ended: AtomicBool::new(false),
            trace: live.trace.map(TraceContext::child),
        })
    }

    /// Marks the job as running, one of `group_size` jobs handed to the generator together.
    pub(crate) fn start(&self, group_size: usize) {
        let live = &self.live;
        let waited = live.submitted.elapsed();
        self.attempts.metrics.phase(Phase::Queue, waited);
        let age = Duration::from_millis(u64::try_from(now() - live.created).unwrap_or(0));
        let queued = Instant::now().checked_sub(age.max(waited));
        self.span("queue", live.trace, queued.unwrap_or_else(Instant::now));
        tracing::info!(
            job = live.id,
            client = live.client,
            waited_ms = waited.as_millis() as u64,
            "job started"
        );
        {
            let mut state = self.state();
            (state.started, state.group_size) =
                (Instant::now(), u32::try_from(group_size).unwrap_or(1).max(1));
        }
        self.attempts.ledger().generating(&live.id);
        live.change(|s| s.state = JobState::Running);
    }

    /// Replaces this attempt with a new one that generates all images again; `None` if the job has ended.
    pub(crate) fn retry(&self) -> Option<Arc<JobAttempt>> {
        {
            let _saving = lock(&self.saving);
            if self.ended.swap(true, SeqCst) {
                return None;
            }
        }
        self.end_phase();
        if let Err(error) = self.attempts.ledger().delete_images_of(&self.live.id) {
            tracing::warn!(job = self.live.id, %error, "failed to remove the images of a panicked attempt");
        }
        self.live.change(|s| {
            s.images.clear();
            s.progress = Progress::default();
        });
        Some(JobAttempt::new(&self.attempts, &self.live))
    }

    /// Ends the job if it was cancelled; returns whether it has ended.
    pub(crate) fn end_if_cancelled(&self) -> bool {
        if self.cancelled() {
            self.ended(Err(JobError::cancelled()));
        }
        self.ended.load(SeqCst)
    }

    /// Ends the attempt because the server stops: the job resumes at the next start, or fails if a client waits for it.
    pub(crate) fn interrupt(&self) {
        self.live.interrupt();
        self.ended(Err(JobError::cancelled()));
    }

    /// Tells of input images whose credentials are lost.
    pub(crate) fn note_inputs(&self) {
        let request = &self.live.request;
        let numbered = request.references.iter().zip(1..);
        let references = numbered.map(|(file, number)| (format!("reference {number}"), file));
        let init = request.init.iter().map(|file| ("init".to_owned(), file));
        for (role, file) in init.chain(references) {
            let bytes = self.attempts.input_file(name(&file.path)).and_then(|path| std::fs::read(path).ok());
            let note = bytes.and_then(|bytes| self.attempts.config.embedded.input_note(&role, &bytes));
            if let Some(note) = note {
                tracing::info!(job = self.live.id, "{note}");
                self.note(&note);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, AttemptState> {
        lock(&self.state)
    }

    fn is_timed_out(&self) -> bool {
        self.state().started.elapsed() > self.attempts.config.job_timeout
    }

    fn end_phase(&self) {
        let ended = self.state().phase.take();
        if let Some((phase, since)) = ended {
            self.count_phase(phase, since);
        }
    }

    fn count_phase(&self, phase: Phase, since: Instant) {
        self.attempts.metrics.phase(phase, since.elapsed());
        self.span(phase.name(), self.trace, since);
    }

    /// Sends a part of the work that ends now to the trace.
    fn span(&self, name: &'static str, parent: Option<TraceContext>, started: Instant) {
        let Some(context) = parent.map(TraceContext::child) else { return };
        let (kind, attributes) = (SpanKind::Internal, Vec::new());
        self.attempts.tracer.send(Span { name, kind, context, parent, started, attributes, error: None });
    }

    /// Sends the whole attempt to the trace.
    fn trace_end(&self, started: Instant, result: &Result<(), JobError>) {
        let (Some(context), parent) = (self.trace, self.live.trace) else { return };
        let request = &self.live.request;
        let side = |side: Option<u32>| side.map_or(String::new(), |side| side.to_string());
        let attributes = vec![
            ("kiln.job", self.live.id.clone()),
            ("kiln.model", self.model.clone()),
            ("kiln.width", side(request.width)),
            ("kiln.height", side(request.height)),
            ("kiln.images", request.image_count().to_string()),
        ];
        let attributes = attributes.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        let error = result.as_ref().err().map(|error| format!("{}: {}", error.code.name(), error.message));
        let kind = SpanKind::Consumer;
        self.attempts.tracer.send(Span {
            name: "generate",
            kind,
            context,
            parent,
            started,
            attributes,
            error,
        });
    }

    /// Asks the check whether an image may be stored; without a check all may. A refused image is remembered.
    fn passes_check(&self, image: &FinishedImage) -> Result<bool, JobError> {
        let Some(check) = &self.attempts.config.check else { return Ok(true) };
        let recipe = kiln_engine::Recipe::parse(&image.recipe).ok();
        let prompt = recipe.as_ref().and_then(|recipe| recipe.request.prompts.first().map(String::as_str));
        let prompt = prompt.unwrap_or_else(|| prompt_of(&self.live.request, image.index));
        let Err(refusal) = check.check(&image.image, prompt, &|| self.cancelled()) else { return Ok(true) };
        let (job, number) = (&self.live.id, image.index);
        match &refusal {
            Refusal::Cancelled => return Err(JobError::cancelled()),
            Refusal::Failed(detail) => tracing::error!(job, number, detail, "the check of an image failed"),
            Refusal::Refused(reason) => tracing::info!(job, number, reason, "image refused"),
        }
        self.attempts.metrics.image_refused(refusal.is_verdict());
        self.state().refused.push((number, refusal.message()));
        Ok(false)
    }

    /// Returns the error of a job whose images were not all accepted.
    fn refusal(&self) -> Result<(), JobError> {
        let state = self.state();
        let images = self.live.request.image_count();
        match &state.refused[..] {
            [] => Ok(()),
            [(_, message), ..] if images == 1 => Err(JobError::new(ErrorCode::ImageRefused, message)),
            refused @ [(number, message), ..] => {
                let (count, first) = (refused.len(), number + 1);
                let message = format!("{count} of {images} images were refused; number {first}: {message}");
                Err(JobError::new(ErrorCode::ImageRefused, message))
            }
        }
    }

    /// The image's file. The recipe may be that of a worker of another version, so it is embedded as it came.
    fn encode(&self, finished: &FinishedImage) -> kiln_engine::Result<Bytes> {
        let request = &self.live.request;
        let recipe = kiln_engine::Recipe::parse(&finished.recipe).ok();
        let parameters = recipe.as_ref().map(|recipe| recipe.parameters());
        let origin = ImageOrigin {
            request,
            model: recipe.as_ref().map_or(&self.model[..], |recipe| recipe.model.title()),
            recipe: &finished.recipe,
            parameters: parameters.as_deref(),
            inputs: &|file| std::fs::read(self.attempts.input_file(name(&file.path))?).ok(),
        };
        let embedded = &self.attempts.config.embedded;
        embedded.encode(&finished.image, request.encoding(), &origin).map(Bytes::from)
    }

    fn save(&self, finished: FinishedImage) -> Result<SavedImage, JobError> {
        let request = &self.live.request;
        let bytes = self.encode(&finished).map_err(|error| JobError::of_file(&error))?;
        let id = format!("{}-{}", self.live.id, finished.index);
        let (ledger, files) = (self.attempts.ledger(), &self.attempts.files);
        let row = ImageRow {
            file: files.name(&id, request.encoding().format.extension(), &bytes),
            id,
            job: self.live.id.clone(),
            number: finished.index,
            created: now(),
            width: finished.image.width(),
            height: finished.image.height(),
            seed: finished.seed.map(|seed| seed.to_string()),
            bytes: bytes.len() as u64,
            prompt: prompt_of(request, finished.index).to_owned(),
            model: self.model.clone(),
            request: request.clone(),
            recipe: finished.recipe,
            favourite: false,
            trashed: None,
        };
        let stored = files.put(FileKind::Image, &row.file, &bytes).and_then(|()| ledger.save_image(&row));
        if let Err(error) = stored {
            files.discard_image(&row.file);
            return Err(error.into());
        }
        self.attempts.metrics.image_saved(bytes.len(), finished.steps);
        Ok(SavedImage { row, bytes })
    }
}

/// The prompt of a job's image. Every prompt has the same number of images.
fn prompt_of(request: &Request, index: u32) -> &str {
    let prompt = index as usize * request.prompts.len() / request.image_count().max(1);
    request.prompts.get(prompt).map_or("", String::as_str)
}

impl JobSink for JobAttempt {
    fn cancelled(&self) -> bool {
        self.ended.load(SeqCst) || self.live.is_cancelled() || self.is_timed_out()
    }

    fn progress(&self, progress: Progress) {
        if self.ended.load(SeqCst) {
            return;
        }
        let mut state = self.state();
        match state.phase {
            Some((phase, _)) if phase == progress.phase => {}
            previous => {
                if let Some((phase, since)) = previous {
                    self.count_phase(phase, since);
                }
                state.phase = Some((progress.phase, Instant::now()));
            }
        }
        let fraction = progress.fraction.clamp(state.fraction, 1.0);
        state.fraction = fraction;
        let spent = state.started.elapsed().as_secs_f32();
        let time_left = (fraction > MIN_FRACTION_FOR_ESTIMATE).then(|| spent / fraction * (1.0 - fraction));
        drop(state);
        self.live.change(|s| (s.progress, s.time_left) = (Progress { fraction, ..progress }, time_left));
        self.attempts.ledger().progress(&self.live);
    }

    fn batch(&self, own: u32, all: u32) {
        self.attempts.metrics.batch(own, all);
    }

    fn note(&self, text: &str) {
        let text = kiln_base::without_folders(text).into_owned();
        self.live.change(|s| s.notes.push(text));
    }

    fn wants_preview(&self) -> bool {
        // A preview shows what the check may refuse.
        self.attempts.config.check.is_none() && self.live.wants_previews()
    }

    fn preview(&self, image: RgbImage) {
        if self.attempts.config.check.is_some() {
            return;
        }
        let number = {
            let mut state = self.state();
            state.previews += 1;
            state.previews
        };
        self.live.change(|s| s.preview = Some(Arc::new(Preview { number, image })));
        self.attempts.ledger().progress(&self.live);
        if self.live.stops_with_preview() {
            self.live.cancel();
        }
    }

    fn image(&self, image: FinishedImage) -> Result<(), JobError> {
        if self.state().phase.is_some_and(|(phase, _)| phase == Phase::Decode) {
            self.end_phase();
        }
        // Before anything is encoded or written, and without the lock: a check may take long.
        if !self.passes_check(&image)? {
            return Ok(());
        }
        let started = Instant::now();
        let _saving = lock(&self.saving);
        if self.ended.load(SeqCst) {
            return Err(JobError::cancelled());
        }
        let saved = Arc::new(self.save(image)?);
        self.live.change(|s| s.images.push(saved));
        self.count_phase(Phase::Save, started);
        Ok(())
    }

    fn ended(&self, result: Result<(), JobError>) {
        {
            let _saving = lock(&self.saving);
            if self.ended.swap(true, SeqCst) {
                return;
            }
        }
        self.end_phase();
        let (started, group_size) = {
            let state = self.state();
            (state.started, state.group_size)
        };
        let took = started.elapsed();
        let result = result.and_then(|()| self.refusal());
        let timed_out = took > self.attempts.config.job_timeout && !self.live.is_cancelled();
        let result = result.map_err(|error| {
            if timed_out && error.is_cancelled() {
                JobError::new(
                    ErrorCode::Timeout,
                    format!("the job took longer than {} s", self.attempts.config.job_timeout.as_secs()),
                )
            } else {
                error
            }
        });
        self.trace_end(started, &result);
        self.attempts.end(&self.live, result, took / group_size);
    }
}

impl Drop for JobAttempt {
    fn drop(&mut self) {
        if self.ended.load(SeqCst) {
            return;
        }
        let error = if std::thread::panicking() {
            self.attempts.metrics.panicked();
            JobError::new(ErrorCode::Panicked, "generation panicked")
        } else {
            JobError::new(ErrorCode::GenerationFailed, "generation ended without a result")
        };
        self.ended(Err(error));
    }
}

impl Attempts {
    /// Records how a job ended; `took` is its share of the group's time.
    fn end(&self, live: &LiveJob, result: Result<(), JobError>, took: Duration) {
        let (mut state, mut error) = match result {
            Ok(()) => (JobState::Done, None),
            Err(error) if error.is_cancelled() => (JobState::Cancelled, Some(error)),
            Err(error) => (JobState::Failed, Some(error)),
        };
        if state == JobState::Cancelled && live.is_interrupted() {
            error = Some(stopping_error());
            state = if live.attached { JobState::Failed } else { JobState::Queued };
        }
        if state == JobState::Queued {
            if let Err(error) = self.ledger().undo_start(&live.id) {
                tracing::error!(job = live.id, %error, "failed to return a job to the queue");
            }
        } else {
            self.record_end(JobEnd {
                id: live.id.clone(),
                state,
                error: error.clone(),
                notes: live.snapshot().notes,
                finished: now(),
            });
        }
        let code = error.as_ref().map(|e| e.code);
        self.metrics.job(state, code.filter(|_| state == JobState::Failed), took, live.cost);
        let message = error.as_ref().map(|e| e.message.clone());
        tracing::info!(
            job = live.id,
            state = state.name(),
            code = code.map(ErrorCode::name),
            message,
            ms = took.as_millis() as u64,
            "job ended"
        );
        // Remove it first: a client that sees the end may submit again at once.
        self.remove_job(live);
        live.change(|s| {
            (s.state, s.error) = (state, error);
            if !live.stops_with_preview() {
                s.preview = None;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prompt_has_the_same_number_of_images() {
        let request = Request { prompts: vec!["a".into(), "b".into()], n: Some(2), ..Request::default() };
        let prompts: Vec<&str> = (0..4).map(|index| prompt_of(&request, index)).collect();
        assert_eq!(prompts, ["a", "a", "b", "b"]);
        let request = Request { n: None, seed: (0..6).collect(), ..request };
        assert_eq!((prompt_of(&request, 2), prompt_of(&request, 3)), ("a", "b"));
        assert_eq!(prompt_of(&Request::default(), 0), "");
    }
}
