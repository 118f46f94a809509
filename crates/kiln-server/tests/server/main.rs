//! Tests of the server through its HTTP API, with a fast generator whose behaviour the prompt selects.

mod a1111;
mod a1111_lists;
mod attacks;
mod batching;
mod check;
mod downloads;
#[cfg(feature = "s3")]
mod fake_s3;
mod fake_trainer;
mod faults;
mod fields;
#[cfg(feature = "fleet")]
mod fleet;
mod gallery;
mod harness;
mod http;
mod inputs;
mod jobs;
mod keys;
mod kills;
mod marks;
#[cfg(feature = "fleet")]
mod nats;
mod openai;
mod page;
mod pipeline;
mod plots;
mod prompts;
mod queue;
mod recipes;
mod restart;
mod safety;
mod shares;
mod sign;
mod socket;
mod storage;
mod submitting;
mod tls;
mod traces;
mod trained_loras;
mod trainings;
mod upscale;
mod verify;

/// The address of the NATS server whose fleet takes the place of the server under test.
fn fleet_url() -> Option<String> {
    std::env::var("KILN_TEST_FLEET").ok().filter(|_| cfg!(feature = "fleet"))
}
