//! The pipeline beyond the golden cases themselves: batches, file layouts, LoRAs, events, TAEF2.

mod batching;
mod dev;
mod dev_files;
mod layouts;
mod lora;
mod pipeline;
mod step_cache;
mod taef2;
mod tensors;
mod upsample;
