//! The crate is layers: no file uses one that uses it.

use std::path::Path;

use kiln_conformance::imports::circles;

#[test]
fn no_files_use_each_other() {
    let circles = circles(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(circles.is_empty(), "files that use each other: {circles:#?}");
}
