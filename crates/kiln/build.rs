//! Says clearly what is missing when the model that goes into the program is not there.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_EMBER").is_none() {
        return;
    }
    // asked for when the script runs: the compiled script may outlive the folder it was compiled in
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    let file = Path::new(&package).join("../../assets/ember/ember.safetensors");
    println!("cargo::rerun-if-changed={}", file.display());
    if !file.is_file() {
        println!(
            "cargo::error=the feature `ember` builds assets/ember/ember.safetensors into the program, and that file is \
             not there: check it out, make it with tools/ember, or build without it (--no-default-features)"
        );
    }
}
