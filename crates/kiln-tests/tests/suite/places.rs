//! CONTRIBUTING.md lists the files that an operation touches: every one of them names it, and no other does.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The listed files for an operation of a family: those of every operation, and those of some.
fn listed(family: &str) -> [BTreeSet<PathBuf>; 2] {
    let text = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let (_, section) = text.split_once("\n## Adding an operation\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let mut files = [BTreeSet::new(), BTreeSet::new()];
    for row in section.lines().filter(|line| line.starts_with('|')) {
        let paths = row.split('`').skip(1).step_by(2).filter(|path| path.contains('/'));
        for path in paths.map(|path| path.replace("FAMILY", family)) {
            let path = if path.starts_with("kiln-") { format!("crates/{path}") } else { path };
            assert!(root().join(&path).is_file(), "{path} is listed, but not there");
            files[usize::from(row.starts_with("| if "))].insert(path.into());
        }
    }
    files
}

/// All files of the code that operations are part of, without tests.
fn sources() -> Vec<PathBuf> {
    let mut folders = vec![root().join("tools/cuda")];
    for name in ["ops", "cpu", "cuda", "wgpu", "conformance"] {
        let of = |folder| root().join(format!("crates/kiln-{name}/{folder}"));
        folders.extend(["src", "kernels", "examples"].map(of).into_iter().filter(|folder| folder.is_dir()));
    }
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() { &mut folders } else { &mut files }.push(path);
        }
    }
    files
}

/// Whether the code of a file names an operation; comments don't count.
fn names(path: &Path, operation: &str) -> bool {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().any(|line| line.split("//").next().is_some_and(|code| code.contains(operation)))
}

#[test]
fn an_operation_is_named_in_the_listed_files_and_in_no_other() {
    for (operation, family) in [("blend_rows", "elementwise"), ("rms_norm", "norm")] {
        let [always, sometimes] = listed(family);
        assert!((8..=12).contains(&always.len()), "{always:?}");
        for path in &always {
            assert!(names(&root().join(path), operation), "{} does not name {operation}", path.display());
        }
        for path in sources() {
            let path = path.strip_prefix(root()).unwrap();
            if !always.contains(path) && !sometimes.contains(path) {
                let named = names(&root().join(path), operation);
                assert!(!named, "{} names {operation} and is not listed", path.display());
            }
        }
    }
}
