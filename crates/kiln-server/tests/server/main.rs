//! The server from the outside, with a painter who is quick and does what its prompt says.

mod a1111;
mod faults;
mod gallery;
mod jobs;
mod kit;
mod openai;
mod restart;
mod safety;
mod socket;
mod together;
