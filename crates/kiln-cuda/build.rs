//! Packs the source of the kernels, and embeds their machine code if there is any.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    kiln_pack::pack_files(&kiln_pack::files_of("kernels")?, "kernels.packed")?;
    // The folder is watched, not the file: cargo runs a script again and again for a file that is not there.
    println!("cargo::rerun-if-changed=compiled");
    let folder = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    let compiled = match std::fs::read(folder("CARGO_MANIFEST_DIR").join("compiled/kernels.packed")) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        read => read?,
    };
    std::fs::write(folder("OUT_DIR").join("compiled.packed"), compiled)
}
