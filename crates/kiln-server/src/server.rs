//! The server's state: the queue, what is live in it, and what those who ask are answered.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use crate::Order;
use crate::auth::Keys;
use crate::engine::{Catalogue, Trouble};
use crate::limits::Limits;
use crate::live::{Live, Via};
use crate::metrics::{Gauges, Metrics};
use crate::schedule::{Schedule, Waiting};
use crate::store::{JobRow, JobState, Store, StoreError};

/// An order that stopped the whole server so often is not tried again.
const MOST_ATTEMPTS: u32 = 2;

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the queue's database and of the pictures.
    pub folder: PathBuf,
    /// What clients have to know to be let in.
    pub api_key: Option<String>,
    /// Names that the server goes by, beside those of this machine for itself; a browser must have asked for one of them.
    pub hosts: Vec<String>,
    /// What may be asked for.
    pub limits: Limits,
    /// Pictures that are kept; the oldest make room.
    pub keep: u32,
    /// How long an order may go on when the server is told to stop, before it is put back into the queue.
    pub grace: Duration,
    /// How long one order may be painted.
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
    running: Vec<Arc<Live>>,
    stopping: bool,
}

/// Why an order was not taken.
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
                    Some("the server ended while it painted this, more than once; it is not tried again")
                }
                () => None,
            };
            match gone {
                Some(why) => self.store.finish(&job.id, JobState::Failed, Some(("interrupted", why)), &[])?,
                None => {
                    tracing::info!(job = job.id, "taken up again");
                    self.store.requeue(&job.id)?;
                    let mut live = Live::new(job.id, job.client, job.order, Via::Jobs, false);
                    live.alone = job.attempts > 0;
                    self.enter(&mut self.queue(), Arc::new(live));
                }
            }
        }
        self.store.tidy(self.config.keep)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an order. `attached` ones are waited for on a connection.
    pub(crate) fn submit(
        &self,
        mut order: Order,
        client: &str,
        via: Via,
        attached: bool,
    ) -> Result<Arc<Live>, Refused> {
        // Chosen now, so that it is the same picture if it has to be painted again.
        order.seed =
            Some(order.seed.unwrap_or_else(|| {
                u64::from(random::<4>().iter().fold(0u32, |n, b| n << 8 | u32::from(*b)))
            }));
        let capacity = self.config.limits.queue;
        let id = random::<12>().iter().map(|byte| format!("{byte:02x}")).collect();
        let live = Arc::new(Live::new(id, client.to_owned(), order, via, attached));
        let mut queue = self.queue();
        if queue.stopping {
            return Err(Refused::Closing);
        }
        // Half of the places are for others.
        let own = queue.live.values().filter(|other| other.client == client).count() > capacity / 2;
        if queue.schedule.len() >= capacity || own {
            let seconds = self.seconds_for(if own { 1 } else { queue.schedule.len() / 4 + 1 });
            self.metrics.refused();
            return Err(Refused::Full { seconds, own });
        }
        let row = JobRow {
            id: live.id.clone(),
            client: live.client.clone(),
            attached,
            order: live.order.clone(),
            state: JobState::Queued,
            attempts: 0,
            created: live.created,
            started: None,
            finished: None,
            error: None,
        };
        self.store.insert(&row).map_err(Refused::Store)?;
        self.enter(&mut queue, Arc::clone(&live));
        drop(queue);
        self.wake.notify_one();
        Ok(live)
    }

    fn enter(&self, queue: &mut Queue, live: Arc<Live>) {
        queue.schedule.push(Waiting {
            id: live.id.clone(),
            client: live.client.clone(),
            group: self.group(&live.order),
            alike: self.alike(&live),
            pictures: live.order.pictures(),
            cost: self.cost(&live.order),
        });
        queue.live.insert(live.id.clone(), live);
    }

    /// What has to be the same for two orders to be painted one after the other without loading anything.
    fn group(&self, order: &Order) -> String {
        let loras: Vec<String> = order.loras.iter().map(|l| format!("{}:{}", l.name, l.weight)).collect();
        let size = (order.width, order.height, order.references.len(), order.init.is_some());
        format!("{:?} {} {size:?}", order.model, loras.join("+"))
    }

    /// What has to be the same for two orders to be painted at once. The painter looks again, and more closely.
    fn alike(&self, live: &Live) -> Option<String> {
        let order = &live.order;
        let way = (order.steps, order.guidance, order.mask.is_some(), order.strength);
        (!live.alone).then(|| format!("{} {way:?}", self.group(order)))
    }

    /// Pixels times steps, in millions.
    fn cost(&self, order: &Order) -> f64 {
        let models = self.catalogue.models();
        let named = models.iter().find(|m| order.model.as_ref().map_or(m.default, |name| *name == m.name));
        let (size, steps) = named.map_or((1024, 4), |m| (m.size, m.steps));
        let pixels = f64::from(order.width.unwrap_or(size)) * f64::from(order.height.unwrap_or(size));
        let work = pixels * f64::from(order.steps.unwrap_or(steps)) * f64::from(order.pictures());
        // References are looked at in every step.
        (work * (1.0 + order.sources().count() as f64) / 1e6).max(1e-3)
    }

    /// Seconds until so many orders are done, by those of late.
    fn seconds_for(&self, orders: usize) -> u64 {
        let each = self.metrics.recent().unwrap_or(2.0);
        (each * orders as f64).ceil().clamp(1.0, 600.0) as u64
    }

    /// Waits for the next order; `None` when the server is to stop.
    pub(crate) fn next(&self) -> Option<Arc<Live>> {
        let mut queue = self.queue();
        loop {
            if queue.stopping {
                return None;
            }
            let next = queue.schedule.take().and_then(|order| queue.live.get(&order.id).cloned());
            if let Some(live) = next {
                queue.running = vec![Arc::clone(&live)];
                return Some(live);
            }
            queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Orders that wait and can be painted at once with this one, which is about to be, up to so many pictures in all.
    /// Nobody is waited for.
    pub(crate) fn company(&self, first: &Live, room: u32) -> Vec<Arc<Live>> {
        let mut room = room.saturating_sub(first.order.pictures());
        let Some(alike) = self.alike(first) else { return Vec::new() };
        let mut queue = self.queue();
        let mut company = Vec::new();
        while room > 0 && !queue.stopping {
            let Some(order) = queue.schedule.take_alike(&alike, room) else { break };
            room -= order.pictures.min(room);
            company.extend(queue.live.get(&order.id).cloned());
        }
        queue.running.extend(company.iter().cloned());
        company
    }

    /// Notes that an order is no longer painted, and forgets it.
    pub(crate) fn leave(&self, id: &str) {
        let mut queue = self.queue();
        queue.live.remove(id);
        queue.running.retain(|live| live.id != id);
    }

    /// Stops an order, wherever it is; whether there was one to stop.
    pub(crate) fn cancel(&self, id: &str) -> bool {
        let mut queue = self.queue();
        let Some(live) = queue.live.get(id).cloned() else { return false };
        live.cancel();
        if queue.schedule.remove(id) {
            queue.live.remove(id);
            drop(queue);
            self.end_unbegun(&live, Trouble::cancelled());
        }
        true
    }

    /// Ends an order that was never begun.
    fn end_unbegun(&self, live: &Live, trouble: Trouble) {
        let state = match trouble.blame {
            crate::engine::Blame::Cancelled => JobState::Cancelled,
            _ => JobState::Failed,
        };
        if let Err(error) = self.store.finish(&live.id, state, Some((trouble.code, &trouble.message)), &[]) {
            tracing::error!(job = live.id, %error, "an order's end could not be noted");
        }
        self.metrics.job(state, None, Duration::ZERO);
        tracing::info!(job = live.id, client = live.client, state = state.name(), "ended in the queue");
        live.change(|s| (s.state, s.error) = (state, Some(trouble)));
    }

    /// An order that waits or is painted.
    pub(crate) fn live(&self, id: &str) -> Option<Arc<Live>> {
        self.queue().live.get(id).cloned()
    }

    /// The orders that are painted.
    pub(crate) fn running(&self) -> Vec<Arc<Live>> {
        self.queue().running.clone()
    }

    /// Orders before this one, if it waits.
    pub(crate) fn position(&self, id: &str) -> Option<usize> {
        self.queue().schedule.before(id)
    }

    pub(crate) fn gauges(&self) -> Gauges {
        let (waiting, running) = {
            let queue = self.queue();
            (queue.schedule.len(), queue.running.len())
        };
        let kept = self.store.count_pictures().unwrap_or(0);
        Gauges { waiting, running, capacity: self.config.limits.queue, kept }
    }

    pub(crate) fn set_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Whether orders are painted: the model is there, and the server is not about to stop.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst) && !*self.closing.borrow()
    }

    /// Takes no more orders; what waits stays in the database, unless its client waits on a connection.
    pub fn close(&self) {
        let waiting: Vec<Arc<Live>> = {
            let mut queue = self.queue();
            queue.stopping = true;
            let runs = |live: &Live| queue.running.iter().any(|running| running.id == live.id);
            queue.live.values().filter(|live| !runs(live)).cloned().collect()
        };
        self.wake.notify_all();
        for live in waiting {
            let stopping = Trouble::server("shutting_down", "the server is stopping");
            match live.attached {
                true => self.end_unbegun(&live, stopping),
                false => live.change(|s| s.error = Some(stopping)),
            }
        }
        self.closing.send_replace(true);
    }

    /// Puts the orders that are painted back into the queue.
    pub(crate) fn interrupt(&self) {
        self.running().iter().for_each(|live| live.put_back());
    }
}

/// An order that ends when nobody waits for it any more.
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
