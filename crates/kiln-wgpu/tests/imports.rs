//! The crate is layered: files don't import each other in cycles.

use std::path::Path;

use kiln_conformance::imports::import_cycles;

#[test]
fn files_do_not_import_each_other_in_cycles() {
    let cycles = import_cycles(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(cycles.is_empty(), "import cycles: {cycles:#?}");
}
