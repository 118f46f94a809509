//! The threads that drive the generators: one takes jobs from the queue and plans them, one for each generator hands
//! them over. While a group is generated, the next is planned; images are saved on the generators' own threads.
//!
//! At most one group is planned ahead, for the first generator that is idle: jobs stay in the fair queue until shortly
//! before they run, and later jobs can still join the planned group. A plan depends on no device.
//!
//! The generator says how many images fit into a batch; waiting jobs join it by the fair queue's rule, and no job waits for
//! others. After a panic in a batch each job runs alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use kiln_base::lock;

use crate::jobs::attempt::JobAttempt;
use crate::jobs::attempts::Attempts;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::generator::{Generator, JobInputs, JobSink, Task};
use crate::jobs::live::LiveJob;
use crate::jobs::queue::GroupEvent;
use crate::jobs::stopping_error;

/// A job that is ready to be generated.
struct PlannedJob<P> {
    plan: P,
    attempt: Arc<JobAttempt>,
}

/// Jobs that are generated in one batch.
type Group<P> = Vec<PlannedJob<P>>;

impl Attempts {
    /// Starts the planning thread, and a generating one for each generator. The returned thread ends after the jobs are
    /// closed, once every job handed to a generator has ended.
    pub(crate) fn generate_with_all<G: Generator>(
        &self,
        generators: Vec<G>,
    ) -> std::io::Result<JoinHandle<()>> {
        let generators: Vec<Arc<G>> = generators.into_iter().map(Arc::new).collect();
        self.set_loaded_models({
            let generators: Vec<_> = generators.iter().map(Arc::downgrade).collect();
            move || generators.iter().filter_map(|g| g.upgrade()).flat_map(|g| g.loaded()).collect()
        });
        let idle_generators = Arc::clone(&self.idle_generators);
        let (groups, planned_groups) = sync_channel(0);
        let planner = Planner {
            attempts: self.clone(),
            generators: generators.clone(),
            idle_generators: Arc::clone(&idle_generators),
            groups,
        };
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let mut threads = vec![thread("planning").spawn(move || planner.run())?];
        let planned_groups = Arc::new(Mutex::new(planned_groups));
        for generator in generators {
            let driver = Driver {
                attempts: self.clone(),
                generator,
                idle_generators: Arc::clone(&idle_generators),
                groups: Arc::clone(&planned_groups),
            };
            threads.push(thread("generating").spawn(move || driver.run())?);
        }
        thread("generators").spawn(move || threads.into_iter().for_each(|thread| drop(thread.join())))
    }

    fn generate<G: Generator>(&self, generator: &G, mut group: Vec<PlannedJob<G::Plan>>) {
        group.retain(|job| !job.attempt.end_if_cancelled());
        let Err(error) = self.try_generate(generator, &group) else { return };
        if let [job] = &group[..] {
            return job.attempt.ended(Err(error));
        }
        // Run each job alone to find the one that panics.
        for PlannedJob { plan, attempt } in group {
            let Some(attempt) = attempt.retry() else { continue };
            let alone = [PlannedJob { plan, attempt }];
            if alone[0].attempt.end_if_cancelled() {
                continue;
            }
            if let Err(error) = self.try_generate(generator, &alone) {
                alone[0].attempt.ended(Err(error));
            }
        }
    }

    /// Hands these jobs to the generator. A panic is returned as an error and doesn't end the jobs.
    fn try_generate<G: Generator>(
        &self,
        generator: &G,
        group: &[PlannedJob<G::Plan>],
    ) -> Result<(), JobError> {
        if group.is_empty() {
            return Ok(());
        }
        group.iter().for_each(|job| job.attempt.start(group.len()));
        self.wake_all();
        // `group` keeps the attempts alive: a panic that drops the tasks doesn't end their jobs.
        let task = |job: &PlannedJob<G::Plan>| {
            let sink: Arc<dyn JobSink> = Arc::clone(&job.attempt) as _;
            Task { plan: job.plan.clone(), sink }
        };
        let tasks = group.iter().map(task).collect();
        catch_unwind(AssertUnwindSafe(|| generator.generate(tasks))).map_err(|panic| {
            self.metrics.panicked();
            reset(generator);
            panic_error("generation", &*panic)
        })
    }
}

fn reset<G: Generator>(generator: &G) {
    if catch_unwind(AssertUnwindSafe(|| generator.reset())).is_err() {
        tracing::error!("resetting the generator after a panic panicked");
    }
}

