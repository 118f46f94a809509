//! Arbitrary bytes as a GGUF file: an error, or tensors that can all be dequantized, as they are and as components of a model.
#![no_main]

use kiln_weights::{Component, WeightSource};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let file = [b"GGUF", data].concat();
    let Ok(source) = WeightSource::from_bytes("fuzz.gguf", file.clone()) else { return };
    assert!(source.bytes() <= file.len() as u64);
    for name in source.names() {
        let tensor = source.tensor(name).expect("a validated header describes readable tensors");
        assert_eq!(source.entry(name).map(|(_, shape)| shape), Some(tensor.shape()));
    }
    for component in Component::ALL {
        if let Ok(Some(source)) = source.component(component) {
            source.names().for_each(|name| drop(source.tensor(name)));
        }
    }
});
