//! A server alone: everything is in its own database and folder, and it runs its jobs itself.

use std::path::PathBuf;
use std::sync::Arc;

use crate::jobs::attempts::Attempts;
use crate::jobs::error::JobError;
use crate::jobs::health::Health;
use crate::jobs::job::JobEnd;
use crate::jobs::live::LiveJob;
use crate::jobs::roles::{Attempting, Keeping, Shutdown, SubmitError, Submitting};
use crate::jobs::sessions::Session;
use crate::jobs::store::{
    Claim, FileKind, Files, GalleryLimits, ImageRow, InputFiles, Marks, PlotRow, Store, StoreError,
};
use crate::jobs::{Slot, stopping_error};

type Result<T> = std::result::Result<T, StoreError>;

/// Takes jobs into the queue of this process.
pub(crate) struct Alone(pub(crate) Attempts);

impl Shutdown for Alone {
    fn close(&self) {
        self.0.close();
    }

    fn record_ends(&self) {
        self.0.record_ends();
    }
}

impl Submitting for Alone {
    fn submit(&self, live: &Arc<LiveJob>, place: Slot) -> std::result::Result<(), SubmitError> {
        // Not under the queue's lock: the generating thread takes it too and must not wait for the disk.
        let inserted = self.0.store.insert(live);
        drop(place);
        if let Some(earlier) = inserted.map_err(SubmitError::Store)? {
            return Err(SubmitError::Repeated(earlier));
        }
        if self.0.push(live) {
            return Ok(());
        }
        self.0.end_unstarted(live, stopping_error());
        Err(SubmitError::Stopping)
    }

    fn cancel(&self, id: &str) -> bool {
        let mut queue = self.0.queue();
        let Some(live) = queue.live.get(id).cloned() else { return false };
        live.cancel();
        let was_waiting = queue.waiting.remove(id);
        drop(queue);
        if was_waiting {
            self.0.end_unstarted(&live, JobError::cancelled());
        } else {
            self.0.wake_all();
        }
        true
    }

    fn reorder(&self, client: &str, order: &[String]) -> Result<()> {
        // Inside the transaction: of two orders that come at once, the same one is the last here and there.
        self.0.store.set_order(|| self.0.queue().waiting.reorder(client, order))
    }
}

/// The database and the folder of this process.
#[derive(Clone)]
pub(crate) struct Local(pub(crate) Arc<Store>);

impl Attempting for Local {
    fn start(&self, id: &str) -> Result<()> {
        self.0.start(id)
    }

    fn undo_start(&self, id: &str) -> Result<()> {
        self.0.undo_start(id)
    }

    fn finish(&self, end: &JobEnd) -> Result<bool> {
        self.0.finish(end).map(|()| true)
    }

    fn save_image(&self, image: &ImageRow) -> Result<()> {
        self.0.insert_image(image, None)
    }

    fn delete_images_of(&self, job: &str) -> Result<()> {
        self.0.delete_images_of(job)
    }

    fn clean_up_occasionally(&self, limits: GalleryLimits) -> Result<()> {
        self.0.clean_up_occasionally(limits)
    }
}

impl Keeping for Local {
    fn delete_image(&self, id: &str) -> Result<bool> {
        self.0.delete_image(id)
    }

    fn mark(&self, ids: &[String], marks: Marks) -> Result<Option<String>> {
        self.0.mark(ids, marks)
    }

    fn insert_plot(&self, plot: &PlotRow) -> Result<()> {
        self.0.insert_plot(plot)
    }

    fn insert_session(&self, session: &Session) -> Result<()> {
        self.0.insert_session(session)
    }

    fn delete_session(&self, session: &Session) -> Result<()> {
        self.0.delete_session(session)
    }

    fn remove_webhook(&self, job: &str) -> Result<()> {
        self.0.remove_webhook(job)
    }

    fn claim_input(&self, name: &str, client: &str, bytes: u64, quota: u64) -> Result<Claim> {
        self.0.inputs().claim(name, client, bytes, quota)
    }

    fn touch_input(&self, name: &str, client: &str) -> Result<()> {
        self.0.inputs().touch(name, client)
    }
}

impl Health for Local {
    fn check(&self) -> Result<()> {
        self.0.check()
    }
}

impl Files for Local {
    fn name(&self, id: &str, extension: &str, _: &[u8]) -> String {
        format!("{id}.{extension}")
    }

    fn put(&self, kind: FileKind, name: &str, bytes: &[u8]) -> Result<()> {
        match kind {
            FileKind::Image => self.0.write_image(name, bytes),
            FileKind::Input => self.0.inputs().insert(name, bytes),
        }
    }

    fn path(&self, kind: FileKind, name: &str) -> Result<Option<PathBuf>> {
        Ok(match kind {
            FileKind::Image => Some(self.0.image_path(name)).filter(|path| path.is_file()),
            FileKind::Input => self.0.inputs().path(name),
        })
    }

    fn remove(&self, kind: FileKind, name: &str) {
        match kind {
            FileKind::Image => self.0.remove_files(name),
            FileKind::Input => {
                let _ = std::fs::remove_file(self.0.inputs().file_path(InputFiles::hash(name)));
            }
        }
    }
}
