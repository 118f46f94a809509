//! Arbitrary bytes as an image file with an AI mark and a manifest store, and as a store: what is read is no longer than they are.
#![no_main]

use kiln_credentials::is_store;
use kiln_image::{read_ai_mark, read_manifest_store, with_manifest_store};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = is_store(data);
    let _ = read_ai_mark(data);
    let Ok(store) = read_manifest_store(data) else { return };
    if let Some(store) = &store {
        assert!(store.len() <= data.len());
        let _ = is_store(store);
        return;
    }
    let own = [&[0, 0, 0, 16][..], b"jumb", &[7; 8]].concat();
    if let Ok((file, range)) = with_manifest_store(data, &own) {
        assert!(range.len() > own.len() && range.end <= file.len());
    }
});
