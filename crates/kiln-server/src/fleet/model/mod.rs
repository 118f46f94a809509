//! A model of a fleet with two jobs, two workers, two gateways and few faults. Every order of events is explored; from
//! every state that can be reached, all accepted jobs must end and their webhooks be called once the faults stop, and no
//! job may end twice. The decisions are those of [`super::rules`], which real workers and gateways make, too.

mod apply;
mod record;
mod world;

use std::collections::HashSet;

use crate::jobs::job::JobState;
use world::{Event, MAX_TICKETS, Without, World};

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
    assert_eq!(world.jobs[0].as_ref().unwrap().state, JobState::Running);
    let error = complete(&world, Without::Returning, &mut HashSet::new()).unwrap_err();
    assert!(error.contains("do not end"), "{error}");
    complete(&world, Without::Nothing, &mut HashSet::new()).unwrap();
}
