//! Arbitrary bytes as a weight file: an error, or tensors that can all be read.
#![no_main]

use bytes::Bytes;
use kiln_weights::WeightSource;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(source) = WeightSource::from_bytes("fuzz", Bytes::copy_from_slice(data)) else { return };
    for name in source.names() {
        // Scales of fp8 and int8 tensors are checked when they are used, and may not fit.
        if source.packed_format(name).is_some() || source.is_int8(name) {
            let _ = source.tensor(name);
            continue;
        }
        let tensor = source.tensor(name).expect("a validated header describes readable tensors");
        assert_eq!(source.entry(name), Some((tensor.dtype(), tensor.shape())));
        let _ = (tensor.to_f32(), tensor.to_i64());
    }
    assert!(source.bytes() <= data.len() as u64);
    source.fingerprint().expect("the data is in memory");
    let _ = source.tensor("layers.0.weight");
});
