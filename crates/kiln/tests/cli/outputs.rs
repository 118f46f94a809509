//! Where pictures and latents may go, and where not.

use std::fs::{self, File};

use crate::kit::Kit;

/// Refused before the model is loaded, with nothing written over the files there are.
#[track_caller]
fn refused(kit: &Kit, args: &[&str], code: i32, words: &[&str]) {
    let before = kit.names();
    let ran = kit.generate(&[&["fox", "-S", "1"], args].concat());
    assert!(!ran.err.contains("load "), "the model was loaded first:\n{}", ran.err);
    ran.refused(code, words);
    assert_eq!(kit.names(), before);
}

#[test]
fn latents_do_not_overwrite_a_picture() {
    let kit = Kit::new();
    let both = |picture: &str, latents: &str, more: &[&str]| {
        let args = [&["-o", picture, "--latents-out", latents], more].concat();
        refused(&kit, &args, 2, &["would overwrite a picture", latents, "hint: "]);
    };
    both("o.png", "o.png", &[]);
    both("o.png", "./o.png", &[]);
    both("o.png", kit.path("o.png").to_str().unwrap(), &[]);
    both("o.png", "o-2.png", &["-b", "2"]);
    refused(&kit, &["--latents-out", "fox-1.png"], 2, &["would overwrite a picture"]);
    kit.write("o.png", b"mine");
    both("o.png", "./o.png", &[]);
    assert_eq!(fs::read(kit.path("o.png")).unwrap(), b"mine");
}

#[test]
fn latents_need_a_file_of_their_own() {
    let kit = Kit::new();
    refused(&kit, &["--latents-out", "-"], 2, &["--latents-out", "standard output", "hint: "]);
    refused(&kit, &["--latents-out", "no/l.safetensors"], 1, &["no such folder", "with --latents-out"]);
    refused(&kit, &["--latents-out", "."], 1, &["not a regular file", "hint: "]);
}

#[test]
fn a_name_that_is_too_long_is_found_before_the_work() {
    let kit = Kit::new();
    let long = format!("{}.png", "x".repeat(300));
    refused(&kit, &["-o", &long], 1, &["304 bytes is too long", "hint: choose another name with -o"]);
    refused(&kit, &["--latents-out", &long], 1, &["304 bytes is too long", "--latents-out"]);
    // Long enough for one picture, too long with a number.
    let long = format!("{}.png", "x".repeat(250));
    refused(&kit, &["-o", &long, "-b", "2"], 1, &["256 bytes is too long"]);
}

#[cfg(unix)]
#[test]
fn links_are_followed_also_to_files_that_are_not_there_yet() {
    use std::os::unix::fs::symlink;
    let kit = Kit::new();
    fs::create_dir(kit.path("far")).unwrap();
    kit.write("far/old.png", b"old");
    for (link, file) in [
        ("old.png", "far/old.png"),
        ("new.png", "far/new.png"),
        ("l.safetensors", "far/l.safetensors"),
        ("a.png", "b.png"),
        ("b.png", "a.png"),
        ("lost.png", "no/where.png"),
    ] {
        symlink(file, kit.path(link)).unwrap();
    }
    kit.generate(&["fox", "-s", "1", "-o", "old.png", "--latents-out", "l.safetensors"]).ok();
    kit.generate(&["fox", "-s", "1", "-o", "new.png", "--latents-out", "l.safetensors"]).ok();
    for link in ["old.png", "new.png", "l.safetensors"] {
        assert!(fs::symlink_metadata(kit.path(link)).unwrap().is_symlink(), "{link}");
        assert!(fs::symlink_metadata(kit.path("far").join(link)).unwrap().is_file(), "{link}");
    }
    assert_eq!(kit.picture("far/old.png").width(), 64);
    refused(&kit, &["-o", "a.png"], 1, &["a.png", "leads in a circle", "hint: "]);
    refused(&kit, &["--latents-out", "a.png"], 1, &["leads in a circle", "hint: "]);
    refused(&kit, &["-o", "lost.png"], 1, &["no such folder", "hint: "]);
    refused(&kit, &["-o", "new.png", "--latents-out", "far/new.png"], 2, &["would overwrite a picture"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_has_a_hint() {
    let kit = Kit::new();
    let model = kit.model().to_str().unwrap();
    let quick = ["generate", "fox", "-m", model, "-W", "16", "-H", "16", "-s", "1"];
    let full = |args: &[&str]| {
        let stdout = File::options().write(true).open("/dev/full").unwrap();
        let output = kit.command(args).stdout(stdout).stderr(std::process::Stdio::piped()).output().unwrap();
        crate::kit::Ran::from(output).refused(1, &["to standard output", "No space left", "hint: "]);
    };
    full(&[&quick[..], &["-o", "-"]].concat());
    full(&[&quick[..], &["--json", "-o", "a.png"]].concat());
    full(&["doctor"]);
    refused(&kit, &["--latents-out", "/dev/full"], 1, &["/dev/full", "not a regular file", "hint: "]);
}
