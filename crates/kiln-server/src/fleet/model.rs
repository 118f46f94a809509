//! A model of a fleet with two jobs, two workers, two gateways and few faults. Every order of events is explored; from
//! every state that can be reached, all accepted jobs must end and their webhooks be called once the faults stop, and no
//! job may end twice. The decisions are those of [`super::rules`], which real workers and gateways make, too.

use std::collections::{BTreeSet, HashSet};

use super::records::TicketId;
use super::rules::{self, GiveUp, Mend, ModelView, Named, TicketAction, TicketView};
use crate::jobs::job::{Job, JobState};

const JOBS: usize = 2;
const WORKERS: usize = 2;
/// More tickets than this are only more of the same.
const MAX_TICKETS: usize = 2;

/// What decides in a job's record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Record {
    revision: u8,
    state: &'static str,
    worker: Option<String>,
    ticket: Option<TicketId>,
    began: bool,
    suspects: Vec<String>,
    losses: u32,
    /// The gateway that accepted it, by its number and incarnation.
    gateway: (usize, u8),
    webhook: bool,
    ends: u8,
}

impl Record {
    /// Applies a rule to the record as the rules see it.
    fn change<T>(&self, rule: impl FnOnce(&mut Job) -> T) -> (Record, T) {
        let mut job = TEMPLATE.with(Job::clone);
        job.state = state_of(self.state);
        job.fleet.worker.clone_from(&self.worker);
        if let Some(ticket) = self.ticket {
            job.set_ticket(ticket);
        }
        (job.fleet.began, job.fleet.losses) = (self.began, self.losses);
        job.fleet.suspects.clone_from(&self.suspects);
        let result = rule(&mut job);
        let changed = Record {
            revision: self.revision + 1,
            state: job.state.name(),
            ticket: job.ticket_id(),
            worker: job.fleet.worker,
            began: job.fleet.began,
            suspects: job.fleet.suspects,
            losses: job.fleet.losses.min(1),
            ..self.clone()
        };
        if !state_of(changed.state).is_final() || state_of(self.state).is_final() {
            return (changed, result);
        }
        // The rest does not matter any more.
        let ended =
            Record { ends: self.ends + 1, worker: None, began: false, suspects: Vec::new(), ..changed };
        (ended, result)
    }

    fn is_final(&self) -> bool {
        state_of(self.state).is_final()
    }
}

thread_local! {
    static TEMPLATE: Job = Job::test("job");
}

fn state_of(name: &str) -> JobState {
    let all = [JobState::Queued, JobState::Running, JobState::Done, JobState::Failed, JobState::Cancelled];
    all.into_iter().find(|state| state.name() == name).unwrap()
}

/// What a worker is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Work {
    Idle,
    Decide(TicketId, bool),
    Run(usize, TicketId),
    Remove(TicketId),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Worker {
    incarnation: u8,
    frozen: bool,
    work: Work,
    /// The records as this worker knows them while it decides: those of an earlier time, or none.
    known: [Option<Record>; JOBS],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Ticket {
    id: TicketId,
    delivered: bool,
}

/// What the reconciler is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Reconciling {
    counted: Option<(u64, TicketId)>,
    before: [bool; JOBS],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    jobs: [Option<Record>; JOBS],
    /// Jobs whose gateway has still to publish the ticket.
    publishing: [bool; JOBS],
    tickets: Vec<Ticket>,
    clock: i64,
    sequence: u64,
    workers: [Worker; WORKERS],
    gateways: [u8; 2],
    reconciling: Reconciling,
    /// How many jobs are submitted, and how many faults happen, at most.
    submissions: usize,
    faults: u8,
}

/// What may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Submit(usize),
    Publish(usize),
    Learn(usize),
    Pull(usize, usize),
    Step(usize),
    Redeliver(usize),
    Thaw(usize),
    Count,
    Compare,
    Recover(usize),
    ReturnUnheld(usize),
    CallWebhook(usize),
    Kill(usize),
    Freeze(usize),
    KillGateway(usize),
    LoseTicket(usize),
    /// A worker does not learn that what it wrote was stored.
    LoseAnswer(usize),
    /// A new leader of a cluster delivers a ticket again that a worker has.
    DeliverTwice(usize),
    DeleteStream,
}

