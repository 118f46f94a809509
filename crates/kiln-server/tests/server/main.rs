//! Tests of the server through its HTTP API, with a fast generator whose behaviour the prompt selects.

mod a1111;
mod a1111_lists;
mod attacks;
mod batching;
mod downloads;
mod faults;
mod fields;
mod gallery;
mod harness;
mod inputs;
mod jobs;
mod keys;
mod marks;
mod openai;
mod page;
mod pipeline;
mod plots;
mod queue;
mod recipes;
mod restart;
mod safety;
mod socket;
mod storage;
mod submitting;
mod tls;
mod upscale;
