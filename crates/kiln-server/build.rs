//! Packs the page and the description of the API.

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    kiln_pack::pack_files_gzip(&kiln_pack::files_of("page")?, "page.packed")?;
    kiln_pack::pack_files_gzip(&["openapi.json"], "openapi.packed")
}