impl Event {
    fn is_fault(self) -> bool {
        use Event::*;
        matches!(
            self,
            Kill(_)
                | Freeze(_)
                | KillGateway(_)
                | LoseTicket(_)
                | LoseAnswer(_)
                | DeliverTwice(_)
                | DeleteStream
        )
    }
}

/// What is taken out of the model, to see that it is missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    Reconciler,
    AdoptedWebhooks,
    /// Workers that return what they have claimed without knowing it.
    Returning,
}

impl World {
    fn new(submissions: usize, faults: u8) -> World {
        let worker = Worker { incarnation: 0, frozen: false, work: Work::Idle, known: [None, None] };
        World {
            jobs: [None, None],
            publishing: [false; JOBS],
            tickets: Vec::new(),
            clock: 0,
            sequence: 0,
            workers: [worker.clone(), worker],
            gateways: [0; 2],
            reconciling: Reconciling { counted: None, before: [false; JOBS] },
            submissions,
            faults,
        }
    }

    fn name(&self, worker: usize) -> String {
        format!("{worker}.{}", self.workers[worker].incarnation)
    }

    fn is_alive(&self, name: &str) -> bool {
        (0..WORKERS).any(|worker| self.name(worker) == name && !self.workers[worker].frozen)
    }

    fn publish(&mut self) {
        (self.clock, self.sequence) = (self.clock + 1, self.sequence + 1);
        let id = TicketId { stored: self.clock, sequence: self.sequence };
        self.tickets.push(Ticket { id, delivered: false });
    }

    /// Whether a live worker has this ticket, so that the stream does not deliver it again.
    fn is_held(&self, ticket: TicketId) -> bool {
        self.workers.iter().filter(|worker| !worker.frozen).any(|worker| match &worker.work {
            Work::Idle => false,
            Work::Decide(held, _) | Work::Run(_, held) | Work::Remove(held) => *held == ticket,
        })
    }

    /// Whether a live worker is named by a record and does not know of it.
    fn is_unheld(&self, job: usize, record: &Record) -> bool {
        let own = |worker: &usize| record.worker.as_deref() == Some(&self.name(*worker));
        let holds =
            |worker: &Worker| worker.frozen || matches!(worker.work, Work::Run(held, _) if held == job);
        record.state == "running"
            && (0..WORKERS).find(own).is_some_and(|worker| !holds(&self.workers[worker]))
    }

    /// Writes a record if it has the revision that the change began with.
    fn write(&mut self, job: usize, seen: &Record, changed: Record) -> bool {
        let same = self.jobs[job].as_ref().is_some_and(|now| now.revision == seen.revision);
        if same {
            self.jobs[job] = Some(changed);
        }
        same
    }

    fn events(&self, without: Without) -> Vec<Event> {
        let mut events = Vec::new();
        for job in 0..JOBS {
            match &self.jobs[job] {
                None if job < self.submissions && (job == 0 || self.jobs[0].is_some()) => {
                    events.push(Event::Submit(job));
                }
                None => {}
                Some(record) => {
                    if self.publishing[job] {
                        events.push(Event::Publish(job));
                    }
                    let owner_lives = self.gateways[record.gateway.0] == record.gateway.1;
                    let is_called = owner_lives || without != Without::AdoptedWebhooks;
                    if record.is_final() && record.webhook && is_called {
                        events.push(Event::CallWebhook(job));
                    }
                    let abandoned = record.state == "running"
                        && !self.is_alive(record.worker.as_deref().unwrap_or_default());
                    if abandoned && without != Without::Reconciler {
                        events.push(Event::Recover(job));
                    }
                    if without != Without::Returning && self.is_unheld(job, record) {
                        events.push(Event::ReturnUnheld(job));
                    }
                }
            }
        }
        for (index, ticket) in self.tickets.iter().enumerate() {
            if !ticket.delivered {
                let idle = |worker: &usize| {
                    self.workers[*worker].work == Work::Idle && !self.workers[*worker].frozen
                };
                events.extend((0..WORKERS).filter(idle).map(|worker| Event::Pull(worker, index)));
            } else if !self.is_held(ticket.id) {
                events.push(Event::Redeliver(index));
            } else if self.faults > 0 {
                events.push(Event::DeliverTwice(index));
            }
            if self.faults > 0 {
                events.push(Event::LoseTicket(index));
            }
        }
        for (index, worker) in self.workers.iter().enumerate() {
            if worker.frozen {
                events.push(Event::Thaw(index));
                continue;
            }
            if worker.work != Work::Idle {
                events.push(Event::Step(index));
            }
            if matches!(worker.work, Work::Decide(_, false)) && worker.known != self.jobs {
                events.push(Event::Learn(index));
            }
            if self.faults > 0 {
                events.extend([Event::Kill(index), Event::Freeze(index)]);
            }
            if self.faults > 0 && worker.work != Work::Idle {
                events.push(Event::LoseAnswer(index));
            }
        }
        if without != Without::Reconciler {
            events.push(if self.reconciling.counted.is_none() { Event::Count } else { Event::Compare });
        }
        if self.faults > 0 {
            events.extend([Event::KillGateway(0), Event::DeleteStream]);
        }
        events
    }

