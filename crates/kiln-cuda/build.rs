//! Packs the source of the kernels.

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    kiln_pack::pack_files(&kiln_pack::files_of("kernels")?, "kernels.packed")
}
