//! Arbitrary bytes as a model packed into one file: an error, or a configuration that can plan a request.
#![no_main]

use std::sync::Arc;

use bytes::Bytes;
use kiln_engine::{LocalFiles, Model, Plan, Request};
use kiln_weights::WeightSource;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(source) = WeightSource::from_bytes("fuzz.safetensors", Bytes::copy_from_slice(data)) else { return };
    let Ok(model) = Model::from_packed(source) else { return };
    let _ = model.transformer.weights();
    let _ = Plan::new(&Arc::new(model), &Request::new("a fox"), &LocalFiles);
});
