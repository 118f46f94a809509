//! Two threads for a generator: one takes jobs out of the queue and plans them, the other hands them over. While a group
//! is generated, the next is planned; while an image is saved, on a thread of the generator, the next is generated.
//!
//! One group is planned ahead at most, so that jobs leave the fair queue when their turn is near, and jobs that come
//! meanwhile can still join it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::Server;
use crate::attempt::Attempt;
use crate::generator::{Generator, JobError, JobInputs, JobSink, Task};
use crate::live::Live;
use crate::server::{Turn, images};

/// A job that is ready to be generated.
struct Planned<P> {
    plan: P,
    attempt: Arc<Attempt>,
}

impl Server {
    /// Starts the threads that plan and generate. The one returned ends after [`Server::close`], when every job that was
    /// handed over has ended.
    pub fn generate_with<G: Generator>(&self, generator: G) -> std::io::Result<JoinHandle<()>> {
        let generator = Arc::new(generator);
        let free = Arc::new(AtomicBool::new(false));
        let (groups, arriving) = sync_channel(0);
        let planner = Planner {
            server: self.clone(),
            generator: Arc::clone(&generator),
            free: Arc::clone(&free),
            groups,
        };
        let planning = std::thread::Builder::new().name("planning".into()).spawn(move || planner.run())?;
        let server = self.clone();
        std::thread::Builder::new().name("generating".into()).spawn(move || {
            match catch_unwind(AssertUnwindSafe(|| generator.warm_up())) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!("the model can't be used: {error}"),
                Err(panic) => {
                    tracing::error!("loading the model panicked: {}", panic_message(&*panic));
                    reset(&*generator);
                }
            }
            server.set_ready();
            loop {
                free.store(true, SeqCst);
                server.wake_all();
                let Ok(group) = arriving.recv() else { break };
                server.generate(&*generator, group);
            }
            generator.finish();
            let _ = planning.join();
        })
    }

    fn generate<G: Generator>(&self, generator: &G, mut group: Vec<Planned<G::Plan>>) {
        group.retain(|job| !job.attempt.end_if_cancelled());
        let Err(error) = self.try_generate(generator, &group) else { return };
        if let [job] = &group[..] {
            return job.attempt.ended(Err(error));
        }
        // Which of them panics shows when each is alone.
        for Planned { plan, attempt } in group {
            let Some(attempt) = attempt.again() else { continue };
            let alone = [Planned { plan, attempt }];
            if alone[0].attempt.end_if_cancelled() {
                continue;
            }
            if let Err(error) = self.try_generate(generator, &alone) {
                alone[0].attempt.ended(Err(error));
            }
        }
    }

    /// Hands these jobs to the generator. After a panic those that had not ended are as they were.
    fn try_generate<G: Generator>(&self, generator: &G, group: &[Planned<G::Plan>]) -> Result<(), JobError> {
        if group.is_empty() {
            return Ok(());
        }
        group.iter().for_each(|job| job.attempt.hand_over(group.len()));
        // `group` holds on to the attempts: a panic that drops the tasks doesn't end their jobs.
        let task = |job: &Planned<G::Plan>| {
            let sink: Arc<dyn JobSink> = Arc::clone(&job.attempt) as _;
            Task { plan: job.plan.clone(), sink }
        };
        let tasks = group.iter().map(task).collect();
        catch_unwind(AssertUnwindSafe(|| generator.generate(tasks))).map_err(|panic| {
            self.metrics.panicked();
            reset(generator);
            panicked("generating", &*panic)
        })
    }
}

fn reset<G: Generator>(generator: &G) {
    if catch_unwind(AssertUnwindSafe(|| generator.reset())).is_err() {
        tracing::error!("dropping the model after a panic panicked");
    }
}

fn panicked(what: &str, panic: &(dyn std::any::Any + Send)) -> JobError {
    JobError::server("panicked", format!("{what} panicked: {}", panic_message(panic)))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// The thread that takes and plans jobs.
struct Planner<G: Generator> {
    server: Server,
    generator: Arc<G>,
    /// Whether the other thread waits for a group.
    free: Arc<AtomicBool>,
    groups: SyncSender<Vec<Planned<G::Plan>>>,
}

impl<G: Generator> Planner<G> {
    fn run(&self) {
        while let Some(first) = self.server.next() {
            if first.alone && !self.server.wait_until_only(&first) {
                self.server.leave_unbegun(&first);
                continue;
            }
            let Some(group) = self.group(&first) else { continue };
            if let Err(refused) = self.groups.send(group) {
                refused.0.iter().for_each(|job| job.attempt.put_back());
            }
            if first.alone {
                self.server.wait_until_left(&first);
            }
            // The other thread is busy now.
            if let Err(error) = self.server.store.tidy_now_and_then(self.server.config.keep) {
                tracing::warn!(%error, "old images could not be removed");
            }
        }
    }

    /// Plans this job and those that can be generated with it, until it is their turn; `None` if none are left.
    fn group(&self, first: &Arc<Live>) -> Option<Vec<Planned<G::Plan>>> {
        let mut group = vec![self.plan(first)?];
        // A panic here would be one of generating as well, and is handled there.
        let room = catch_unwind(AssertUnwindSafe(|| self.generator.room(&group[0].plan))).unwrap_or(1);
        let mut room = room.saturating_sub(images(&first.request));
        while !group.is_empty() {
            let members: Vec<&Live> = group.iter().map(|job| &*job.attempt.live).collect();
            match self.server.turn(first, room, &self.free, &members) {
                Turn::Go => return Some(group),
                Turn::Join(company) => {
                    for live in company {
                        room = room.saturating_sub(images(&live.request));
                        group.extend(self.plan(&live));
                    }
                }
                Turn::Cancelled => group.retain(|job| !job.attempt.end_if_cancelled()),
                Turn::Stop => {
                    group.iter().for_each(|job| job.attempt.put_back());
                    return None;
                }
            }
        }
        None
    }

    /// Begins and plans a job; `None` if that ended it.
    fn plan(&self, live: &Arc<Live>) -> Option<Planned<G::Plan>> {
        let server = &self.server;
        let attempt = Attempt::new(server, live);
        if attempt.end_if_cancelled() {
            return None;
        }
        let begun = server.store.begin(&live.id);
        let plan = begun.map_err(|error| JobError::server("storage", error.to_string())).and_then(|()| {
            let inputs = JobInputs { server, request: &live.request };
            catch_unwind(AssertUnwindSafe(|| self.generator.plan(&inputs))).unwrap_or_else(|panic| {
                server.metrics.panicked();
                Err(panicked("planning", &*panic))
            })
        });
        server.forget_images(live);
        match plan {
            Ok(plan) => Some(Planned { plan, attempt }),
            Err(error) => {
                attempt.ended(Err(error));
                None
            }
        }
    }
}
