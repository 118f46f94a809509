//! Tests of the cycle detection on small crates.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Returns the import cycles of a crate with these files.
fn cycles_of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let src: PathBuf = std::env::temp_dir().join(format!("kiln-imports-{}-{number}", std::process::id()));
    for (name, text) in files {
        let path = src.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let found = import_cycles(&src);
    fs::remove_dir_all(&src).unwrap();
    found
}

#[test]
fn two_files_that_use_each_other_are_a_cycle() {
    let lib = ("lib.rs", "mod a; mod b;");
    let found =
        cycles_of(&[lib, ("a.rs", "use crate::b::B; pub struct A;"), ("b.rs", "struct B(crate::a::A);")]);
    assert_eq!(found, [["a.rs", "b.rs"]]);
    assert!(cycles_of(&[lib, ("a.rs", "use crate::b::B; pub struct A;"), ("b.rs", "struct B;")]).is_empty());
}

#[test]
fn re_exports_are_followed() {
    let files = [
        ("lib.rs", "mod a; mod b; pub use a::A;"),
        ("a.rs", "use crate::b::B; pub struct A;"),
        ("b/mod.rs", "mod inner; pub use inner::*;"),
        ("b/inner.rs", "use crate::A; pub struct B;"),
    ];
    assert_eq!(cycles_of(&files), [["a.rs", "b/inner.rs"]]);
}

#[test]
fn a_parent_that_only_re_exports_is_in_no_cycle_with_its_child() {
    let child = ("a/b.rs", "use super::F; pub struct B(F);");
    let lib = ("lib.rs", "mod a;");
    assert!(cycles_of(&[lib, ("a/mod.rs", "mod b; pub use b::B; pub struct F;"), child]).is_empty());
    let user = ("a/mod.rs", "mod b; pub use b::B; pub struct F; fn f(_: B) {}");
    assert_eq!(cycles_of(&[lib, user, child]), [["a/b.rs", "a/mod.rs"]]);
}

#[test]
fn an_imported_module_counts_by_the_items_named_in_it() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b; pub fn f() { b::c::g() }"),
        ("b/mod.rs", "pub mod c; fn unrelated() { crate::a::f() }"),
        ("b/c.rs", "pub fn g() {}"),
    ];
    assert!(cycles_of(&files).is_empty());
}

#[test]
fn tests_are_ignored() {
    let a = "use crate::b::B; pub struct A; ";
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", a),
        ("b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::a::A; }"),
    ];
    assert!(cycles_of(&files).is_empty());
}

#[test]
fn the_shortest_cycle_is_returned() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::b::B; pub struct A;"),
        ("b.rs", "use crate::c::C; pub struct B;"),
        ("c.rs", "use crate::{a::A, d::D}; pub struct C;"),
        ("d.rs", "use crate::c::C; pub struct D;"),
    ];
    assert_eq!(cycles_of(&files), [["c.rs", "d.rs"]]);
}
