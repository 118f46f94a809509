//! Trainings of tiny models: against dumps of diffusers and PEFT, and against themselves.

mod caches;
mod forward;
mod golden;
mod shared;
mod trainer;
