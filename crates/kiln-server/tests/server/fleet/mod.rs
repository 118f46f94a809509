//! Gateways and workers on a real NATS server. Without one these tests say so and pass.

mod faults;
mod hostile;
mod housekeeping;
mod load;
mod mending;
pub mod node;
mod refusals;
#[cfg(feature = "s3")]
mod s3;
mod sign;
mod stuck;
mod unusable;

use std::process::Command;
use std::time::{Duration, Instant};

use crate::nats::Nats;

/// Tests of the database, the threads or the metrics of a server that is alone, and those that have nothing to do with
/// jobs.
const ALONE: [&str; 16] = [
    "fleet::",
    "kills::",
    "faults::",
    "storage::",
    "restart::",
    "pipeline::",
    "batching::",
    "socket::",
    "tls::",
    "traces::",
    "check::",
    "attacks::",
    "safety::",
    "inputs::",
    "keys::the_data_folder_and_its_files_are_private",
    "gallery::the_oldest_images_are_deleted",
];
/// Tests of what a gateway leaves to its workers, or does not do; of the jobs that a worker has claimed ahead.
const NOT_ON_A_GATEWAY: [&str; 10] = [
    "trainings::",
    "downloads::",
    "prompts::",
    "sign::",
    "keys::only_admins_download_models",
    "keys::recipes_are_left_out_of_files_on_request",
    "keys::files_are_marked_as_the_operator_says_whatever_the_job",
    "keys::errors_name_no_folder_of_the_server",
    "jobs::a_running_job_is_cancelled_within_a_step_and_a_queued_one_at_once",
    "shares::many_images_of_one_client_push_out_none_of_another",
];

/// Tests that take longer hang: these take a minute.
const LIMIT: Duration = Duration::from_secs(600);

#[test]
fn the_tests_of_the_server_pass_on_a_fleet() {
    let Some(nats) = Nats::start() else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    for skipped in ALONE.iter().chain(&NOT_ON_A_GATEWAY) {
        command.args(["--skip", skipped]);
    }
    // A file: a pipe that nobody reads would stop them.
    let output = tempfile::NamedTempFile::new().unwrap();
    let (stdout, stderr) = (output.reopen().unwrap(), output.reopen().unwrap());
    let mut tests = command.env("KILN_TEST_FLEET", nats.url()).stdout(stdout).stderr(stderr).spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = tests.try_wait().unwrap() {
            break Some(status);
        }
        if started.elapsed() > LIMIT {
            let _ = (tests.kill(), tests.wait());
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = std::fs::read_to_string(output.path()).unwrap();
    // The harness names the tests that run for more than a minute.
    assert!(
        status.is_some_and(|status| status.success()),
        "{status:?} after {:?}: {text}",
        started.elapsed()
    );
    let passed = text.lines().rev().find(|line| line.starts_with("test result")).unwrap_or_default();
    println!("{passed}");
}
