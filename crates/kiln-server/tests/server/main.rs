//! The server from the outside, with a generator that is quick and does what its prompt says.

mod a1111;
mod faults;
mod gallery;
mod inputs;
mod jobs;
mod kit;
mod knobs;
mod openai;
mod pipeline;
mod restart;
mod safety;
mod socket;
mod together;
