//! Any text as a `model.toml`: an error, or parts below the folder it stands in.
#![no_main]

use std::path::Path;

use kiln_engine::Parts;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(parts) = Parts::parse(text, Path::new("models")) else { return };
    let Parts { transformer, text_encoder, vae, tokenizer, .. } = parts;
    for path in [transformer, text_encoder, vae, tokenizer].into_iter().flatten() {
        assert!(path.starts_with("models") && !path.components().any(|c| c.as_os_str() == ".."));
    }
});
