//! Gateways and workers on a real NATS server. Without one these tests say so and pass.

mod faults;
mod hostile;

use std::process::Command;

use crate::nats::Nats;

/// Modules that test the database or the threads of a server that is alone.
const ALONE: [&str; 9] =
    ["fleet::", "kills::", "faults::", "storage::", "restart::", "pipeline::", "socket::", "tls::", "check::"];
/// Tests of what a gateway does not do, or of the number of jobs that one machine plans ahead.
const NOT_ON_A_GATEWAY: [&str; 1] = ["downloads::"];

#[test]
fn the_tests_of_the_server_pass_on_a_fleet() {
    let Some(nats) = Nats::start() else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    for skipped in ALONE.iter().chain(&NOT_ON_A_GATEWAY) {
        command.args(["--skip", skipped]);
    }
    let output = command.env("KILN_TEST_FLEET", nats.url()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let passed = text.lines().rev().find(|line| line.starts_with("test result")).unwrap_or_default();
    println!("{passed}");
}
