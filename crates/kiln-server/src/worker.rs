//! The thread that paints: one order after the other, or several that are alike at once, whatever happens in one of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kiln_image::Picture;

use crate::Server;
use crate::engine::{Blame, Painted, Painter, Part, Phase, Progress, Trouble, Watch, Work};
use crate::live::{Live, Made, Preview};
use crate::store::{JobState, PictureRow, now};

/// Below this part of the work a guess at the rest is worth nothing.
const ENOUGH_TO_GUESS: f32 = 0.05;

impl Server {
    /// Starts the thread that paints. It ends after [`Server::close`].
    pub fn paint_with(&self, mut painter: Box<dyn Painter>) -> std::io::Result<JoinHandle<()>> {
        let server = self.clone();
        std::thread::Builder::new().name("painter".into()).spawn(move || {
            match catch_unwind(AssertUnwindSafe(|| painter.warm_up())) {
                Ok(Ok(())) => {}
                Ok(Err(trouble)) => tracing::error!("the model can't be used: {trouble}"),
                Err(_) => {
                    tracing::error!("loading the model ended in a panic");
                    painter.reset();
                }
            }
            server.set_ready();
            while let Some(live) = server.next() {
                // A panic here would be one of the painting as well, and is told there.
                let room = catch_unwind(AssertUnwindSafe(|| painter.room(&live.order))).unwrap_or(1);
                let company = server.company(&live, room);
                server.work(painter.as_mut(), &[vec![live], company].concat());
            }
        })
    }

    fn work(&self, painter: &mut dyn Painter, lives: &[Arc<Live>]) {
        let mut turns = Vec::new();
        for live in lives {
            let mut watcher = Watcher::new(self, live, lives.len());
            match self.begin(live) {
                Ok(work) => turns.push((work, watcher)),
                Err(trouble) => watcher.ended(Err(trouble)),
            }
        }
        if self.paint(painter, &mut turns).is_ok() || turns.len() == 1 {
            return;
        }
        // Whose fault it was shows when they are alone.
        for turn in turns.iter_mut().filter(|(_, watcher)| !watcher.over) {
            turn.1.start_anew();
            let _ = self.paint(painter, std::slice::from_mut(turn));
        }
    }

    /// Notes that an order is begun.
    fn begin<'a>(&self, live: &'a Live) -> Result<Work<'a>, Trouble> {
        self.metrics.phase(Phase::Queue, live.came.elapsed());
        tracing::info!(
            job = live.id,
            client = live.client,
            waited_ms = live.came.elapsed().as_millis() as u64,
            "begun"
        );
        self.store.begin(&live.id).map_err(|error| Trouble::server("storage", error.to_string()))?;
        let work = self.files(live)?;
        live.change(|s| s.state = JobState::Running);
        Ok(work)
    }

    /// Paints these orders. After a panic those of several that had not ended stay so.
    fn paint(&self, painter: &mut dyn Painter, turns: &mut [(Work<'_>, Watcher<'_>)]) -> Result<(), Trouble> {
        let several = turns.len() > 1;
        let result = catch_unwind(AssertUnwindSafe(|| {
            let parts = turns.iter_mut();
            let parts = parts.map(|(work, watcher)| Part { work: work.clone(), watch: watcher });
            painter.paint(&mut parts.collect::<Vec<_>>());
        }));
        let result = result.map_err(|panic| {
            self.metrics.panicked();
            painter.reset();
            let what = format!("painting went wrong in an unforeseen way: {}", words(&panic));
            Trouble::server("panicked", what)
        });
        if result.is_ok() || !several {
            let silent = || Trouble::server("painting_failed", "painting ended without a word");
            for (_, watcher) in turns.iter_mut().filter(|(_, watcher)| !watcher.over) {
                watcher.ended(Err(result.clone().err().unwrap_or_else(silent)));
            }
        }
        result
    }

    /// The files of an order's pictures.
    fn files<'a>(&self, live: &'a Live) -> Result<Work<'a>, Trouble> {
        let inputs = self.store.inputs();
        let find = |name: &String| {
            inputs.path(name).ok_or_else(|| {
                Trouble::order("input_not_found", format!("the picture `{name}` is no longer there"))
            })
        };
        let order = &live.order;
        Ok(Work {
            order,
            references: order.references.iter().map(find).collect::<Result<_, _>>()?,
            init: order.init.as_ref().map(find).transpose()?,
            mask: order.mask.as_ref().map(find).transpose()?,
        })
    }

    /// Notes how an order ended; `took` is its share of the time that was spent.
    fn end(&self, live: &Live, result: Result<(), Trouble>, rows: &[PictureRow], took: Duration) {
        let (mut state, mut error) = match result {
            Ok(()) => (JobState::Done, None),
            Err(trouble) if trouble.blame == Blame::Cancelled => (JobState::Cancelled, Some(trouble)),
            Err(trouble) => (JobState::Failed, Some(trouble)),
        };
        if state == JobState::Cancelled && live.is_put_back() {
            error = Some(Trouble::server("shutting_down", "the server is stopping"));
            state = if live.attached { JobState::Failed } else { JobState::Queued };
        }
        let noted = match (state, &error) {
            (JobState::Queued, _) => self.store.put_back(&live.id),
            (state, error) => {
                let error = error.as_ref().map(|e| (e.code, e.message.as_str()));
                self.store.finish(&live.id, state, error, rows)
            }
        };
        if let Err(trouble) = noted {
            tracing::error!(job = live.id, error = %trouble, "an order's end could not be noted");
            if state == JobState::Done {
                state = JobState::Failed;
                error = Some(Trouble::server("storage", trouble.to_string()));
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
        if let Err(error) = self.store.tidy_now_and_then(self.config.keep) {
            tracing::warn!(%error, "old pictures could not be removed");
        }
    }
}

/// What a panic said.
fn words(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no words")
}

/// Takes what the painter tells to those who watch, and its pictures to the disk.
struct Watcher<'a> {
    server: &'a Server,
    live: &'a Arc<Live>,
    model: String,
    began: Instant,
    phase: Phase,
    since: Instant,
    previews: u32,
    rows: Vec<PictureRow>,
    /// Orders that were begun together, this one among them.
    company: usize,
    over: bool,
}

