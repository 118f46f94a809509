//! What decides in the record of a job, so that states can be compared.

use crate::fleet::records::TicketId;
use crate::jobs::job::{Job, JobState};

/// What decides in a job's record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Record {
    pub(super) revision: u8,
    pub(super) state: JobState,
    pub(super) worker: Option<String>,
    pub(super) ticket: Option<TicketId>,
    pub(super) began: bool,
    pub(super) suspects: Vec<String>,
    pub(super) losses: u32,
    /// The gateway that accepted it, by its number and incarnation.
    pub(super) gateway: (usize, u8),
    pub(super) webhook: bool,
    pub(super) ends: u8,
}

impl Record {
    /// Applies a rule to the record as the rules see it.
    pub(super) fn change<T>(&self, rule: impl FnOnce(&mut Job) -> T) -> (Record, T) {
        let mut job = TEMPLATE.with(Job::clone);
        job.state = self.state;
        job.fleet.worker.clone_from(&self.worker);
        if let Some(ticket) = self.ticket {
            job.set_ticket(ticket);
        }
        (job.fleet.began, job.fleet.losses) = (self.began, self.losses);
        job.fleet.suspects.clone_from(&self.suspects);
        let result = rule(&mut job);
        let changed = Record {
            revision: self.revision + 1,
            state: job.state,
            ticket: job.ticket_id(),
            worker: job.fleet.worker,
            began: job.fleet.began,
            suspects: job.fleet.suspects,
            losses: job.fleet.losses.min(1),
            ..self.clone()
        };
        if !changed.is_final() || self.is_final() {
            return (changed, result);
        }
        // The rest does not matter any more.
        let ended =
            Record { ends: self.ends + 1, worker: None, began: false, suspects: Vec::new(), ..changed };
        (ended, result)
    }

    pub(super) fn is_final(&self) -> bool {
        self.state.is_final()
    }
}

thread_local! {
    static TEMPLATE: Job = Job::test("job");
}
