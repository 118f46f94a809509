//! The server's state: the queue, what is live in it, and what those who ask are answered.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use kiln_base::{lock, wait};
use kiln_engine::{FileRef, Request};
use tokio::sync::{Semaphore, watch};

use crate::auth::Keys;
use crate::decoded::Decoded;
use crate::generator::{Blame, Catalogue, JobError, name};
use crate::limits::Limits;
use crate::live::{Live, Via};
use crate::metrics::{Gauges, Metrics};
use crate::schedule::{Schedule, Waiting};
use crate::store::{JobRow, JobState, Store, StoreError};

/// A job that ended the whole server this often is not tried again.
const MOST_ATTEMPTS: u32 = 2;

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the queue's database and of the images.
    pub folder: PathBuf,
    /// What clients have to know to be let in.
    pub api_key: Option<String>,
    /// Names that the server goes by, beside those of this machine for itself; a browser must have asked for one of them.
    pub hosts: Vec<String>,
    /// What may be asked for.
    pub limits: Limits,
    /// Images that are kept; the oldest make room.
    pub keep: u32,
    /// How long jobs may go on when the server is told to stop, before they are put back into the queue.
    pub grace: Duration,
    /// How long one job may take.
    pub longest: Duration,
    /// How long a request may take to arrive, and an answer's next bytes to be taken.
    pub patience: Duration,
}

impl Config {
    /// The usual setup, with its data in `folder`: this machine only, and no key.
    pub fn new(folder: impl Into<PathBuf>) -> Config {
        Config {
            folder: folder.into(),
            api_key: None,
            hosts: Vec::new(),
            limits: Limits::default(),
            keep: 10_000,
            grace: Duration::from_secs(20),
            longest: Duration::from_secs(3600),
            patience: Duration::from_secs(30),
        }
    }
}

/// The server's state, shared by everything that answers requests.
#[derive(Clone)]
pub struct Server(Arc<Inner>);

/// What the parts of the server share.
pub struct Inner {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) metrics: Metrics,
    pub(crate) catalogue: Box<dyn Catalogue>,
    pub(crate) keys: Keys,
    pub(crate) decoded: Decoded,
    /// KiB of requests that may be in memory.
    pub(crate) bodies: Arc<Semaphore>,
    pub(crate) closing: watch::Sender<bool>,
    queue: Mutex<Queue>,
    wake: Condvar,
    ready: AtomicBool,
}

#[derive(Default)]
struct Queue {
    schedule: Schedule,
    live: HashMap<String, Arc<Live>>,
    /// The clients of jobs that are being written to the database.
    arriving: Vec<String>,
    /// Jobs that were taken and have not ended, oldest first; those that wait for the generator are `queued`.
    running: Vec<Arc<Live>>,
    stopping: bool,
}

impl Queue {
    /// Jobs that are planned and wait for the generator.
    fn planned(&self) -> impl Iterator<Item = &Arc<Live>> {
        self.running.iter().filter(|live| live.state() == JobState::Queued)
    }

    fn waiting(&self) -> usize {
        self.schedule.len() + self.arriving.len() + self.planned().count()
    }

    fn enter(&mut self, waiting: Waiting, live: Arc<Live>) {
        self.schedule.push(waiting);
        self.live.insert(live.id.clone(), live);
    }
}

/// What a planned group does next.
pub(crate) enum Turn {
    /// It is generated.
    Go,
    /// These can be generated with it.
    Join(Vec<Arc<Live>>),
    /// One of it is cancelled.
    Cancelled,
    /// The server stops.
    Stop,
}

/// Why a job was not taken.
#[derive(Debug)]
pub(crate) enum Refused {
    /// There are too many; try again in so many seconds.
    Full {
        seconds: u64,
        own: bool,
    },
    Closing,
    Store(StoreError),
}

impl std::ops::Deref for Server {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Server {
    /// Opens the folder, and takes up what was left unfinished in it.
    pub fn open(config: Config, catalogue: Box<dyn Catalogue>) -> Result<Server, StoreError> {
        let store = Store::open(&config.folder)?;
        let server = Server(Arc::new(Inner {
            keys: Keys::new(config.api_key.as_deref()),
            decoded: Decoded::default(),
            bodies: Arc::new(Semaphore::new(config.limits.bodies.max(config.limits.body) / 1024)),
            closing: watch::Sender::new(false),
            queue: Mutex::default(),
            wake: Condvar::new(),
            ready: AtomicBool::new(false),
            metrics: Metrics::default(),
            config,
            store,
            catalogue,
        }));
        server.take_up()?;
        Ok(server)
    }

