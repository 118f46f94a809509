//! The state of a fleet: records, tickets, workers and gateways, and what may happen next.

use super::record::Record;
use crate::fleet::records::TicketId;
use crate::jobs::job::JobState;

pub(super) const JOBS: usize = 2;
pub(super) const WORKERS: usize = 2;
/// More tickets than this are only more of the same.
pub(super) const MAX_TICKETS: usize = 2;

/// What a worker is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Work {
    Idle,
    Decide(TicketId, bool),
    Run(usize, TicketId),
    Remove(TicketId),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Worker {
    pub(super) incarnation: u8,
    pub(super) frozen: bool,
    pub(super) work: Work,
    /// The records as this worker knows them while it decides: those of an earlier time, or none.
    pub(super) known: [Option<Record>; JOBS],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ticket {
    pub(super) id: TicketId,
    pub(super) delivered: bool,
}

/// What the reconciler is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Reconciling {
    pub(super) counted: Option<(u64, TicketId)>,
    pub(super) before: [bool; JOBS],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) jobs: [Option<Record>; JOBS],
    /// Jobs whose gateway has still to publish the ticket.
    pub(super) publishing: [bool; JOBS],
    pub(super) tickets: Vec<Ticket>,
    pub(super) clock: i64,
    pub(super) sequence: u64,
    pub(super) workers: [Worker; WORKERS],
    pub(super) gateways: [u8; 2],
    pub(super) reconciling: Reconciling,
    /// How many jobs are submitted, and how many faults happen, at most.
    pub(super) submissions: usize,
    pub(super) faults: u8,
}

/// What may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
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
    pub(super) fn is_fault(self) -> bool {
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
pub(super) enum Without {
    Nothing,
    Reconciler,
    AdoptedWebhooks,
    /// Workers that return what they have claimed without knowing it.
    Returning,
}

impl World {
    pub(super) fn new(submissions: usize, faults: u8) -> World {
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

    pub(super) fn name(&self, worker: usize) -> String {
        format!("{worker}.{}", self.workers[worker].incarnation)
    }

    pub(super) fn is_alive(&self, name: &str) -> bool {
        (0..WORKERS).any(|worker| self.name(worker) == name && !self.workers[worker].frozen)
    }

    pub(super) fn publish(&mut self) {
        (self.clock, self.sequence) = (self.clock + 1, self.sequence + 1);
        let id = TicketId { stored: self.clock, sequence: self.sequence };
        self.tickets.push(Ticket { id, delivered: false });
    }

    /// Whether a live worker has this ticket, so that the stream does not deliver it again.
    pub(super) fn is_held(&self, ticket: TicketId) -> bool {
        self.workers.iter().filter(|worker| !worker.frozen).any(|worker| match &worker.work {
            Work::Idle => false,
            Work::Decide(held, _) | Work::Run(_, held) | Work::Remove(held) => *held == ticket,
        })
    }

    /// Whether a live worker is named by a record and does not know of it.
    pub(super) fn is_unheld(&self, job: usize, record: &Record) -> bool {
        let own = |worker: &usize| record.worker.as_deref() == Some(&self.name(*worker));
        let holds =
            |worker: &Worker| worker.frozen || matches!(worker.work, Work::Run(held, _) if held == job);
        record.state == JobState::Running
            && (0..WORKERS).find(own).is_some_and(|worker| !holds(&self.workers[worker]))
    }

    /// Writes a record if it has the revision that the change began with.
    pub(super) fn write(&mut self, job: usize, seen: &Record, changed: Record) -> bool {
        let same = self.jobs[job].as_ref().is_some_and(|now| now.revision == seen.revision);
        if same {
            self.jobs[job] = Some(changed);
        }
        same
    }

    pub(super) fn events(&self, without: Without) -> Vec<Event> {
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
                    let abandoned = record.state == JobState::Running
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

    pub(super) fn check(&self) -> Result<(), String> {
        match self.jobs.iter().flatten().find(|record| record.ends > 1) {
            Some(record) => Err(format!("a job ended twice: {record:?}")),
            None => Ok(()),
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.jobs.iter().flatten().all(|record| record.is_final() && !record.webhook)
    }
}
