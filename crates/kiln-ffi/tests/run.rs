//! C and C++ programs that use the library: compiled by the compilers that are there, with warnings as errors and with
//! sanitizers, and run. Without a compiler the tests say so and pass.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, OnceLock};

use kiln_credentials::NewCredentials;
use kiln_engine::{
    BatchLimit, ImageCollector, LocalFiles, Model, Plan, Request, Settings, Setup, Task, add_watermark,
};
use kiln_golden::{Checkpoint, testdata};
use kiln_image::Format;
use tempfile::TempDir;

// Links the library, so that cargo builds it.
use kiln_ffi as _;

const C: &[&str] = &["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g"];
const CPP: &[&str] = &["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g"];
const SANITIZERS: &[&str] = &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library as tools/ffi/install.sh installs it.
fn installed() -> &'static Path {
    static PREFIX: OnceLock<TempDir> = OnceLock::new();
    let prefix = PREFIX.get_or_init(|| {
        let prefix = tempfile::tempdir().unwrap();
        // Cargo builds it beside this program.
        let program = std::env::current_exe().unwrap();
        let library = program.with_file_name("libkiln_ffi.so");
        assert!(library.is_file(), "{} is missing", library.display());
        let output = Command::new(crate_folder().join("../../tools/ffi/install.sh"))
            .arg(prefix.path())
            .env("KILN_FFI_LIBRARY", library)
            .env_remove("DESTDIR")
            .output();
        succeeded(output.unwrap());
        prefix
    });
    prefix.path()
}

