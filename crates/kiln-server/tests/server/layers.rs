//! The layers of the crate: jobs know neither HTTP nor fleets, and HTTP knows no fleets.

use std::fs;
use std::path::Path;

#[test]
fn imports_run_down_only() {
    check("jobs", &["axum", "hyper", "crate::http", "crate::fleet", "crate::Server", "crate::Config"]);
    check("http", &["crate::fleet"]);
}

/// Checks that no file of a layer names what is above it.
fn check(layer: &str, above: &[&str]) {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(layer)];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            files += 1;
            let text = fs::read_to_string(&path).unwrap();
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            let named = code.flat_map(|line| above.iter().filter(|name| line.contains(**name)));
            assert_eq!(named.collect::<Vec<_>>(), Vec::<&&str>::new(), "in {}", path.display());
        }
    }
    assert!(files > 20, "{layer} has {files} files");
}