    fn apply(&self, event: Event) -> World {
        let mut world = self.clone();
        world.faults -= u8::from(event.is_fault());
        match event {
            Event::Submit(job) => {
                // The first gateway accepts the first job, which has a webhook.
                world.jobs[job] = Some(Record {
                    revision: 1,
                    state: "queued",
                    worker: None,
                    ticket: None,
                    began: false,
                    suspects: Vec::new(),
                    losses: 0,
                    gateway: (job, world.gateways[job]),
                    webhook: job == 0,
                    ends: 0,
                });
                world.publishing[job] = true;
            }
            Event::Publish(job) => {
                world.publishing[job] = false;
                world.publish();
            }
            Event::Learn(worker) => world.workers[worker].known = self.jobs.clone(),
            Event::Pull(worker, ticket) => {
                world.tickets[ticket].delivered = true;
                world.workers[worker].work = Work::Decide(self.tickets[ticket].id, false);
            }
            Event::Step(worker) => world.step(worker),
            Event::LoseAnswer(worker) => {
                world.step(worker);
                (world.workers[worker].work, world.workers[worker].known) = (Work::Idle, [None, None]);
            }
            Event::Redeliver(ticket) | Event::DeliverTwice(ticket) => world.tickets[ticket].delivered = false,
            Event::Thaw(worker) => world.workers[worker].frozen = false,
            Event::Count => {
                let last = TicketId { stored: world.clock, sequence: world.sequence };
                world.reconciling.counted = Some((world.tickets.len() as u64, last));
            }
            Event::Compare => world.compare(),
            Event::Recover(job) => world.recover(job, &self.jobs[job].clone().unwrap()),
            Event::ReturnUnheld(job) => {
                let seen = self.jobs[job].clone().unwrap();
                world.write(job, &seen, seen.change(rules::give_back).0);
            }
            Event::CallWebhook(job) => {
                if let Some(record) = &mut world.jobs[job] {
                    record.webhook = false;
                }
            }
            Event::Kill(worker) => {
                let incarnation = self.workers[worker].incarnation + 1;
                let known = [None, None];
                world.workers[worker] = Worker { incarnation, frozen: false, work: Work::Idle, known };
            }
            Event::Freeze(worker) => world.workers[worker].frozen = true,
            Event::KillGateway(gateway) => {
                world.gateways[gateway] += 1;
                world.publishing[gateway] = false;
                world.reconciling = Reconciling { counted: None, before: [false; JOBS] };
            }
            Event::LoseTicket(ticket) => drop(world.tickets.remove(ticket)),
            Event::DeleteStream => {
                world.tickets.clear();
                world.sequence = 0;
            }
        }
        world.renumber();
        world
    }

    /// Numbers the tickets in use from the start, in their order: worlds that differ only in numbers are one.
    fn renumber(&mut self) {
        let mut ids: Vec<&mut TicketId> = self.tickets.iter_mut().map(|ticket| &mut ticket.id).collect();
        let records = self.workers.iter_mut().flat_map(|worker| {
            let held = match &mut worker.work {
                Work::Idle => None,
                Work::Decide(held, _) | Work::Run(_, held) | Work::Remove(held) => Some(held),
            };
            let known = worker.known.iter_mut().flatten().filter_map(|record| record.ticket.as_mut());
            known.chain(held)
        });
        ids.extend(records);
        ids.extend(self.jobs.iter_mut().flatten().filter_map(|record| record.ticket.as_mut()));
        let mut last = TicketId { stored: self.clock, sequence: self.sequence };
        ids.push(&mut last);
        ids.extend(self.reconciling.counted.as_mut().map(|(_, last)| last));
        let stored: BTreeSet<i64> = ids.iter().map(|id| id.stored).collect();
        let sequences: BTreeSet<u64> = ids.iter().map(|id| id.sequence).collect();
        for id in ids {
            id.stored = stored.range(..id.stored).count() as i64;
            id.sequence = sequences.range(..id.sequence).count() as u64;
        }
        (self.clock, self.sequence) = (last.stored, last.sequence);
    }

