//! One attempt at a job, from its planning to its end: what the generator reports goes to those who watch, its images
//! to the disk, its end into the database.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kiln_base::lock;
use kiln_engine::{Phase, Progress, Request};
use kiln_image::Picture;

use crate::Server;
use crate::generator::{Blame, Finished, JobError, JobSink, name};
use crate::live::{Live, Made, Preview};
use crate::server::stopping;
use crate::store::{JobState, PictureRow, now};

/// Below this part of the work an estimate of the rest is worth nothing.
const ENOUGH_TO_ESTIMATE: f32 = 0.05;

/// An attempt at a job. It ends the job once, at the latest when the last reference to it is dropped.
pub(crate) struct Attempt {
    server: Server,
    pub(crate) live: Arc<Live>,
    model: String,
    clock: Mutex<Clock>,
    /// Images that are saved. Locked while one is being saved, so that the end comes after it.
    rows: Mutex<Vec<PictureRow>>,
    over: AtomicBool,
}

/// Never locked for long: the generator must not wait.
struct Clock {
    began: Instant,
    /// Jobs that were begun together, this one among them.
    company: u32,
    phase: Option<(Phase, Instant)>,
    fraction: f32,
    previews: u32,
}

impl Attempt {
    pub(crate) fn new(server: &Server, live: &Arc<Live>) -> Arc<Attempt> {
        let default = || server.catalogue.models().into_iter().find(|m| m.default).map(|m| m.name);
        let named = live.request.model.as_deref().map(|model| name(model).to_owned());
        Arc::new(Attempt {
            server: server.clone(),
            live: Arc::clone(live),
            model: named.or_else(default).unwrap_or_default(),
            clock: Mutex::new(Clock {
                began: Instant::now(),
                company: 1,
                phase: None,
                fraction: 0.0,
                previews: 0,
            }),
            rows: Mutex::default(),
            over: AtomicBool::new(false),
        })
    }

    /// The job is handed to the generator, one of `company`.
    pub(crate) fn hand_over(&self, company: usize) {
        let live = &self.live;
        let waited = live.came.elapsed();
        self.server.metrics.phase(Phase::Queue, waited);
        tracing::info!(job = live.id, client = live.client, waited_ms = waited.as_millis() as u64, "begun");
        {
            let mut clock = self.clock();
            (clock.began, clock.company) = (Instant::now(), u32::try_from(company).unwrap_or(1).max(1));
        }
        live.change(|s| s.state = JobState::Running);
    }

    /// Gives this attempt up for another one, which makes all images again; `None` if the job has ended.
    pub(crate) fn again(&self) -> Option<Arc<Attempt>> {
        {
            let _saving = self.rows();
            if self.over.swap(true, SeqCst) {
                return None;
            }
        }
        self.end_phase();
        self.live.change(|s| {
            s.pictures.clear();
            s.progress = Progress::default();
        });
        Some(Attempt::new(&self.server, &self.live))
    }

    /// Ends the job if nobody wants it any more; whether it has ended.
    pub(crate) fn end_if_cancelled(&self) -> bool {
        if self.cancelled() {
            self.ended(Err(JobError::cancelled()));
        }
        self.over.load(SeqCst)
    }

    /// Ends the attempt because the server stops: the job waits for the next start, or fails if a client waits for it.
    pub(crate) fn put_back(&self) {
        self.live.put_back();
        self.ended(Err(JobError::cancelled()));
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        lock(&self.clock)
    }

    fn rows(&self) -> MutexGuard<'_, Vec<PictureRow>> {
        lock(&self.rows)
    }

    fn is_late(&self) -> bool {
        self.clock().began.elapsed() > self.server.config.longest
    }

    fn end_phase(&self) {
        if let Some((phase, since)) = self.clock().phase.take() {
            self.server.metrics.phase(phase, since.elapsed());
        }
    }

    fn save(&self, image: Finished) -> Result<Made, JobError> {
        let request = &self.live.request;
        let encoded = kiln_image::encode_as(&image.picture, request.encoding(), Some(&image.recipe));
        let bytes = Bytes::from(encoded.map_err(|error| JobError::server("encoding", error.to_string()))?);
        let id = format!("{}-{}", self.live.id, image.index);
        let row = PictureRow {
            file: format!("{id}.{}", request.encoding().format.extension()),
            id,
            job: self.live.id.clone(),
            number: image.index,
            created: now(),
            width: image.picture.width(),
            height: image.picture.height(),
            seed: image.seed.map(|seed| seed.to_string()),
            bytes: bytes.len() as u64,
            prompt: prompt_of(request, image.index).to_owned(),
            model: self.model.clone(),
            request: request.clone(),
            recipe: image.recipe,
        };
        let written = self.server.store.write_picture(&row.file, &bytes);
        written.map_err(|error| JobError::server("storage", error.to_string()))?;
        self.server.metrics.picture(bytes.len());
        Ok(Made { row, bytes })
    }
}