    fn take_up(&self) -> Result<(), StoreError> {
        for job in self.store.unfinished()? {
            let gone = match () {
                () if job.attached => Some("the server was started anew while the client waited"),
                () if job.attempts >= MOST_ATTEMPTS => {
                    Some("the server ended while it generated this, more than once; it is not tried again")
                }
                () => None,
            };
            match gone {
                Some(why) => self.store.finish(&job.id, JobState::Failed, Some(("interrupted", why)), &[])?,
                None => {
                    tracing::info!(job = job.id, "taken up again");
                    self.store.requeue(&job.id)?;
                    let mut live = Live::new(job.id, job.client, job.request, Via::Jobs, false);
                    live.alone = job.attempts > 0;
                    let waiting = self.waiting(&live);
                    self.queue().enter(waiting, Arc::new(live));
                }
            }
        }
        self.store.tidy(self.config.keep)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Takes a job. `attached` ones are waited for on a connection.
    pub(crate) fn submit(
        &self,
        mut request: Request,
        client: &str,
        via: Via,
        attached: bool,
    ) -> Result<Arc<Live>, Refused> {
        // Chosen now, so that it is the same image if it has to be generated again.
        if request.seed.is_empty() {
            let seed = random::<4>().iter().fold(0u32, |n, byte| n << 8 | u32::from(*byte));
            request.seed = vec![seed.into()];
        }
        // Clients are told what they get.
        request.output_format.get_or_insert_default();
        request.png.get_or_insert_default();
        let id = random::<12>().iter().map(|byte| format!("{byte:02x}")).collect();
        let live = Arc::new(Live::new(id, client.to_owned(), request, via, attached));
        let waiting = self.waiting(&live);
        let row = JobRow {
            id: live.id.clone(),
            client: live.client.clone(),
            attached,
            request: live.request.clone(),
            state: JobState::Queued,
            attempts: 0,
            created: live.created,
            started: None,
            finished: None,
            error: None,
        };
        self.reserve(client)?;
        // Not under the lock: the thread that generates takes it, too, and must not wait for a disk.
        let kept = self.store.insert(&row);
        {
            let mut queue = self.queue();
            if let Some(place) = queue.arriving.iter().position(|arriving| arriving == client) {
                queue.arriving.swap_remove(place);
            }
            kept.map_err(Refused::Store)?;
            if !queue.stopping {
                queue.enter(waiting, Arc::clone(&live));
                drop(queue);
                self.wake.notify_all();
                return Ok(live);
            }
        }
        self.end_unbegun(&live, stopping());
        Err(Refused::Closing)
    }

    /// Takes a place in the queue for a job of this client.
    fn reserve(&self, client: &str) -> Result<(), Refused> {
        let capacity = self.config.limits.queue;
        let mut queue = self.queue();
        if queue.stopping {
            return Err(Refused::Closing);
        }
        let own = queue.live.values().map(|live| &live.client).chain(&queue.arriving);
        // Half of the places are for others.
        let own = own.filter(|other| *other == client).count() > capacity / 2;
        if queue.waiting() >= capacity || own {
            let seconds = self.seconds_for(if own { 1 } else { queue.waiting() / 4 + 1 });
            self.metrics.refused();
            return Err(Refused::Full { seconds, own });
        }
        queue.arriving.push(client.to_owned());
        Ok(())
    }

    fn waiting(&self, live: &Live) -> Waiting {
        Waiting {
            id: live.id.clone(),
            client: live.client.clone(),
            group: self.group(&live.request),
            alike: self.alike(live),
            images: images(&live.request),
            cost: self.cost(&live.request),
        }
    }

    /// What has to be the same for two jobs to run one after the other without loading anything.
    fn group(&self, request: &Request) -> String {
        let loras: Vec<_> = request.loras.iter().map(|lora| (&lora.path, lora.weight)).collect();
        let size = (request.width, request.height, request.references.len(), request.init.is_some());
        format!("{:?}", (&request.model, loras, &request.vae, size))
    }

    /// What has to be the same for two jobs to be generated at once. The generator looks again, and more closely.
    fn alike(&self, live: &Live) -> Option<String> {
        let request = &live.request;
        let sampling = (request.steps, request.guidance, &request.sigmas, request.schedule, request.rho);
        let start = (request.mask.is_some(), request.strength, request.max_tokens);
        (!live.alone).then(|| format!("{} {sampling:?} {start:?}", self.group(request)))
    }

    /// Pixels times steps, in millions.
    fn cost(&self, request: &Request) -> f64 {
        let models = self.catalogue.models();
        let asked = request.model.as_deref().map(name);
        let named = models.iter().find(|m| asked.map_or(m.default, |name| *name == m.name));
        let (size, steps) = named.map_or((1024, 4), |m| (m.size, m.steps));
        let pixels = f64::from(request.width.unwrap_or(size)) * f64::from(request.height.unwrap_or(size));
        let steps = request.steps.unwrap_or(match request.sigmas.len() {
            0 => steps,
            levels => levels as u32,
        });
        let work = pixels * f64::from(steps) * f64::from(images(request));
        // References are looked at in every step.
        (work * (1.0 + request.images().count() as f64) / 1e6).max(1e-3)
    }

    /// Seconds until so many jobs are done, by the recent ones.
    fn seconds_for(&self, jobs: usize) -> u64 {
        let each = self.metrics.recent().unwrap_or(2.0);
        (each * jobs as f64).ceil().clamp(1.0, 600.0) as u64
    }

    /// Waits until `found` finds something in the queue.
    fn wait<T>(&self, mut found: impl FnMut(&mut Queue) -> Option<T>) -> T {
        let mut queue = self.queue();
        loop {
            if let Some(found) = found(&mut queue) {
                return found;
            }
            queue = wait(&self.wake, queue);
        }
    }

    /// Has those that wait look again.
    pub(crate) fn wake_all(&self) {
        // Nobody is between looking and waiting while this is held.
        drop(self.queue());
        self.wake.notify_all();
    }

    /// Waits for the next job; `None` when the server is to stop.
    pub(crate) fn next(&self) -> Option<Arc<Live>> {
        self.wait(|queue| {
            if queue.stopping {
                return Some(None);
            }
            let live = queue.schedule.take().and_then(|job| queue.live.get(&job.id).cloned())?;
            queue.running.push(Arc::clone(&live));
            Some(Some(live))
        })
    }

    /// Waits for what comes first: jobs that can join this group of up to `room` more images, one of its `members` being
    /// cancelled, or the generator being `free`. No group waits for company.
    pub(crate) fn turn(&self, first: &Live, room: u32, free: &AtomicBool, members: &[&Live]) -> Turn {
        let alike = self.alike(first);
        self.wait(|queue| {
            if queue.stopping {
                return Some(Turn::Stop);
            }
            if members.iter().any(|live| live.is_cancelled()) {
                return Some(Turn::Cancelled);
            }
            let company = alike.as_ref().map_or(Vec::new(), |alike| queue.take_alike(alike, room));
            if !company.is_empty() {
                return Some(Turn::Join(company));
            }
            free.swap(false, SeqCst).then_some(Turn::Go)
        })
    }

    /// Waits until every other job has ended; `false` when the server is to stop.
    pub(crate) fn wait_until_only(&self, live: &Live) -> bool {
        self.wait(|queue| match &queue.running[..] {
            _ if queue.stopping => Some(false),
            _ if live.is_cancelled() => Some(true),
            [one] if one.id == live.id => Some(true),
            _ => None,
        })
    }

    /// Waits until this job has ended, or the server is to stop.
    pub(crate) fn wait_until_left(&self, live: &Live) {
        self.wait(|queue| {
            let left = queue.running.iter().all(|running| running.id != live.id);
            (left || queue.stopping).then_some(())
        });
    }

    /// Forgets a job that was taken and not begun, when the server stops: it still waits in the database.
    pub(crate) fn leave_unbegun(&self, live: &Live) {
        self.leave(&live.id);
        live.change(|s| s.error = Some(stopping()));
    }

    /// Notes that a job has ended, and forgets it.
    pub(crate) fn leave(&self, id: &str) {
        {
            let mut queue = self.queue();
            queue.live.remove(id);
            queue.running.retain(|live| live.id != id);
        }
        self.wake.notify_all();
    }

    /// A job needs its images no more: drops the pixels of those that no other job waits for.
    pub(crate) fn forget_images(&self, live: &Live) {
        live.set_planned();
        let unneeded: Vec<&FileRef> = {
            let queue = self.queue();
            let needed = |image: &FileRef| {
                let mut others = queue.live.values().filter(|other| !other.is_planned());
                others.any(|other| other.request.images().any(|other| other == image))
            };
            live.request.images().filter(|image| !needed(image)).collect()
        };
        unneeded.iter().for_each(|image| self.decoded.forget(name(&image.path)));
    }

    /// Stops a job, wherever it is; whether there was one to stop.
    pub(crate) fn cancel(&self, id: &str) -> bool {
        let mut queue = self.queue();
        let Some(live) = queue.live.get(id).cloned() else { return false };
        live.cancel();
        if queue.schedule.remove(id) {
            queue.live.remove(id);
            drop(queue);
            self.end_unbegun(&live, JobError::cancelled());
        } else {
            drop(queue);
            self.wake.notify_all();
        }
        true
    }

    /// Ends a job that was never begun.
    fn end_unbegun(&self, live: &Live, error: JobError) {
        self.forget_images(live);
        let state = match error.blame {
            Blame::Cancelled => JobState::Cancelled,
            _ => JobState::Failed,
        };
        if let Err(error) = self.store.finish(&live.id, state, Some((error.code, &error.message)), &[]) {
            tracing::error!(job = live.id, %error, "a job's end could not be noted");
        }
        self.metrics.job(state, None, Duration::ZERO);
        tracing::info!(job = live.id, client = live.client, state = state.name(), "ended in the queue");
        live.change(|s| (s.state, s.error) = (state, Some(error)));
    }

    /// A job that has not ended.
    pub(crate) fn live(&self, id: &str) -> Option<Arc<Live>> {
        self.queue().live.get(id).cloned()
    }

    /// Jobs that are begun and have not ended, oldest first.
    pub(crate) fn running(&self) -> Vec<Arc<Live>> {
        self.queue().running.clone()
    }

    /// Jobs before this one, if it waits.
    pub(crate) fn position(&self, id: &str) -> Option<usize> {
        let queue = self.queue();
        match queue.schedule.before(id) {
            Some(before) => Some(before + queue.planned().count()),
            None => queue.planned().position(|live| live.id == id),
        }
    }

    pub(crate) fn gauges(&self) -> Gauges {
        let (waiting, running) = {
            let queue = self.queue();
            (queue.waiting(), queue.running.len() - queue.planned().count())
        };
        let kept = self.store.count_pictures().unwrap_or(0);
        Gauges { waiting, running, capacity: self.config.limits.queue, kept }
    }

    pub(crate) fn set_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Whether jobs are generated: the model is there, and the server is not about to stop.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst) && !*self.closing.borrow()
    }