    fn recover(&mut self, job: usize, seen: &Record) {
        let (changed, _) = seen.change(|job| {
            rules::recover(job, |worker| self.is_alive(worker), GiveUp { lost_workers: 9, failures: 9 }, 0)
        });
        self.write(job, seen, changed);
    }

    /// The next step of a worker that has a ticket or a job.
    fn step(&mut self, worker: usize) {
        let (name, known) = (self.name(worker), self.workers[worker].known.clone());
        let work = self.workers[worker].work.clone();
        let next = match work {
            Work::Idle => Work::Idle,
            Work::Remove(ticket) => {
                self.tickets.retain(|other| other.id != ticket);
                Work::Idle
            }
            Work::Run(job, ticket) => {
                let seen = self.jobs[job].clone().unwrap();
                let own = seen.change(|job| rules::is_claimed_by(job, &name, ticket)).1;
                if own {
                    let (changed, ()) = seen.change(|job| job.state = JobState::Done);
                    self.write(job, &seen, changed);
                    Work::Remove(ticket)
                } else {
                    Work::Idle
                }
            }
            Work::Decide(ticket, caught_up) => {
                let named = known
                    .iter()
                    .position(|record| record.as_ref().is_some_and(|record| record.ticket == Some(ticket)));
                let holder = named.map(|job| (job, known[job].clone().unwrap()));
                let named = match &holder {
                    None => Named::Nobody,
                    Some((_, record)) if record.is_final() => Named::Ended,
                    Some((_, record)) => {
                        let holder = record.worker.clone().unwrap_or_default();
                        let alive = holder != name && self.is_alive(&holder);
                        if alive { Named::Running } else { Named::Abandoned }
                    }
                };
                let queued = known
                    .iter()
                    .position(|record| record.as_ref().is_some_and(|record| record.state == "queued"));
                let (runnable, is_queued) = (queued.is_some(), queued.is_some());
                match rules::decide(TicketView { named, runnable, queued: is_queued, caught_up }) {
                    TicketAction::CatchUp => {
                        self.workers[worker].known = self.jobs.clone();
                        Work::Decide(ticket, true)
                    }
                    TicketAction::Claim => {
                        let job = queued.unwrap();
                        let seen = known[job].clone().unwrap();
                        let (changed, ()) = seen.change(|job| rules::claim(job, &name, ticket, true, 0));
                        let claimed = self.write(job, &seen, changed);
                        self.workers[worker].known = self.jobs.clone();
                        if claimed { Work::Run(job, ticket) } else { Work::Decide(ticket, caught_up) }
                    }
                    TicketAction::Recover => {
                        let (job, seen) = holder.unwrap();
                        self.recover(job, &seen);
                        self.workers[worker].known = self.jobs.clone();
                        Work::Decide(ticket, caught_up)
                    }
                    TicketAction::Remove => Work::Remove(ticket),
                    TicketAction::Keep => Work::Idle,
                    TicketAction::Return | TicketAction::ReturnLater => {
                        let own = self.tickets.iter_mut().find(|other| other.id == ticket);
                        own.into_iter().for_each(|ticket| ticket.delivered = false);
                        Work::Idle
                    }
                }
            }
        };
        if !matches!(next, Work::Decide(..)) {
            self.workers[worker].known = [None, None];
        }
        self.workers[worker].work = next;
    }

    /// The reconciler compares what it has counted with the records.
    fn compare(&mut self) {
        let Some((tickets, last)) = self.reconciling.counted.take() else { return };
        let unfinished: [bool; JOBS] =
            std::array::from_fn(|job| self.jobs[job].as_ref().is_some_and(|record| !record.is_final()));
        let settled =
            (0..JOBS).filter(|job| unfinished[*job] && self.reconciling.before[*job]).count() as u64;
        let count = unfinished.iter().filter(|unfinished| **unfinished).count() as u64;
        self.reconciling.before = unfinished;
        match rules::reconcile(ModelView { tickets, stored: tickets, unfinished: count, settled }) {
            Mend::Nothing => {}
            Mend::Publish(missing) => (0..missing).for_each(|_| self.publish()),
            Mend::Purge => self.tickets.retain(|ticket| ticket.id.sequence > last.sequence),
        }
    }

