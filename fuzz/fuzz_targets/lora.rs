//! Any bytes as a LoRA: an error, or modules that can be laid over a model.
#![no_main]

use bytes::Bytes;
use kiln_weights::{Lora, WeightSource};
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
    let mut base = WeightSource::from_bytes("base", Bytes::from_static(BASE)).expect("the base is valid");
    base.add_lora(lora, 0.5);
    base.set_lora_partial(true);
    let _ = base.check_loras();
    if base.root().linear("x", 2, 2).is_ok() {
        let _ = base.finish_loras();
    }
});