fn panic_error(what: &str, panic: &(dyn std::any::Any + Send)) -> JobError {
    JobError::new(ErrorCode::Panicked, format!("{what} panicked: {}", panic_message(panic)))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// The thread that hands planned jobs to a generator.
struct Driver<G: Generator> {
    attempts: Attempts,
    generator: Arc<G>,
    idle_generators: Arc<AtomicUsize>,
    groups: Arc<Mutex<Receiver<Group<G::Plan>>>>,
}

impl<G: Generator> Driver<G> {
    fn run(&self) {
        let generator = &*self.generator;
        match catch_unwind(AssertUnwindSafe(|| generator.warm_up())) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!("failed to load the model: {error}");
                self.attempts.ledger().load_failed(&error.message);
            }
            Err(panic) => {
                let message = panic_message(&*panic);
                tracing::error!("loading the model panicked: {message}");
                self.attempts.ledger().load_failed(message);
                reset(generator);
            }
        }
        self.attempts.set_ready();
        loop {
            self.idle_generators.fetch_add(1, SeqCst);
            self.attempts.wake_all();
            let group = lock(&self.groups).recv();
            let Ok(group) = group else { break };
            self.attempts.generate(generator, group);
        }
        generator.finish();
    }
}

/// The thread that takes jobs from the queue and plans them.
struct Planner<G: Generator> {
    attempts: Attempts,
    generators: Vec<Arc<G>>,
    /// The number of generating threads that wait for a group and were not promised one.
    idle_generators: Arc<AtomicUsize>,
    groups: SyncSender<Group<G::Plan>>,
}

impl<G: Generator> Planner<G> {
    fn run(&self) {
        while let Some(first) = self.attempts.next_job() {
            if first.runs_alone() && !self.attempts.wait_until_alone(&first) {
                self.attempts.remove_job(&first);
                first.change(|s| s.error = Some(stopping_error()));
                self.attempts.ledger().abandon(vec![first.id.clone()]);
                continue;
            }
            let Some(group) = self.plan_group(&first) else { continue };
            if let Err(unsent) = self.groups.send(group) {
                unsent.0.iter().for_each(|job| job.attempt.interrupt());
            }
            if first.runs_alone() {
                self.attempts.wait_until_ended(&first);
            }
            // The generating thread is busy now: time to clean up.
            if let Err(error) = self.attempts.ledger().clean_up_occasionally(self.attempts.config.gallery) {
                tracing::warn!(%error, "failed to delete old images");
            }
        }
    }

    /// Plans this job and others that fit into the same batch, until the generator is idle; `None` if no job is left.
    fn plan_group(&self, first: &Arc<LiveJob>) -> Option<Vec<PlannedJob<G::Plan>>> {
        let mut group = vec![self.plan(first)?];
        // What panics here panics in `generate` as well, and is handled there.
        let capacity = catch_unwind(AssertUnwindSafe(|| self.generators[0].batch_capacity(&group[0].plan)));
        let mut room = capacity.unwrap_or(1).saturating_sub(first.images());
        self.attempts.ledger().claim_batch(first, room);
        while !group.is_empty() {
            let members: Vec<&LiveJob> = group.iter().map(|job| &*job.attempt.live).collect();
            match self.attempts.wait_for_group_event(first, room, &self.idle_generators, &members) {
                GroupEvent::GeneratorIdle => return Some(group),
                GroupEvent::Join(jobs) => {
                    for live in jobs {
                        room = room.saturating_sub(live.images());
                        group.extend(self.plan(&live));
                    }
                }
                GroupEvent::Cancelled => group.retain(|job| !job.attempt.end_if_cancelled()),
                GroupEvent::Stopping => {
                    group.iter().for_each(|job| job.attempt.interrupt());
                    return None;
                }
            }
        }
        None
    }

    /// Starts and plans a job; `None` if that ended it.
    fn plan(&self, live: &Arc<LiveJob>) -> Option<PlannedJob<G::Plan>> {
        let attempts = &self.attempts;
        let attempt = JobAttempt::new(attempts, live);
        if attempt.end_if_cancelled() {
            return None;
        }
        let started = attempts.ledger().start(&live.id);
        let plan = started.map_err(JobError::from).and_then(|()| attempts.check_signer()).and_then(|()| {
            let inputs = JobInputs { request: &live.request, source: attempts.jobs() };
            catch_unwind(AssertUnwindSafe(|| self.generators[0].plan(&inputs))).unwrap_or_else(|panic| {
                attempts.metrics.panicked();
                Err(panic_error("planning", &*panic))
            })
        });
        if plan.is_ok() {
            attempt.note_inputs();
        }
        attempts.release_inputs(live);
        match plan {
            Ok(plan) => Some(PlannedJob { plan, attempt }),
            Err(error) => {
                attempt.ended(Err(error));
                None
            }
        }
    }
}