    fn check(&self) -> Result<(), String> {
        match self.jobs.iter().flatten().find(|record| record.ends > 1) {
            Some(record) => Err(format!("a job ended twice: {record:?}")),
            None => Ok(()),
        }
    }

    fn is_complete(&self) -> bool {
        self.jobs.iter().flatten().all(|record| record.is_final() && !record.webhook)
    }
}

/// Explores every state that can be reached with this number of faults; returns their number.
fn explore(submissions: usize, faults: u8, without: Without) -> Result<usize, String> {
    let start = World::new(submissions, faults);
    let (mut seen, mut good) = (HashSet::from([start.clone()]), HashSet::new());
    let mut open = vec![start];
    while let Some(world) = open.pop() {
        world.check().map_err(|error| format!("{error} in {world:#?}"))?;
        complete(&world, without, &mut good)?;
        if world.is_complete() && world.jobs.iter().flatten().count() == submissions {
            continue;
        }
        for event in world.events(without) {
            let next = world.apply(event);
            if next.tickets.len() <= MAX_TICKETS && seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    Ok(seen.len())
}

/// Lets everything happen in turn, without faults, until all accepted jobs have ended.
fn complete(start: &World, without: Without, good: &mut HashSet<World>) -> Result<(), String> {
    const ROUNDS: usize = 400;
    let (mut world, mut passed) = (World { faults: 0, ..start.clone() }, Vec::new());
    for turn in 0..ROUNDS {
        if world.is_complete() || good.contains(&world) {
            good.extend(passed);
            return Ok(());
        }
        let events: Vec<Event> =
            world.events(without).into_iter().filter(|event| !matches!(event, Event::Submit(_))).collect();
        let Some(event) = events.get(turn % events.len().max(1)).copied() else { break };
        passed.push(world.clone());
        world = world.apply(event);
    }
    Err(format!("accepted jobs do not end without further faults: {start:#?}"))
}

#[test]
fn whatever_fails_every_accepted_job_ends_once_and_its_webhook_is_called() {
    let states = explore(1, 1, Without::Nothing).unwrap();
    assert!(states > 10_000, "{states} states");
}

/// `cargo test --release -p kiln-server --lib -- --ignored --nocapture model`
#[test]
#[ignore = "takes minutes"]
fn two_jobs_or_two_faults_change_nothing() {
    for (submissions, faults) in [(2, 0), (1, 2), (2, 1)] {
        let states = explore(submissions, faults, Without::Nothing).unwrap();
        println!("{submissions} jobs, {faults} faults: {states} states");
    }
}

#[test]
fn without_the_reconciler_a_lost_ticket_would_leave_its_job_behind() {
    let error = explore(1, 1, Without::Reconciler).unwrap_err();
    assert!(error.contains("do not end"), "{error}");
}

#[test]
fn without_adoption_the_webhook_of_a_killed_gateway_would_not_be_called() {
    let error = explore(1, 1, Without::AdoptedWebhooks).unwrap_err();
    assert!(error.contains("do not end"), "{error}");
}

#[test]
fn a_claim_that_its_worker_does_not_know_of_would_stay_if_the_worker_did_not_return_it() {
    use Event::*;
    // The worker learns of the job and claims it, but not that it has; then the ticket is lost, too.
    let events = [Submit(0), Publish(0), Pull(0, 0), Learn(0), LoseAnswer(0), LoseTicket(0)];
    let world = events.into_iter().fold(World::new(1, 2), |world, event| {
        assert!(world.events(Without::Nothing).contains(&event), "{event:?} in {world:#?}");
        world.apply(event)
    });
    assert_eq!(world.jobs[0].as_ref().unwrap().state, "running");
    let error = complete(&world, Without::Returning, &mut HashSet::new()).unwrap_err();
    assert!(error.contains("do not end"), "{error}");
    complete(&world, Without::Nothing, &mut HashSet::new()).unwrap();
}
