//! Says clearly what is missing when the model that goes into the program is not there.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_EMBER").is_none() {
        return;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/ember/ember.safetensors");
    println!("cargo::rerun-if-changed={}", file.display());
    if !file.is_file() {
        println!(
            "cargo::error=the feature `ember` builds assets/ember/ember.safetensors into the program, and that file is \
             not there: check it out, make it with tools/ember, or build without it (--no-default-features)"
        );
    }
}
