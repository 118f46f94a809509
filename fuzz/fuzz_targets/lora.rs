//! Arbitrary bytes as a LoRA: an error, or modules that can be applied to a model.
#![no_main]

use bytes::Bytes;
use kiln_weights::{LayerShape, Lora, LoraOptions, LoraUpdates, WeightSource};
use libfuzzer_sys::fuzz_target;

/// A model with the one layer `x`, of two rows and two columns.
const BASE: &[u8] = b"\x40\0\0\0\0\0\0\0\
    {\"x.weight\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}\
    0123456789abcdef";

fuzz_target!(|data: &[u8]| {
    let Ok(lora) = Lora::from_bytes("fuzz", Bytes::copy_from_slice(data)) else { return };
    assert!(lora.modules().all(|m| lora.scale(m).is_some_and(f64::is_finite)));
    let _ = (lora.rank(), lora.ranks(), lora.kinds(), lora.layouts(), lora.base());
    lora.fingerprint().expect("the data is in memory");
    let base = WeightSource::from_bytes("base", Bytes::from_static(BASE)).expect("the base is valid");
    let layers = [LayerShape { name: "x".into(), rows: 2, cols: 2 }];
    let options = LoraOptions { partial: true, ..LoraOptions::default() };
    let Ok((updates, _)) = LoraUpdates::resolve(&base, &layers, [(lora, 0.5)], options) else { return };
    let _ = base.root().with_loras(&updates).linear("x", 2, 2);
});
