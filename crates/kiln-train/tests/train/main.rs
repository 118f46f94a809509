//! Trainings of tiny models: against dumps of diffusers and PEFT, and against themselves.

mod golden;
mod trainer;
