//! What an event changes, by the rules of real workers and gateways.

use std::collections::BTreeSet;

use super::record::Record;
use super::world::{Event, JOBS, Reconciling, Work, Worker, World};
use crate::fleet::records::TicketId;
use crate::fleet::rules::{self, GiveUp, Mend, ModelView, Named, TicketAction, TicketView};
use crate::jobs::job::JobState;

impl World {
    pub(super) fn apply(&self, event: Event) -> World {
        let mut world = self.clone();
        world.faults -= u8::from(event.is_fault());
        match event {
            Event::Submit(job) => {
                // The first gateway accepts the first job, which has a webhook.
                world.jobs[job] = Some(Record {
                    revision: 1,
                    state: JobState::Queued,
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
                world.write(job, &seen, seen.change(|job| rules::give_back(job, 0)).0);
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
                let queued = known.iter().position(|record| {
                    record.as_ref().is_some_and(|record| record.state == JobState::Queued)
                });
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
}
