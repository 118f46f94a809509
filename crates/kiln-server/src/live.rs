//! A job while it waits or is generated, and what those who watch it see.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kiln_engine::{Progress, Request};
use kiln_image::Picture;
use tokio::sync::watch;

use crate::generator::JobError;
use crate::store::{JobState, PictureRow, now};

/// A finished image with its file's bytes.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) row: PictureRow,
    pub(crate) bytes: Bytes,
}

/// What an image looks like so far.
#[derive(Debug)]
pub(crate) struct Preview {
    /// Counts from 1 in each job.
    pub(crate) number: u32,
    pub(crate) picture: Picture,
}

/// The state of a job. Those who look seldom see the latest, and nothing piles up for them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) state: JobState,
    pub(crate) progress: Progress,
    /// Seconds that the rest will take.
    pub(crate) time_left: Option<f32>,
    pub(crate) notes: Vec<String>,
    pub(crate) preview: Option<Arc<Preview>>,
    pub(crate) pictures: Vec<Arc<Made>>,
    pub(crate) error: Option<JobError>,
}

/// Which API a job came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    Jobs,
    OpenAi,
    A1111,
}

/// A job that is not finished.
pub(crate) struct Live {
    pub(crate) id: String,
    pub(crate) client: String,
    pub(crate) request: Request,
    pub(crate) via: Via,
    /// Somebody waits for it on a connection.
    pub(crate) attached: bool,
    /// A process ended while it was generated: nothing else is generated or planned beside it, so that it takes no other
    /// job with it.
    pub(crate) alone: bool,
    pub(crate) came: Instant,
    pub(crate) created: i64,
    /// Its images were read, or never will be.
    planned: AtomicBool,
    cancelled: AtomicBool,
    put_back: AtomicBool,
    lookers: AtomicUsize,
    looked: AtomicI64,
    snapshot: watch::Sender<Snapshot>,
}

impl Live {
    pub(crate) fn new(id: String, client: String, request: Request, via: Via, attached: bool) -> Live {
        Live {
            id,
            client,
            request,
            via,
            attached,
            alone: false,
            came: Instant::now(),
            created: now(),
            planned: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            put_back: AtomicBool::new(false),
            lookers: AtomicUsize::new(0),
            looked: AtomicI64::new(0),
            snapshot: watch::Sender::new(Snapshot::default()),
        }
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Snapshot> {
        self.snapshot.subscribe()
    }

    pub(crate) fn now(&self) -> Snapshot {
        self.snapshot.borrow().clone()
    }

    pub(crate) fn state(&self) -> JobState {
        self.snapshot.borrow().state
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        self.snapshot.send_modify(change);
    }

    pub(crate) fn set_planned(&self) {
        self.planned.store(true, SeqCst);
    }

    pub(crate) fn is_planned(&self) -> bool {
        self.planned.load(SeqCst)
    }

    /// Asks the generator to stop.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, SeqCst);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(SeqCst)
    }

    /// Asks the generator to stop, and leaves the job to the next start.
    pub(crate) fn put_back(&self) {
        self.put_back.store(true, SeqCst);
        self.cancel();
    }

    pub(crate) fn is_put_back(&self) -> bool {
        self.put_back.load(SeqCst)
    }

    /// Somebody looks at previews as long as the guard lives.
    pub(crate) fn look(self: &Arc<Self>) -> Looking {
        self.lookers.fetch_add(1, SeqCst);
        Looking(Arc::clone(self))
    }

    /// Somebody looked just now, and may do so again.
    pub(crate) fn glance(&self) {
        self.looked.store(now(), SeqCst);
    }

    pub(crate) fn is_looked_at(&self) -> bool {
        const RECENT: Duration = Duration::from_secs(10);
        self.lookers.load(SeqCst) > 0 || now() - self.looked.load(SeqCst) < RECENT.as_millis() as i64
    }
}

/// See [`Live::look`].
pub(crate) struct Looking(Arc<Live>);

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.lookers.fetch_sub(1, SeqCst);
    }
}
