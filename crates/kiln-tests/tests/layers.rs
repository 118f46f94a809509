//! The layers inside crates, as `tools/layers.txt` lists them: no file names what is above it.

use std::fs;
use std::path::{Path, PathBuf};

/// Names that belong to HTTP: jobs know nothing of it.
const NOT_IN_JOBS: [&str; 4] = ["axum", "hyper", "crate::Server", "crate::Config"];

#[test]
fn imports_run_down_only() {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let list = fs::read_to_string(tree.join("tools/layers.txt")).unwrap();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let (name, layers) = line.split_once(": ").unwrap();
        let layers: Vec<Vec<&str>> = layers.split(" | ").map(|layer| layer.split(' ').collect()).collect();
        let rank = |module: &str| layers.iter().position(|layer| layer.contains(&module));
        let source = tree.join("crates").join(name).join("src");
        let files = rust_files(&source);
        assert!(files.len() > 20, "{name} has {} files", files.len());
        for path in files {
            let relative = path.strip_prefix(&source).unwrap();
            let module = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
            if matches!(module, "lib" | "main") {
                continue;
            }
            let own = rank(module).unwrap_or_else(|| panic!("{name}: {module} is in no layer"));
            let text = fs::read_to_string(&path).unwrap();
            let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            let code = code.join("\n");
            let above: Vec<&str> = modules(&code)
                .into_iter()
                .filter(|module| rank(module).is_some_and(|other| other > own))
                .collect();
            assert!(above.is_empty(), "{} names {above:?}, which is above it", path.display());
            let foreign = NOT_IN_JOBS.iter().find(|word| module == "jobs" && code.contains(**word));
            assert_eq!(foreign, None, "in {}", path.display());
        }
    }
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] }).collect()
}

/// The modules at the crate's root that code names: `crate::a::B`, `crate::{a, b::{C, D}}`.
fn modules(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (start, prefix) in code.match_indices("crate::") {
        let rest = &code[start + prefix.len()..];
        let mut depth = 0;
        let mut is_first = true;
        for word in rest.split_inclusive(|c: char| !c.is_alphanumeric() && c != '_') {
            let (name, end) = word.split_at(word.len() - word.chars().next_back().map_or(0, char::len_utf8));
            if is_first && !name.is_empty() {
                found.push(name);
                is_first = false;
            }
            match end {
                "{" => depth += 1,
                "}" => depth -= 1,
                // The next entry of the outer list.
                "," if depth == 1 => is_first = true,
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    found
}

#[test]
fn modules_are_found_in_lists() {
    assert_eq!(modules("use crate::a::B;\ncrate::c(crate::d::e)"), ["a", "c", "d"]);
    assert_eq!(modules("use crate::{\n    a::{B, C},\n    d, e::F,\n};\nuse std::{x, y};"), ["a", "d", "e"]);
}
