//! Reading and writing weights and LoRAs, through the public interface.

mod common;
mod dora_rules;
mod export;
mod folders;
mod formats;
mod gguf;
mod gguf_errors;
mod lora;
mod lora_conventions;
mod lora_errors;
mod lora_kinds;
mod lora_layouts;
mod lora_quantized;
mod lora_scale;
mod lora_settings;
mod malformed;
mod mistral;
mod mutations;
mod quantize;
mod refusals;
mod save;
mod source;