impl<'a> Watcher<'a> {
    fn new(server: &'a Server, live: &'a Arc<Live>, company: usize) -> Watcher<'a> {
        let now = Instant::now();
        let default = || server.catalogue.models().into_iter().find(|m| m.default).map(|m| m.name);
        let model = live.order.model.clone().or_else(default).unwrap_or_default();
        Watcher {
            server,
            live,
            model,
            began: now,
            phase: Phase::Queue,
            since: now,
            previews: 0,
            rows: Vec::new(),
            company,
            over: false,
        }
    }

    /// Forgets what was painted: all of it is painted again.
    fn start_anew(&mut self) {
        self.end_phase();
        (self.began, self.company) = (Instant::now(), 1);
        self.rows.clear();
        self.live.change(|s| s.pictures.clear());
    }

    fn is_late(&self) -> bool {
        self.began.elapsed() > self.server.config.longest
    }

    fn enter(&mut self, phase: Phase) {
        if self.phase != phase {
            self.end_phase();
            (self.phase, self.since) = (phase, Instant::now());
        }
    }

    fn end_phase(&mut self) {
        // Waiting was counted before.
        if self.phase != Phase::Queue {
            self.server.metrics.phase(self.phase, self.since.elapsed());
            self.phase = Phase::Queue;
        }
    }

    fn keep(&mut self, painted: Painted) -> Result<Made, Trouble> {
        let order = &self.live.order;
        let encoded = kiln_image::encode_as(&painted.picture, order.encoding(), Some(&painted.recipe));
        let bytes = Bytes::from(encoded.map_err(|error| Trouble::server("encoding", error.to_string()))?);
        let id = format!("{}-{}", self.live.id, painted.index);
        let row = PictureRow {
            file: format!("{id}.{}", order.output_format.format().extension()),
            id,
            job: self.live.id.clone(),
            number: painted.index,
            created: now(),
            width: painted.picture.width(),
            height: painted.picture.height(),
            seed: painted.seed.map(|seed| seed.to_string()),
            bytes: bytes.len() as u64,
            model: self.model.clone(),
            order: order.clone(),
            recipe: painted.recipe,
        };
        let written = self.server.store.write_picture(&row.file, &bytes);
        written.map_err(|error| Trouble::server("storage", error.to_string()))?;
        self.server.metrics.picture(bytes.len());
        Ok(Made { row, bytes })
    }
}

impl Watch for Watcher<'_> {
    fn cancelled(&self) -> bool {
        self.live.is_cancelled() || self.is_late()
    }

    fn together(&mut self, own: u32, all: u32) {
        self.server.metrics.together(own, all);
    }

    fn progress(&mut self, progress: Progress) {
        self.enter(progress.phase);
        let spent = self.began.elapsed().as_secs_f32();
        let done = progress.fraction.clamp(0.0, 1.0);
        let time_left = (done > ENOUGH_TO_GUESS).then(|| spent / done * (1.0 - done));
        self.live.change(|s| (s.progress, s.time_left) = (progress, time_left));
    }

    fn note(&mut self, text: &str) {
        self.live.change(|s| s.notes.push(text.to_owned()));
    }

    fn wants_preview(&self) -> bool {
        self.live.is_looked_at()
    }

    fn preview(&mut self, picture: Picture) {
        self.previews += 1;
        let preview = Arc::new(Preview { number: self.previews, picture });
        self.live.change(|s| s.preview = Some(preview));
    }

    fn painted(&mut self, painted: Painted) -> Result<(), Trouble> {
        self.enter(Phase::Save);
        let made = Arc::new(self.keep(painted)?);
        self.rows.push(made.row.clone());
        self.live.change(|s| s.pictures.push(made));
        Ok(())
    }

    fn ended(&mut self, result: Result<(), Trouble>) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        self.end_phase();
        let late = self.is_late() && !self.live.is_cancelled();
        let result = result.map_err(|trouble| match late && trouble.blame == Blame::Cancelled {
            true => Trouble::server("timeout", "painting this takes too long"),
            false => trouble,
        });
        let took = self.began.elapsed() / self.company.max(1) as u32;
        self.server.end(self.live, result, &std::mem::take(&mut self.rows), took);
    }
}
