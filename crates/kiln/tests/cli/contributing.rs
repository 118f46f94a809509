//! What CONTRIBUTING.md says must be changed for a new field of a request or a new family, compared with the tree.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(root().join(&path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// The files that a section of CONTRIBUTING.md lists in its table, without `crates/`.
fn listed(section: &str) -> Vec<String> {
    let text = read("CONTRIBUTING.md");
    let (_, section) = text.split_once(&format!("## {section}\n")).expect(section);
    let rows = section.split("\n## ").next().unwrap().lines().filter(|line| line.starts_with("| "));
    let files = rows.flat_map(|row| row.split('`').skip(1).step_by(2).map(str::to_owned));
    files.filter(|name| name.contains('.')).collect()
}

/// The text files below a folder, without its tests, whose words include one.
fn naming(word: &str, folder: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            let is_word = |part: &str| part.eq_ignore_ascii_case(word);
            if path.is_dir() {
                folders.extend((!path.ends_with("tests")).then_some(path));
            } else if let Ok(text) = fs::read_to_string(&path)
                && text.split(|c: char| !c.is_alphanumeric() && c != '_').any(is_word)
            {
                found.push(path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/"));
            }
        }
    }
    found.sort();
    found
}

/// `rho` is a plain number: what it takes is what any option takes.
#[test]
fn a_field_of_a_request_is_named_in_the_listed_files_and_in_no_list_of_fields() {
    let files = listed("Adding a field of a request");
    assert!((4..=6).contains(&files.len()), "{files:?}");
    for file in &files {
        let path = if file.starts_with("docs/") { file.clone() } else { format!("crates/{file}") };
        assert!(read(&path).contains("rho"), "CONTRIBUTING.md lists {path}, which doesn't name the field");
    }
    let doors = [
        "crates/kiln-ffi/src",
        "crates/kiln-python/src",
        "crates/kiln-python/python",
        "crates/kiln-server/src/http",
        "crates/kiln-server/src/fleet",
        "crates/kiln/src",
        "integrations/comfyui",
    ];
    let named: Vec<String> = doors.iter().flat_map(|folder| naming("rho", folder)).collect();
    assert_eq!(named, Vec::<String>::new(), "these follow from the schema of `Request`");
}

/// Pebble is a family for the tests alone.
#[test]
fn a_family_is_named_in_its_folder_and_in_one_line() {
    let of_family = naming("pebble", "crates/kiln-family/src");
    let (inside, outside): (Vec<_>, Vec<_>) =
        of_family.into_iter().partition(|file| file.contains("/pebble/"));
    assert!(inside.len() <= 5, "{inside:?}");
    assert_eq!(outside, ["crates/kiln-family/src/lib.rs"]);
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let folder = format!("crates/{name}/src");
        if name != "kiln-family" && root().join(&folder).is_dir() {
            assert_eq!(naming("pebble", &folder), Vec::<String>::new(), "these ask the family");
        }
    }
    let files = listed("Adding a model");
    assert!(files.len() <= 8, "{files:?}");
    for file in files {
        let path = format!("crates/kiln-family/src/{}", file.replace("NAME", "flux2"));
        assert!(root().join(&path).is_file(), "CONTRIBUTING.md lists {path}");
    }
}
