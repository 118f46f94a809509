//! The two threads that drive a generator: one takes jobs from the queue and plans them, the other hands them to the
//! generator. While one group is generated, the next is planned; images are saved on the generator's own threads.
//!
//! At most one group is planned ahead: jobs stay in the fair queue until shortly before they run, and later jobs can
//! still join the planned group.
//!
//! The generator says how many images fit into a batch; waiting jobs join it by the fair queue's rule, and no job waits for
//! others. After a panic in a batch each job runs alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::Server;
use crate::attempt::JobAttempt;
use crate::generator::{Generator, JobError, JobInputs, JobSink, Task};
use crate::live::LiveJob;
use crate::server::GroupEvent;
use crate::work::image_count;

/// A job that is ready to be generated.
struct PlannedJob<P> {
    plan: P,
    attempt: Arc<JobAttempt>,
}

impl Server {
    /// Starts the planning and generating threads. The returned thread ends after [`Server::close`], once every job
    /// handed to the generator has ended.
    pub fn generate_with<G: Generator>(&self, generator: G) -> std::io::Result<JoinHandle<()>> {
        let generator = Arc::new(generator);
        self.set_loaded_models({
            let generator = Arc::downgrade(&generator);
            move || generator.upgrade().map(|generator| generator.loaded()).unwrap_or_default()
        });
        let generator_idle = Arc::new(AtomicBool::new(false));
        let (groups, planned_groups) = sync_channel(0);
        let planner = Planner {
            server: self.clone(),
            generator: Arc::clone(&generator),
            generator_idle: Arc::clone(&generator_idle),
            groups,
        };
        let planning = std::thread::Builder::new().name("planning".into()).spawn(move || planner.run())?;
        let server = self.clone();
        std::thread::Builder::new().name("generating".into()).spawn(move || {
            match catch_unwind(AssertUnwindSafe(|| generator.warm_up())) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!("failed to load the model: {error}"),
                Err(panic) => {
                    tracing::error!("loading the model panicked: {}", panic_message(&*panic));
                    reset(&*generator);
                }
            }
            server.set_ready();
            loop {
                generator_idle.store(true, SeqCst);
                server.wake_all();
                let Ok(group) = planned_groups.recv() else { break };
                server.generate(&*generator, group);
            }
            generator.finish();
            let _ = planning.join();
        })
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
    JobError::server("panicked", format!("{what} panicked: {}", panic_message(panic)))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// The thread that takes jobs from the queue and plans them.
struct Planner<G: Generator> {
    server: Server,
    generator: Arc<G>,
    /// Whether the generating thread waits for a group.
    generator_idle: Arc<AtomicBool>,
    groups: SyncSender<Vec<PlannedJob<G::Plan>>>,
}

impl<G: Generator> Planner<G> {
    fn run(&self) {
        while let Some(first) = self.server.next_job() {
            if first.run_alone && !self.server.wait_until_alone(&first) {
                self.server.abandon_unstarted(&first);
                continue;
            }
            let Some(group) = self.plan_group(&first) else { continue };
            if let Err(unsent) = self.groups.send(group) {
                unsent.0.iter().for_each(|job| job.attempt.interrupt());
            }
            if first.run_alone {
                self.server.wait_until_ended(&first);
            }
            // The generating thread is busy now: time to clean up.
            if let Err(error) = self.server.store.clean_up_occasionally(self.server.config.gallery) {
                tracing::warn!(%error, "failed to delete old images");
            }
        }
    }

    /// Plans this job and others that fit into the same batch, until the generator is idle; `None` if no job is left.
    fn plan_group(&self, first: &Arc<LiveJob>) -> Option<Vec<PlannedJob<G::Plan>>> {
        let mut group = vec![self.plan(first)?];
        // What panics here panics in `generate` as well, and is handled there.
        let capacity = catch_unwind(AssertUnwindSafe(|| self.generator.batch_capacity(&group[0].plan)));
        let mut room = capacity.unwrap_or(1).saturating_sub(image_count(&first.request));
        while !group.is_empty() {
            let members: Vec<&LiveJob> = group.iter().map(|job| &*job.attempt.live).collect();
            match self.server.wait_for_group_event(first, room, &self.generator_idle, &members) {
                GroupEvent::GeneratorIdle => return Some(group),
                GroupEvent::Join(jobs) => {
                    for live in jobs {
                        room = room.saturating_sub(image_count(&live.request));
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
        let server = &self.server;
        let attempt = JobAttempt::new(server, live);
        if attempt.end_if_cancelled() {
            return None;
        }
        let started = server.store.start(&live.id);
        let plan = started.map_err(|error| JobError::server("storage", error.to_string())).and_then(|()| {
            let inputs = JobInputs { server, request: &live.request };
            catch_unwind(AssertUnwindSafe(|| self.generator.plan(&inputs))).unwrap_or_else(|panic| {
                server.metrics.panicked();
                Err(panic_error("planning", &*panic))
            })
        });
        server.release_inputs(live);
        match plan {
            Ok(plan) => Some(PlannedJob { plan, attempt }),
            Err(error) => {
                attempt.ended(Err(error));
                None
            }
        }
    }
}
