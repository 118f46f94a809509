//! `include/kiln.h` is what cbindgen makes of the crate. `KILN_WRITE_HEADER=1` writes it.

use std::fs;
use std::path::Path;

#[test]
fn the_header_describes_the_library() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    // It follows `mod` from there.
    let builder = cbindgen::Builder::new().with_config(config).with_src(folder.join("src/lib.rs"));
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    let header = String::from_utf8(header).unwrap();
    let path = folder.join("include/kiln.h");
    if std::env::var_os("KILN_WRITE_HEADER").is_some() {
        fs::write(&path, &header).unwrap();
    }
    let same = fs::read_to_string(&path).is_ok_and(|committed| committed == header);
    assert!(same, "kiln.h differs from the crate: KILN_WRITE_HEADER=1 cargo test --workspace --test header");
    assert_eq!(header.matches("kiln_last_hint(void)").count(), 1);
    // Everything in it is documented.
    let mut previous = "";
    for line in header.lines().map(str::trim) {
        let is_item =
            line.starts_with("kiln_status kiln_") || line.starts_with("typedef ") || line.ends_with(';');
        let follows_doc = previous.ends_with("*/") || line.starts_with('}') || !is_item;
        let continues = previous.ends_with(',') || previous.ends_with('{') && line.starts_with("struct");
        assert!(follows_doc || continues, "not documented: {line}");
        previous = line;
    }
}
