//! Where images and latents can be written.

use std::fs;

use crate::sandbox::Sandbox;

/// Asserts an error before the model is loaded, with no file created.
#[track_caller]
fn fails(sandbox: &Sandbox, args: &[&str], code: i32, words: &[&str]) {
    let before = sandbox.names();
    let ran = sandbox.generate(&[&["fox", "-S", "1"], args].concat());
    assert!(!ran.err.contains("load "), "the model was loaded first:\n{}", ran.err);
    ran.fails(code, words);
    assert_eq!(sandbox.names(), before);
}

#[test]
fn latents_do_not_overwrite_an_image() {
    let sandbox = Sandbox::new();
    let both = |image: &str, latents: &str, more: &[&str]| {
        let args = [&["-o", image, "--latents-out", latents], more].concat();
        fails(&sandbox, &args, 2, &["would overwrite an image", latents, "hint: "]);
    };
    both("o.png", "o.png", &[]);
    both("o.png", "./o.png", &[]);
    both("o.png", sandbox.path("o.png").to_str().unwrap(), &[]);
    both("o.png", "o-2.png", &["-b", "2"]);
    fails(&sandbox, &["--latents-out", "fox-1.png"], 2, &["would overwrite an image"]);
    sandbox.write("o.png", b"mine");
    both("o.png", "./o.png", &[]);
    assert_eq!(fs::read(sandbox.path("o.png")).unwrap(), b"mine");
}

#[test]
fn latents_need_a_file_of_their_own() {
    let sandbox = Sandbox::new();
    fails(&sandbox, &["--latents-out", "-"], 2, &["--latents-out", "standard output", "hint: "]);
    sandbox.write("file", b"");
    fails(&sandbox, &["--latents-out", "file/l.safetensors"], 1, &["not a folder", "with --latents-out"]);
    fails(&sandbox, &["--latents-out", "."], 1, &["not a regular file", "hint: "]);
}

#[test]
fn folders_of_the_output_are_created() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["fox", "-s", "1", "-o", "a/b/x.png", "--latents-out", "c/d/l.safetensors"]).ok();
    sandbox.generate(&["fox", "-s", "1", "-b", "2", "-o", "e/f/x.png"]).ok();
    for file in ["a/b/x.png", "c/d/l.safetensors", "e/f/x-1.png", "e/f/x-2.png"] {
        assert!(sandbox.path(file).is_file(), "{file}");
    }
    let same = ["-o", "new/x.png", "--latents-out", "new/x.png"];
    fails(&sandbox, &same, 2, &["would overwrite an image"]);
}

#[test]
fn a_name_that_is_too_long_is_an_error_before_loading() {
    let sandbox = Sandbox::new();
    let long = format!("{}.png", "x".repeat(300));
    fails(&sandbox, &["-o", &long], 1, &["304 bytes is too long", "hint: choose another name with -o"]);
    fails(&sandbox, &["--latents-out", &long], 1, &["304 bytes is too long", "--latents-out"]);
    // Long enough for one image, too long with a number.
    let long = format!("{}.png", "x".repeat(250));
    fails(&sandbox, &["-o", &long, "-b", "2"], 1, &["256 bytes is too long"]);
}

#[cfg(unix)]
#[test]
fn links_are_followed_also_to_missing_files() {
    use std::os::unix::fs::symlink;
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("far")).unwrap();
    sandbox.write("far/old.png", b"old");
    for (link, file) in [
        ("old.png", "far/old.png"),
        ("new.png", "far/new.png"),
        ("l.safetensors", "far/l.safetensors"),
        ("a.png", "b.png"),
        ("b.png", "a.png"),
        ("lost.png", "no/where.png"),
    ] {
        symlink(file, sandbox.path(link)).unwrap();
    }
    sandbox.generate(&["fox", "-s", "1", "-o", "old.png", "--latents-out", "l.safetensors"]).ok();
    sandbox.generate(&["fox", "-s", "1", "-o", "new.png", "--latents-out", "l.safetensors"]).ok();
    for link in ["old.png", "new.png", "l.safetensors"] {
        assert!(fs::symlink_metadata(sandbox.path(link)).unwrap().is_symlink(), "{link}");
        assert!(fs::symlink_metadata(sandbox.path("far").join(link)).unwrap().is_file(), "{link}");
    }
    assert_eq!(sandbox.image("far/old.png").width(), 64);
    fails(&sandbox, &["-o", "a.png"], 1, &["a.png", "loop of symbolic links", "hint: "]);
    fails(&sandbox, &["--latents-out", "a.png"], 1, &["loop of symbolic links", "hint: "]);
    fails(&sandbox, &["-o", "lost.png"], 1, &["no such folder", "hint: "]);
    fails(&sandbox, &["-o", "new.png", "--latents-out", "far/new.png"], 2, &["would overwrite an image"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_has_a_hint() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    let quick = ["generate", "fox", "-m", model, "-W", "16", "-H", "16", "-s", "1"];
    let full = |args: &[&str]| {
        let stdout = fs::File::options().write(true).open("/dev/full").unwrap();
        let output =
            sandbox.command(args).stdout(stdout).stderr(std::process::Stdio::piped()).output().unwrap();
        crate::sandbox::RunOutput::from(output).fails(1, &["to standard output", "No space left", "hint: "]);
    };
    full(&[&quick[..], &["-o", "-"]].concat());
    full(&[&quick[..], &["--json", "-o", "a.png"]].concat());
    full(&["doctor"]);
    fails(&sandbox, &["--latents-out", "/dev/full"], 1, &["/dev/full", "not a regular file", "hint: "]);
}
