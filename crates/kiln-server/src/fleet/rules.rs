//! The decisions about jobs and tickets, without any input or output: workers, gateways and the model test share them.
//! The parent module says why they suffice.

use super::records::TicketId;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::job::{Job, JobEnd, JobState};

/// When a job is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiveUp {
    /// After so many workers were lost while they ran it.
    pub lost_workers: u32,
    /// After so many errors of workers.
    pub failures: u32,
}

impl Default for GiveUp {
    fn default() -> GiveUp {
        GiveUp { lost_workers: 2, failures: 3 }
    }
}

/// The job whose claim names a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// No job does.
    Nobody,
    /// A job that has ended.
    Ended,
    /// A job that this worker runs.
    Own,
    /// A running job whose worker may be alive.
    Running,
    /// A running job whose worker is gone, or does not know of it.
    Abandoned,
}

/// What a worker knows when it has a ticket.
#[derive(Clone, Copy, Debug)]
pub(super) struct TicketView {
    pub(super) named: Named,
    /// A queued job of the model that this worker may run is known.
    pub(super) runnable: bool,
    /// A queued job of the model is known.
    pub(super) queued: bool,
    /// Every record is known that was written before the ticket was received.
    pub(super) caught_up: bool,
}

/// What a worker does with a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TicketAction {
    /// Wait for the records that were written before now, and decide again.
    CatchUp,
    /// Claim a queued job.
    Claim,
    /// Return the abandoned job to the queue, and decide again.
    Recover,
    /// It belongs to the job that runs here.
    Keep,
    /// Remove it from the stream.
    Remove,
    /// Leave it to others for a moment: they may run what is queued.
    Return,
    /// Leave it for a while: its job runs elsewhere.
    ReturnLater,
}

/// Decides what to do with a ticket. It is removed only if its job has ended or, with all records known, no job is queued.
pub(super) fn decide(view: TicketView) -> TicketAction {
    match view.named {
        Named::Ended => TicketAction::Remove,
        Named::Own => TicketAction::Keep,
        Named::Abandoned => TicketAction::Recover,
        Named::Nobody if view.runnable => TicketAction::Claim,
        _ if !view.caught_up => TicketAction::CatchUp,
        Named::Running => TicketAction::ReturnLater,
        Named::Nobody if view.queued => TicketAction::Return,
        Named::Nobody => TicketAction::Remove,
    }
}

/// Claims a queued job for a worker. `starts` says that a generator is free for it.
pub(super) fn claim(job: &mut Job, worker: &str, ticket: TicketId, starts: bool, now: i64) {
    job.state = JobState::Running;
    job.fleet.worker = Some(worker.to_owned());
    job.set_ticket(ticket);
    job.attempts += 1;
    job.started = Some(now);
    job.fleet.began = starts;
}

/// Whether a job is claimed by this worker with this ticket.
pub(super) fn is_claimed_by(job: &Job, worker: &str, ticket: TicketId) -> bool {
    job.state == JobState::Running
        && job.fleet.worker.as_deref() == Some(worker)
        && job.ticket_id() == Some(ticket)
}

/// Takes a running job from a worker that is gone: queued again, cancelled, or given up. Only a worker that was
/// generating it counts against it, and not if that worker is alive after all: it was only out of reach. Returns whether
/// the job is given up.
pub(super) fn recover(job: &mut Job, is_alive: impl Fn(&str) -> bool, give_up: GiveUp, now: i64) -> bool {
    let worker = job.fleet.worker.clone().unwrap_or_default();
    if job.fleet.began {
        job.fleet.history.push(format!("worker {worker} was lost while it ran this job"));
        // One that comes back and is out of reach again is still one worker.
        if !job.fleet.suspects.contains(&worker) {
            job.fleet.suspects.push(worker);
        }
    } else {
        job.fleet.history.push(format!("worker {worker} was lost before it ran this job"));
        job.fleet.losses += 1;
    }
    job.fleet.kills = job.fleet.suspects.iter().filter(|worker| !is_alive(worker)).count() as u32;
    if job.fleet.kills >= give_up.lost_workers && !job.fleet.cancel {
        let message =
            format!("{} workers were lost while they ran this job; it is not tried again", job.fleet.kills);
        job.error = Some(JobError::new(ErrorCode::Interrupted, message));
        (job.state, job.finished) = (JobState::Failed, Some(now));
        return true;
    }
    requeue(job, now);
    false
}

/// Queues a job again, unless it was cancelled while it ran.
fn requeue(job: &mut Job, now: i64) {
    job.return_to_queue();
    job.finished = None;
    if job.fleet.cancel {
        job.error = Some(JobError::cancelled());
        (job.state, job.finished) = (JobState::Cancelled, Some(now));
    }
}

