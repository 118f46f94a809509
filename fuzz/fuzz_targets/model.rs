//! Any bytes as a model packed into one file: an error, or a configuration that can resolve a request.
#![no_main]

use bytes::Bytes;
use kiln_model::{ModelFolder, Options, Request};
use kiln_weights::WeightSource;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(source) = WeightSource::from_bytes("fuzz.safetensors", Bytes::copy_from_slice(data)) else { return };
    let Ok(model) = ModelFolder::packed(source) else { return };
    let _ = model.transformer.weights();
    let _ = model.resolve(&Request::new("a fox"), &Options::default());
});
