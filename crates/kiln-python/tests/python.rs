//! Runs the tests in `tests/*.py` with the Python named by `KILN_TEST_PYTHON`, on the extension that cargo has built.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_golden::{Checkpoint, testdata};

/// The built extension, which lies next to the test or in the folder above.
fn extension() -> PathBuf {
    let name = format!("{}_kiln{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let test = std::env::current_exe().unwrap();
    let built = test.ancestors().skip(1).take(2).map(|folder| folder.join(&name));
    let newest =
        built.filter(|path| path.is_file()).max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    newest.unwrap_or_else(|| panic!("cargo has not built {name}"))
}

/// Lays out the package: the Python files, and the extension under the name that Python looks for.
fn package(folder: &Path) {
    let package = folder.join("kiln");
    fs::create_dir(&package).unwrap();
    for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("python/kiln")).unwrap().flatten() {
        if file.path().is_file() {
            fs::copy(file.path(), package.join(file.file_name())).unwrap();
        }
    }
    let target = package.join(if cfg!(windows) { "_kiln.pyd" } else { "_kiln.abi3.so" });
    if fs::hard_link(extension(), &target).is_err() {
        fs::copy(extension(), &target).unwrap();
    }
}

#[test]
fn the_python_package() {
    let Some(python) = std::env::var_os("KILN_TEST_PYTHON") else {
        eprintln!("skipped: KILN_TEST_PYTHON names no Python");
        return;
    };
    let can_import = |modules: &str| {
        let import = format!("import {modules}");
        Command::new(&python).args(["-c", &import]).output().is_ok_and(|run| run.status.success())
    };
    if !can_import("numpy, PIL") {
        eprintln!("skipped: KILN_TEST_PYTHON has no numpy or Pillow");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    package(folder.path());
    let models = ["klein", "klein-base", "klein-kv", "klein-small-decoder", "dev", "pebble"];
    let models: Vec<(String, Checkpoint)> = models
        .iter()
        .map(|name| ((*name).to_owned(), Checkpoint::assemble(&testdata(), name).unwrap()))
        .chain([("dev-text".to_owned(), Checkpoint::assemble(&testdata().join("dev"), "dev").unwrap())])
        .collect();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut run = Command::new(&python);
    run.arg("-B").arg(tests.join("run.py")).env("PYTHONPATH", folder.path()).current_dir(folder.path());
    run.env("KILN_CACHE_DIR", folder.path().join("cache")).env("KILN_TESTDATA", testdata());
    run.env("KILN_DOCS", Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")).env_remove("KILN_MODEL");
    for (name, checkpoint) in &models {
        let variable = format!("KILN_TEST_{}", name.to_uppercase().replace('-', "_"));
        run.env(variable, checkpoint.path());
    }
    succeeds(&mut run);
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/python/against_diffusers.py");
    let mut compare = Command::new(&python);
    compare.arg("-B").arg(tool).arg(testdata()).env("PYTHONPATH", folder.path()).current_dir(folder.path());
    succeeds(&mut compare);
}

/// Runs a command, and shows what it prints.
fn succeeds(command: &mut Command) {
    let output = command.output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{text}");
    eprintln!("{text}");
}