/// What became of a job whose attempt has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    Ended,
    /// It has failed too often.
    GivenUp,
    /// Queued again, for any worker.
    Returned,
    /// Queued again; this worker can't run it for reasons of its own.
    SetAside,
}

/// Applies the end of an attempt to a job that the worker holds.
pub(super) fn finish(job: &mut Job, end: &JobEnd, worker: &str, give_up: GiveUp) -> Finish {
    // Cancelled by nobody: the attempt ended because another worker took the job, which this one has claimed again since.
    if end.state == JobState::Cancelled && !job.fleet.cancel && !job.fleet.stop_at_preview {
        give_back(job, end.finished);
        return Finish::Returned;
    }
    job.notes.clone_from(&end.notes);
    job.error.clone_from(&end.error);
    job.finished = Some(end.finished);
    job.state = end.state;
    let Some(error) = end.error.as_ref().filter(|_| end.state == JobState::Failed) else {
        return Finish::Ended;
    };
    let outcome = match error.code {
        // These say nothing about the job: the model can't be loaded here, nothing can be stored.
        ErrorCode::ModelFailed | ErrorCode::Storage => {
            set_aside(job, worker, error, end.finished);
            Finish::SetAside
        }
        _ if !error.may_be_retried() => Finish::Ended,
        _ if fail(job, worker, error, give_up, end.finished) => Finish::GivenUp,
        _ => Finish::Returned,
    };
    if job.state == JobState::Cancelled { Finish::Ended } else { outcome }
}

/// Counts an error of a worker: queued again, or given up. Returns whether the job is given up.
fn fail(job: &mut Job, worker: &str, error: &JobError, give_up: GiveUp, now: i64) -> bool {
    job.fleet.failures += 1;
    let code = error.code.name();
    job.fleet.history.push(format!("failed on worker {worker}: {code}: {error}"));
    job.fleet.failed_on.push(worker.to_owned());
    if job.fleet.failures >= give_up.failures && !job.fleet.cancel {
        job.state = JobState::Failed;
        return true;
    }
    requeue(job, now);
    false
}

/// Returns a job to the queue whose worker can't run it for reasons of its own: it does not count against the job.
fn set_aside(job: &mut Job, worker: &str, error: &JobError, now: i64) {
    if !job.fleet.failed_on.iter().any(|other| other == worker) {
        let code = error.code.name();
        job.fleet.history.push(format!("returned by worker {worker}: {code}: {error}"));
        job.fleet.failed_on.push(worker.to_owned());
    }
    give_back(job, now);
}

/// Returns a claimed job to the queue as if it had not been claimed.
pub(super) fn give_back(job: &mut Job, now: i64) {
    job.attempts = job.attempts.saturating_sub(1);
    requeue(job, now);
}

/// What the reconciler has seen of a model: the tickets first, then the records.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelView {
    /// Tickets that workers can get or hold.
    pub(super) tickets: u64,
    /// Tickets on the stream, also such that no worker can get.
    pub(super) stored: u64,
    /// Unfinished jobs.
    pub(super) unfinished: u64,
    /// Those of them that were unfinished when the reconciler looked before, too: their tickets were not just on their way.
    pub(super) settled: u64,
}

/// What the reconciler does about a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mend {
    Nothing,
    /// Publish so many tickets.
    Publish(u64),
    /// Remove the tickets that were seen: every job that they were published for has ended.
    Purge,
}