fn succeeded(output: Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Which of the compilers are there; prints a line if none is.
fn compilers(names: &[&'static str]) -> Vec<&'static str> {
    let works = |name: &&&str| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    let found: Vec<&str> = names.iter().filter(works).copied().collect();
    if found.is_empty() {
        println!("skipped: none of {} is installed", names.join(", "));
    }
    found
}

/// Whether programs with sanitizers can be linked and run.
fn has_sanitizers(compiler: &str, folder: &Path) -> bool {
    let (source, program) = (folder.join("empty.c"), folder.join("empty"));
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let compiled = Command::new(compiler).args(SANITIZERS).arg(&source).arg("-o").arg(&program).output();
    compiled.is_ok_and(|output| output.status.success())
        && Command::new(&program).output().is_ok_and(|output| output.status.success())
}

/// Compiles a program against the installed library.
fn compile(compiler: &str, options: &[&str], source: &Path, program: &Path) {
    let prefix = installed();
    let output = Command::new(compiler)
        .args(options)
        .arg(format!("-I{}", prefix.join("include").display()))
        .arg(source)
        .arg("-o")
        .arg(program)
        .arg(format!("-L{}", prefix.join("lib").display()))
        .args(["-lkiln", "-lpthread"])
        .output();
    succeeded(output.unwrap());
}

/// A compiled program, in a folder and with caches of its own.
fn command(program: &Path) -> Command {
    let folder = program.parent().unwrap();
    let mut command = Command::new(program);
    command
        .current_dir(folder)
        .env("LD_LIBRARY_PATH", installed().join("lib"))
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env("XDG_DATA_HOME", folder.join("data"))
        .env("HF_HOME", folder.join("hf"))
        .env("CUDA_VISIBLE_DEVICES", "")
        .env_remove("KILN_CACHE_DIR")
        .env_remove("KILN_CACHE_MB");
    command
}

fn tiny() -> Checkpoint {
    Checkpoint::assemble(&testdata(), "klein").unwrap()
}

fn example(name: &str) -> PathBuf {
    crate_folder().join("examples").join(name)
}

/// Generates an image with the engine and returns the PNG that the command line writes into `folder`.
fn with_engine(model: &Path, folder: &Path) -> Vec<u8> {
    let model = Arc::new(Model::open(model).unwrap());
    let request = Request {
        width: Some(64),
        height: Some(48),
        steps: Some(2),
        seed: vec![7],
        ..Request::new("a red fox in the snow")
    };
    let plan = Arc::new(Plan::new(&model, &request, &LocalFiles).unwrap());
    let sink = Arc::new(ImageCollector::default());
    let engine = Setup::new(&model, &Settings::default(), Some(&plan)).unwrap().load(&*sink).unwrap();
    engine.generate(&[Task { plan, sink: sink.clone() }], &BatchLimit::ONE);
    engine.finish();
    let image = sink.take().unwrap().remove(0);
    image
        .recipe
        .relative_to(folder)
        .encode(&image.image, Format::Png.into(), &kiln_engine::Embedded::default())
        .unwrap()
}

#[test]
fn the_examples_write_the_bytes_of_the_engine() {
    let (folder, model) = (tempfile::tempdir().unwrap(), tiny());
    let c = compilers(&["gcc", "clang"]).into_iter().map(|compiler| (compiler, C, "generate.c"));
    let cpp = compilers(&["g++", "clang++"]).into_iter().map(|compiler| (compiler, CPP, "generate.cpp"));
    let mut expected = None;
    for (compiler, options, source) in c.chain(cpp) {
        let (program, out) = (folder.path().join(compiler), folder.path().join(format!("{compiler}.png")));
        compile(compiler, options, &example(source), &program);
        let expected = expected.get_or_insert_with(|| with_engine(model.path(), folder.path()));
        let mut command = command(&program);
        command.arg(model.path()).args(["a red fox in the snow"]).arg(&out).args(["64", "48", "2", "7"]);
        assert_eq!(succeeded(command.output().unwrap()), "64x48, seed 7\n");
        assert!(fs::read(&out).unwrap() == *expected, "{compiler}: other bytes than the engine's");
        // An error is told with a hint, and the exit code is 1.
        let mut command = self::command(&program);
        let output = command.args(["no-such-model", "a", "b.png"]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains("the model `no-such-model` does not exist"), "{errors}");
    }
}

#[test]
fn misuse_is_answered_without_leaks_or_bad_accesses() {
    let (folder, model) = (tempfile::tempdir().unwrap(), tiny());
    let keys = folder.path().join("data/kiln/credentials");
    fs::create_dir_all(&keys).unwrap();
    NewCredentials::in_folder(&keys).create("Ada").unwrap();
    fs::write(folder.path().join("text.pem"), "no key").unwrap();
    for compiler in compilers(&["gcc", "clang"]) {
        let sanitized = has_sanitizers(compiler, folder.path());
        if !sanitized {
            println!("{compiler} has no sanitizers here: running without");
        }
        let options = [C, if sanitized { SANITIZERS } else { &[] }].concat();
        let program = folder.path().join(format!("misuse-{compiler}"));
        compile(compiler, &options, &crate_folder().join("tests/misuse.c"), &program);
        succeeded(command(&program).arg(model.path()).output().unwrap());
        let signed = fs::read(folder.path().join("signed.webp")).unwrap();
        let store = kiln_image::read_manifest_store(&signed).unwrap().unwrap();
        assert!(String::from_utf8_lossy(&store).contains("A Service"));
        let file = |name: &str| fs::read(folder.path().join(name)).unwrap();
        let (marked, bare) = (file("watermarked.jpg"), file("bare.jpg"));
        let mark = |file: &[u8]| file.windows(17).any(|part| part == b"DigitalSourceType");
        assert!(mark(&marked) && !mark(&bare));
        let pixels = |file: &[u8]| kiln_image::from_bytes("image", file).unwrap();
        assert_ne!(pixels(&marked), pixels(&bare));
        let mut plain = pixels(&file("plain.png"));
        add_watermark(&mut plain, "0123abcd".parse().unwrap()).unwrap();
        assert_eq!(pixels(&file("watermarked.png")), plain, "the bits of these digits");
    }
    for compiler in compilers(&["g++", "clang++"]) {
        let sanitized = has_sanitizers(compiler, folder.path());
        let options = [CPP, if sanitized { SANITIZERS } else { &[] }].concat();
        let program = folder.path().join(format!("owners-{compiler}"));
        compile(compiler, &options, &crate_folder().join("tests/owners.cpp"), &program);
        succeeded(command(&program).arg(model.path()).output().unwrap());
    }
}

#[test]
fn memory_stays_the_same_over_many_images() {
    let (folder, model) = (tempfile::tempdir().unwrap(), tiny());
    if let Some(compiler) = compilers(&["gcc", "clang"]).first() {
        let program = folder.path().join("many");
        compile(compiler, C, &crate_folder().join("tests/many.c"), &program);
        let images = std::env::var("KILN_FFI_IMAGES").unwrap_or_else(|_| "100".into());
        println!("{}", succeeded(command(&program).arg(model.path()).arg(images).output().unwrap()));
    }
}

#[cfg(feature = "ember")]
#[test]
fn the_built_in_model_is_inside() {
    let folder = tempfile::tempdir().unwrap();
    if let Some(compiler) = compilers(&["gcc", "clang"]).first() {
        let program = folder.path().join("generate");
        compile(compiler, C, &example("generate.c"), &program);
        let mut command = command(&program);
        command.args(["ember", "a red apple", "apple.png", "64", "64", "1", "7"]);
        assert_eq!(succeeded(command.output().unwrap()), "64x64, seed 7\n");
    }
}

/// The programs of docs/c.md, as they stand.
#[test]
fn the_programs_of_the_documentation_work() {
    let page = fs::read_to_string(crate_folder().join("../../docs/c.md")).unwrap();
    let (folder, model) = (tempfile::tempdir().unwrap(), tiny());
    let mut programs = 0;
    for (language, compiler, options) in [("c", "gcc", C), ("cpp", "g++", CPP)] {
        if compilers(&[compiler]).is_empty() {
            continue;
        }
        for block in page.split(&format!("\n```{language}\n")).skip(1) {
            let text = block.split("\n```").next().unwrap();
            // The tiny model instead of one that takes seconds.
            let text = text.replace("\"ember\"", &format!("{:?}", model.path())).replace("256", "64");
            let source = folder.path().join(format!("page{programs}.{language}"));
            fs::write(&source, format!("{text}\n")).unwrap();
            let program = source.with_extension("");
            compile(compiler, options, &source, &program);
            succeeded(command(&program).output().unwrap());
            programs += 1;
        }
    }
    assert!(programs >= 2 || compilers(&["g++"]).is_empty());
}