/// The prompt of a job's image: each prompt has the same number of images.
fn prompt_of(request: &Request, index: u32) -> &str {
    let place = index as usize * request.prompts.len() / request.image_count().max(1);
    request.prompts.get(place).map_or("", String::as_str)
}

impl JobSink for Attempt {
    fn cancelled(&self) -> bool {
        self.over.load(SeqCst) || self.live.is_cancelled() || self.is_late()
    }

    fn progress(&self, progress: Progress) {
        if self.over.load(SeqCst) {
            return;
        }
        let mut clock = self.clock();
        match clock.phase {
            Some((phase, _)) if phase == progress.phase => {}
            ended => {
                if let Some((phase, since)) = ended {
                    self.server.metrics.phase(phase, since.elapsed());
                }
                clock.phase = Some((progress.phase, Instant::now()));
            }
        }
        let fraction = progress.fraction.clamp(clock.fraction, 1.0);
        clock.fraction = fraction;
        let spent = clock.began.elapsed().as_secs_f32();
        let time_left = (fraction > ENOUGH_TO_ESTIMATE).then(|| spent / fraction * (1.0 - fraction));
        self.live.change(|s| (s.progress, s.time_left) = (Progress { fraction, ..progress }, time_left));
    }

    fn batch(&self, own: u32, all: u32) {
        self.server.metrics.batch(own, all);
    }

    fn note(&self, text: &str) {
        self.live.change(|s| s.notes.push(text.to_owned()));
    }

    fn wants_preview(&self) -> bool {
        self.live.is_looked_at()
    }

    fn preview(&self, picture: Picture) {
        let number = {
            let mut clock = self.clock();
            clock.previews += 1;
            clock.previews
        };
        self.live.change(|s| s.preview = Some(Arc::new(Preview { number, picture })));
    }

    fn image(&self, image: Finished) -> Result<(), JobError> {
        let began = Instant::now();
        let mut rows = self.rows();
        if self.over.load(SeqCst) {
            return Err(JobError::cancelled());
        }
        if self.clock().phase.is_some_and(|(phase, _)| phase == Phase::Decode) {
            self.end_phase();
        }
        let made = Arc::new(self.save(image)?);
        rows.push(made.row.clone());
        self.live.change(|s| s.pictures.push(made));
        self.server.metrics.phase(Phase::Save, began.elapsed());
        Ok(())
    }

    fn ended(&self, result: Result<(), JobError>) {
        let rows = {
            let mut rows = self.rows();
            if self.over.swap(true, SeqCst) {
                return;
            }
            std::mem::take(&mut *rows)
        };
        self.end_phase();
        let (took, company) = {
            let clock = self.clock();
            (clock.began.elapsed(), clock.company)
        };
        let late = took > self.server.config.longest && !self.live.is_cancelled();
        let result = result.map_err(|error| {
            if late && error.blame == Blame::Cancelled {
                JobError::server("timeout", "generating this takes too long")
            } else {
                error
            }
        });
        self.server.end(&self.live, result, &rows, took / company);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.over.load(SeqCst) {
            return;
        }
        let error = if std::thread::panicking() {
            self.server.metrics.panicked();
            JobError::server("panicked", "generating panicked")
        } else {
            JobError::server("generation_failed", "generating ended without a result")
        };
        self.ended(Err(error));
    }
}

impl Server {
    /// Notes how a job ended; `took` is its share of the time that was spent.
    fn end(&self, live: &Live, result: Result<(), JobError>, rows: &[PictureRow], took: Duration) {
        let (mut state, mut error) = match result {
            Ok(()) => (JobState::Done, None),
            Err(error) if error.blame == Blame::Cancelled => (JobState::Cancelled, Some(error)),
            Err(error) => (JobState::Failed, Some(error)),
        };
        if state == JobState::Cancelled && live.is_put_back() {
            error = Some(stopping());
            state = if live.attached { JobState::Failed } else { JobState::Queued };
        }
        let noted = match (state, &error) {
            (JobState::Queued, _) => self.store.put_back(&live.id),
            (state, error) => {
                let error = error.as_ref().map(|e| (e.code, e.message.as_str()));
                self.store.finish(&live.id, state, error, rows)
            }
        };
        if let Err(storage) = noted {
            tracing::error!(job = live.id, error = %storage, "a job's end could not be noted");
            if state == JobState::Done {
                state = JobState::Failed;
                error = Some(JobError::server("storage", storage.to_string()));
            }
        }
        let code = error.as_ref().map(|e| e.code);
        self.metrics.job(state, code.filter(|_| state == JobState::Failed), took);
        let why = error.as_ref().map(|e| e.message.clone());
        tracing::info!(job = live.id, state = state.name(), code, why, ms = took.as_millis() as u64, "ended");
        // First out of the list: whoever sees the end may ask again at once.
        self.leave(&live.id);
        live.change(|s| {
            (s.state, s.error) = (state, error);
            s.preview = None;
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
