//! Checks that the built-in model's file exists, for a clear message instead of one from `include_bytes!`.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_EMBER").is_none() {
        return;
    }
    // Read at run time: the compiled script may outlive the folder it was compiled in.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    let file = Path::new(&package).join("../../assets/ember/ember.safetensors");
    println!("cargo::rerun-if-changed={}", file.display());
    if !file.is_file() {
        println!(
            "cargo::error=the feature `ember` embeds assets/ember/ember.safetensors, which is missing: check it out, \
             create it with tools/ember, or build without the feature (--no-default-features)"
        );
    }
}
