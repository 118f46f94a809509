//! Arbitrary text as a `model.toml`: an error, or paths inside of its folder.
#![no_main]

use std::path::Path;

use kiln_engine::ComponentPaths;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(paths) = ComponentPaths::parse(text, Path::new("models")) else { return };
    let ComponentPaths { transformer, text_encoder, vae, tokenizer, .. } = paths;
    for path in [transformer, text_encoder, vae, tokenizer].into_iter().flatten() {
        assert!(path.starts_with("models") && !path.components().any(|c| c.as_os_str() == ".."));
    }
});
