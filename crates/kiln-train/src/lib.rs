//! Trains LoRAs: what `kiln train` does, without the command line.
#![forbid(unsafe_code)]
