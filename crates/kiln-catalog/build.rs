//! Finds the files of the built-in model for the feature `ember`: in the repository, or in the folder that `KILN_EMBER` names.
//!
//! The package of this crate has no room for them. It is built without the model, unless `KILN_EMBER` is set.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=KILN_EMBER");
    println!("cargo::rustc-check-cfg=cfg(built_in_ember)");
    if std::env::var_os("CARGO_FEATURE_EMBER").is_none() {
        return;
    }
    // Read at run time: the compiled script may outlive the folder it was compiled in.
    let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let package = path("CARGO_MANIFEST_DIR").unwrap_or_default();
    let named = path("KILN_EMBER");
    let is_published = package.join("Cargo.toml.orig").is_file();
    let folder = named.clone().unwrap_or_else(|| package.join("../../assets/ember"));
    let file = folder.join("ember.safetensors");
    if file.is_file() {
        println!("cargo::rerun-if-changed={}", file.display());
        println!("cargo::rustc-cfg=built_in_ember");
        println!("cargo::rustc-env=KILN_EMBER_FOLDER={}", folder.display());
    } else if named.is_none() && is_published {
        println!(
            "cargo::warning=built without Ember, whose files are too large for a package: KILN_EMBER may name a folder \
             with them, assets/ember of the repository"
        );
    } else {
        println!(
            "cargo::error=the feature `ember` embeds {}, which is missing: check it out, create it with tools/ember, or \
             build without the feature (--no-default-features)",
            file.display()
        );
    }
}
