//! The invisible watermark, through the command line.

use kiln_credentials::CAN_VERIFY;
use serde_json::{Value, json};

use crate::sandbox::Sandbox;

/// What `kiln verify` says of the watermark of a file.
fn found(sandbox: &Sandbox, file: &str) -> Value {
    let ran = sandbox.kiln(&["verify", "--json", file]);
    serde_json::from_slice::<Value>(&ran.out).unwrap_or_else(|_| panic!("{}", ran.err))["watermark"].take()
}

#[test]
fn images_get_the_watermark_that_is_asked_for() {
    let sandbox = Sandbox::new();
    let apple = |args: &[&str]| {
        sandbox.kiln(&[&["generate", "a red apple on a blue background", "-S", "1"], args].concat()).ok()
    };
    apple(&["-o", "plain.png"]);
    let ran = apple(&["--watermark", "-o", "kiln.png"]);
    assert!(ran.err.contains("4b494c4e") && ran.err.contains("changes pixels"), "{}", ran.err);
    apple(&["--watermark=0123ABCD", "-o", "own.jpg", "--quality", "75"]);
    sandbox.kiln(&["config", "set", "watermark", "0123abcd"]).ok();
    apple(&["-o", "set.webp"]);
    apple(&["--no-watermark", "-o", "without.png"]);
    assert_eq!(sandbox.image("without.png").pixels(), sandbox.image("plain.png").pixels());
    assert!(sandbox.kiln(&["info", "plain.png"]).ok().text().contains("watermark    none"));
    assert!(sandbox.kiln(&["info", "kiln.png"]).ok().text().contains("Kiln's (32 of 32 bits)"));
    let file = std::fs::read(sandbox.path("kiln.png")).unwrap();
    sandbox.write("cut.png", &file[..file.len() / 2]);
    assert!(sandbox.kiln(&["info", "cut.png"]).ok().text().contains("watermark    not checked"));
    if CAN_VERIFY {
        assert_eq!(found(&sandbox, "plain.png"), json!(null));
        for (file, bits, owner) in [
            ("kiln.png", "4b494c4e", Some("Kiln")),
            ("own.jpg", "0123abcd", None),
            ("set.webp", "0123abcd", None),
        ] {
            let found = found(&sandbox, file);
            assert_eq!((&found["bits"], &found["owner"]), (&json!(bits), &json!(owner)), "{file}");
        }
    }
    let (plain, marked) = (sandbox.image("plain.png"), sandbox.image("kiln.png"));
    let changed = plain.pixels().iter().zip(marked.pixels()).filter(|(a, b)| a != b).count();
    assert!(changed > plain.pixels().len() / 4);
}

#[test]
fn a_watermark_that_is_none_is_refused() {
    let sandbox = Sandbox::new();
    let words = &["8 hexadecimal digits"];
    sandbox.kiln(&["generate", "an apple", "--watermark=secret", "-o", "a.png"]).fails(2, words);
    sandbox.kiln(&["config", "set", "watermark", "12345"]).fails(2, words);
    assert!(!sandbox.path("a.png").exists());
}