/// Compares the tickets of a model with its jobs.
pub(super) fn reconcile(view: ModelView) -> Mend {
    match view.settled.saturating_sub(view.tickets) {
        0 if view.unfinished == 0 && view.stored > 0 => Mend::Purge,
        0 => Mend::Nothing,
        missing => Mend::Publish(missing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(named: Named, runnable: bool, queued: bool, caught_up: bool) -> TicketAction {
        decide(TicketView { named, runnable, queued, caught_up })
    }

    #[test]
    fn a_ticket_is_removed_only_without_queued_jobs_and_with_all_records_known() {
        use TicketAction::*;
        assert_eq!(view(Named::Nobody, false, false, false), CatchUp);
        assert_eq!(view(Named::Nobody, false, false, true), Remove);
        assert_eq!(view(Named::Nobody, false, true, true), Return);
        assert_eq!(view(Named::Nobody, true, true, false), Claim);
        // Also one that is delivered for the first time, as a new leader of a cluster may think.
        assert_eq!(view(Named::Running, false, false, true), ReturnLater);
        assert_eq!(view(Named::Running, true, true, true), ReturnLater);
        assert_eq!(view(Named::Abandoned, false, false, false), Recover);
        assert_eq!(view(Named::Ended, true, true, false), Remove);
    }

    #[test]
    fn only_workers_that_ran_a_job_and_are_gone_count_against_it() {
        let ticket = TicketId { stored: 1, sequence: 1 };
        let lose = |job: &mut Job, worker: &str, ran: bool, alive: &[&str]| {
            claim(job, worker, ticket, ran, 0);
            recover(job, |worker| alive.contains(&worker), GiveUp::default(), 1)
        };
        // Claimed ahead: never counted.
        let mut job = Job::test("a");
        for worker in ["a", "b", "c", "d"] {
            assert!(!lose(&mut job, worker, false, &[]));
        }
        assert_eq!((job.state, job.fleet.kills, job.fleet.losses), (JobState::Queued, 0, 4));
        // Frozen workers that came back.
        let mut job = Job::test("a");
        assert!(!lose(&mut job, "a", true, &[]));
        assert!(!lose(&mut job, "b", true, &["a"]));
        assert!(!lose(&mut job, "c", true, &["a", "b"]));
        // One of them twice.
        assert!(!lose(&mut job, "c", true, &["a", "b"]));
        // And two that did not.
        assert!(lose(&mut job, "d", true, &["a", "b"]));
        assert_eq!((job.state, job.fleet.kills), (JobState::Failed, 2));
    }

    #[test]
    fn only_a_cancelled_job_ends_as_cancelled() {
        let ticket = TicketId { stored: 1, sequence: 1 };
        let finish_as = |job: &mut Job, state, code: Option<ErrorCode>| {
            claim(job, "a", ticket, true, 0);
            let error = code.map(|code| JobError::new(code, "message"));
            let end = JobEnd { id: "a".into(), state, error, notes: Vec::new(), finished: 1 };
            finish(job, &end, "a", GiveUp::default())
        };
        // Its worker was told that another one has it.
        let mut job = Job::test("a");
        assert_eq!(finish_as(&mut job, JobState::Cancelled, Some(ErrorCode::Cancelled)), Finish::Returned);
        assert_eq!((job.state, job.attempts, job.error.is_none()), (JobState::Queued, 0, true));
        assert_eq!(finish_as(&mut job, JobState::Done, None), Finish::Ended);
        for (cancel, stop_at_preview) in [(true, false), (false, true)] {
            let mut job = Job::test("a");
            (job.fleet.cancel, job.fleet.stop_at_preview) = (cancel, stop_at_preview);
            assert_eq!(finish_as(&mut job, JobState::Cancelled, Some(ErrorCode::Cancelled)), Finish::Ended);
            assert_eq!(job.state, JobState::Cancelled);
        }
        // Cancelled, and returned before its worker heard of that.
        for code in [ErrorCode::ModelFailed, ErrorCode::GenerationFailed] {
            let mut job = Job::test("a");
            job.fleet.cancel = true;
            assert_eq!(finish_as(&mut job, JobState::Failed, Some(code)), Finish::Ended);
            assert_eq!((job.state, job.finished), (JobState::Cancelled, Some(1)));
        }
        let mut job = Job::test("a");
        claim(&mut job, "a", ticket, true, 0);
        job.fleet.cancel = true;
        give_back(&mut job, 7);
        assert_eq!((job.state, job.finished), (JobState::Cancelled, Some(7)));
        // What the worker itself lacks does not count against the job; what may be the job's fault does.
        let mut job = Job::test("a");
        for _ in 0..4 {
            assert_eq!(finish_as(&mut job, JobState::Failed, Some(ErrorCode::ModelFailed)), Finish::SetAside);
        }
        assert_eq!(
            finish_as(&mut job, JobState::Failed, Some(ErrorCode::GenerationFailed)),
            Finish::Returned
        );
        assert_eq!(
            finish_as(&mut job, JobState::Failed, Some(ErrorCode::GenerationFailed)),
            Finish::Returned
        );
        assert_eq!(finish_as(&mut job, JobState::Failed, Some(ErrorCode::GenerationFailed)), Finish::GivenUp);
        assert_eq!((job.state, job.fleet.failures), (JobState::Failed, 3));
    }

    #[test]
    fn missing_tickets_are_published_and_those_of_ended_jobs_removed() {
        let mend = |tickets: u64, unfinished, settled| {
            reconcile(ModelView { tickets, stored: tickets, unfinished, settled })
        };
        assert_eq!(mend(0, 2, 1), Mend::Publish(1));
        assert_eq!(mend(0, 2, 0), Mend::Nothing);
        assert_eq!(mend(3, 2, 2), Mend::Nothing);
        assert_eq!(mend(3, 0, 0), Mend::Purge);
        assert_eq!(mend(0, 0, 0), Mend::Nothing);
    }
}