    /// Takes no more jobs; what waits stays in the database, unless its client waits on a connection.
    pub fn close(&self) {
        let waiting: Vec<Arc<Live>> = {
            let mut queue = self.queue();
            queue.stopping = true;
            let runs = |live: &Live| queue.running.iter().any(|running| running.id == live.id);
            queue.live.values().filter(|live| !runs(live)).cloned().collect()
        };
        self.wake.notify_all();
        for live in waiting {
            if live.attached {
                self.end_unbegun(&live, stopping());
            } else {
                live.change(|s| s.error = Some(stopping()));
            }
        }
        self.closing.send_replace(true);
    }

    /// Puts the jobs that are begun back into the queue.
    pub(crate) fn interrupt(&self) {
        self.running().iter().for_each(|live| live.put_back());
    }
}

impl Queue {
    /// Takes jobs that wait and are alike, up to so many images.
    fn take_alike(&mut self, alike: &str, mut room: u32) -> Vec<Arc<Live>> {
        let mut company = Vec::new();
        while room > 0 {
            let Some(job) = self.schedule.take_alike(alike, room) else { break };
            room -= job.images.min(room);
            company.extend(self.live.get(&job.id).cloned());
        }
        self.running.extend(company.iter().cloned());
        company
    }
}

pub(crate) fn stopping() -> JobError {
    JobError::server("shutting_down", "the server is stopping")
}

/// How many images a request asks for.
pub(crate) fn images(request: &Request) -> u32 {
    u32::try_from(request.image_count()).unwrap_or(u32::MAX)
}

/// A job that ends when nobody waits for it any more.
pub(crate) struct Attached {
    server: Server,
    pub(crate) live: Arc<Live>,
}

impl Attached {
    pub(crate) fn new(server: &Server, live: Arc<Live>) -> Attached {
        Attached { server: server.clone(), live }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if !self.live.now().state.is_final() {
            tracing::info!(job = self.live.id, "the client went away");
            self.server.cancel(&self.live.id);
        }
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without random numbers no names can be made up; the system has none only while it starts.
    if getrandom::fill(&mut bytes).is_err() {
        std::process::abort();
    }
    bytes
}
