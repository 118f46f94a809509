//! The model is layered: no two files import each other, even indirectly.

use std::path::Path;

use kiln_conformance::imports::import_cycles;

#[test]
fn there_are_no_import_cycles() {
    let cycles = import_cycles(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(cycles.is_empty(), "files that import each other: {cycles:#?}");
}
