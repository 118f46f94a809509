//! The server: the jobs, and what their clients need besides.

use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;

use axum::extract::FromRef;

use crate::http::api::a1111::choice::A1111Options;
use crate::http::api::body::BodyReader;
use crate::http::api::origin::Verifier;
use crate::http::auth::Auth;
use crate::http::body_budget::{BodyBudget, SMALL_BODY};
use crate::http::config::Config;
use crate::http::webhooks::Webhooks;
use crate::jobs::Jobs;
use crate::jobs::alone::{Alone, Local};
use crate::jobs::attempts::Attempts;
use crate::jobs::downloads::Downloads;
use crate::jobs::generator::{Catalogue, Generator};
use crate::jobs::intake::Intake;
use crate::jobs::keys::ApiKey;
use crate::jobs::roles::Shutdown;
use crate::jobs::store::{Store, StoreError};
use crate::jobs::trainer::Trainer;
use crate::jobs::trainings::Trainings;

/// A handle to the server. Clones share the same state.
#[derive(Clone)]
pub struct Server(Arc<ServerState>);

/// The shared state behind a [`Server`].
pub struct ServerState {
    pub(crate) config: Arc<Config>,
    pub(crate) intake: Intake,
    /// What generates, unless other processes do.
    attempts: Option<Attempts>,
    pub(crate) auth: Arc<Auth>,
    body_budget: Arc<BodyBudget>,
    downloads: Arc<Downloads>,
    /// The trainings, if they are allowed.
    pub(crate) trainings: OnceLock<Arc<Trainings>>,
    a1111: Arc<A1111Options>,
    verifier: Arc<Verifier>,
    pub(crate) webhooks: Arc<Webhooks>,
}

/// A handle that doesn't keep the server's state alive.
pub(crate) struct WeakServer(Weak<ServerState>);

impl WeakServer {
    pub(crate) fn upgrade(&self) -> Option<Server> {
        self.0.upgrade().map(Server)
    }
}

impl std::ops::Deref for Server {
    type Target = ServerState;

    fn deref(&self) -> &ServerState {
        &self.0
    }
}

/// Parts of the server that handlers take.
macro_rules! parts {
    ($($(#[$doc:meta])* $part:ty: |$server:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        impl FromRef<Server> for $part {
            fn from_ref($server: &Server) -> $part {
                $value
            }
        }
    )*};
}

parts! {
    Jobs: |server| server.jobs().clone();
    Intake: |server| server.intake.clone();
    Arc<Auth>: |server| Arc::clone(&server.auth);
    Arc<Webhooks>: |server| Arc::clone(&server.webhooks);
    Arc<A1111Options>: |server| Arc::clone(&server.a1111);
    Arc<Verifier>: |server| Arc::clone(&server.verifier);
    Arc<Downloads>: |server| Arc::clone(&server.downloads);
    BodyReader: |server| {
        BodyReader { config: Arc::clone(&server.config), budget: Arc::clone(&server.body_budget) }
    };
    /// The trainings, if they are allowed.
    Option<Arc<Trainings>>: |server| server.trainings.get().cloned();
}

impl Server {
    /// Opens the data folder and puts unfinished jobs back into the queue.
    pub fn open(config: Config, catalogue: Arc<dyn Catalogue>) -> Result<Server, StoreError> {
        let store = Arc::new(Store::open(&config.folder)?);
        let local = Local(Arc::clone(&store));
        let (files, health) = (Box::new(local.clone()), Box::new(local.clone()));
        let jobs = Jobs::new(config.of_jobs(), catalogue, store, files, health);
        let attempts = Attempts::new(jobs.clone(), Box::new(local.clone()));
        let intake = Intake::new(jobs, Arc::new(Alone(attempts.clone())), Arc::new(local));
        let server = Server::new(config, intake, Some(attempts.clone()))?;
        attempts.resume_unfinished()?;
        for job in server.jobs().store.uncalled_webhooks()? {
            server.webhooks.call(&job);
        }
        Ok(server)
    }

    pub(crate) fn new(
        config: Config,
        intake: Intake,
        attempts: Option<Attempts>,
    ) -> Result<Server, StoreError> {
        let webhooks = Arc::new(Webhooks::new(config.webhooks.clone(), &intake));
        intake.set_on_end({
            let webhooks = Arc::downgrade(&webhooks);
            move |job| {
                if let Some(webhooks) = webhooks.upgrade() {
                    webhooks.call(job);
                }
            }
        });
        Ok(Server(Arc::new(ServerState {
            auth: Arc::new(Auth::new(&config.api_keys, intake.store.sessions()?, config.wrong_key_delay)),
            // Half of it is one client's share, and holds its largest body.
            body_budget: BodyBudget::new(
                config.limits.small_bodies.max(2 * SMALL_BODY),
                config.limits.bodies.max(2 * config.limits.body),
                config.io_timeout,
            ),
            downloads: Arc::default(),
            trainings: OnceLock::new(),
            a1111: Arc::default(),
            verifier: Arc::new(Verifier::new(config.trust.clone())),
            webhooks,
            config: Arc::new(config),
            intake,
            attempts,
        })))
    }

    pub(crate) fn jobs(&self) -> &Jobs {
        self.intake.jobs()
    }

    /// The data folder.
    pub fn folder(&self) -> &Path {
        &self.config.folder
    }

    pub(crate) fn downgrade(&self) -> WeakServer {
        WeakServer(Arc::downgrade(&self.0))
    }

    /// Replaces the API keys. Sessions of keys that are gone end.
    pub fn set_api_keys(&self, keys: &[ApiKey]) {
        self.auth.set_keys(keys);
    }

    /// Starts the planning and generating threads. The returned thread ends after [`Server::close`], once every job
    /// handed to the generator has ended.
    pub fn generate_with<G: Generator>(&self, generator: G) -> std::io::Result<JoinHandle<()>> {
        self.generate_with_all(vec![generator])
    }

    /// [`Server::generate_with`] on several generators, such as one for each GPU. They must be alike: a job is planned by
    /// the first and generated by whichever is idle.
    pub fn generate_with_all<G: Generator>(&self, generators: Vec<G>) -> std::io::Result<JoinHandle<()>> {
        match &self.attempts {
            Some(attempts) => attempts.generate_with_all(generators),
            None => Err(std::io::Error::other("a gateway generates nothing")),
        }
    }

    /// Allows trainings: reads those of the data folder and starts the thread that runs them. It ends after
    /// [`Server::close`], once the running training has saved its state.
    pub fn train_with(&self, trainer: impl Trainer) -> std::io::Result<JoinHandle<()>> {
        let trainings = Arc::new(Trainings::open(self.jobs(), self.folder().join("trainings"), trainer)?);
        if self.trainings.set(Arc::clone(&trainings)).is_err() {
            return Err(std::io::Error::other("trainings are allowed already"));
        }
        trainings.start()
    }

    /// Stops accepting jobs, and reports so to probes. Queued jobs stay in the database; those whose clients wait on a
    /// connection fail, unless other processes run them.
    pub fn close(&self) {
        self.intake.submitting.close();
        if let Some(trainings) = self.trainings.get() {
            trainings.wake();
        }
    }

    /// Ends running jobs within a step; they resume at the next start.
    pub fn interrupt(&self) {
        self.jobs().interrupt();
    }
}

impl Shutdown for Server {
    fn close(&self) {
        Server::close(self);
    }

    fn is_awaited(&self, jobs: &Jobs) -> bool {
        self.intake.submitting.is_awaited(jobs)
    }

    fn record_ends(&self) {
        self.intake.submitting.record_ends();
    }
}
