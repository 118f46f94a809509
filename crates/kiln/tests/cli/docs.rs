//! The commands of `README.md` and `docs/`, run as they stand.
//!
//! Every `sh` block of a page is executed, in order, in one folder per page. `klein-4b` is the tiny random model that
//! all tests use, the hub is a server on this machine, and `kiln serve` gets a free port and a SIGTERM.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kiln_golden::testdata;

use crate::hub::klein_hub;
use crate::sandbox::Sandbox;

/// The folder that holds README.md.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A fenced block of a page: its language and its text.
struct Block {
    language: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            blocks.push(Block { language: language.to_owned(), text: text.join("\n") });
        }
    }
    blocks
}

/// Files that the commands of the pages name, and a base model next to `klein-4b`.
fn prepare(sandbox: &Sandbox, base: &Sandbox, page: &str) {
    let models = sandbox.path("data/kiln/models");
    fs::create_dir_all(&models).unwrap();
    fs::create_dir_all(sandbox.path("models")).unwrap();
    symlink(sandbox.model(), sandbox.path("models/klein-4b")).unwrap();
    symlink(base.model(), models.join("klein-base-4b")).unwrap();
    let lora = testdata().join("tiny/lora/lora_diffusers.safetensors");
    for name in ["ink.safetensors", "grain.safetensors"] {
        fs::copy(&lora, sandbox.path(name)).unwrap();
    }
    // Elsewhere it would be a second VAE next to the model's files.
    if page.contains("taef2.safetensors") {
        let vae = sandbox.model().join("vae/diffusion_pytorch_model.safetensors");
        fs::copy(vae, sandbox.path("taef2.safetensors")).unwrap();
    }
    // The tiny text encoder has a small vocabulary of its own.
    fs::copy(sandbox.model().join("tokenizer/tokenizer.json"), sandbox.path("tokenizer.json")).unwrap();
}

/// Small images of one step, unless the command names its size or steps: the commands are tested here, not the images.
const QUICK_IMAGES: &str = r#"kiln() {
    quick=
    case "$*" in
        *--from* | *--help*) ;;
        "generate "*)
            case "$*" in *" -s "* | *--sigmas* | *steps*) ;; *) quick="-s 1" ;; esac
            case "$*" in *" -W "* | *--size* | *--aspect* | *--mask*) ;; *) quick="$quick --size 128x128" ;; esac ;;
        "train "*) quick="--steps 2 --resolution 64" ;;
    esac
    command kiln "$@" $quick
    if [ "$1" = pull ]; then
        for snapshot in data/hf/hub/models--*/snapshots/*; do echo 256 > "$snapshot/kiln.default_size"; done
    fi
}
"#;

/// Runs the blocks of a page and returns how many commands of Kiln it has.
fn run_page(name: &str) -> usize {
    let page = fs::read_to_string(root().join(name)).unwrap();
    let (sandbox, base) = (Sandbox::new(), Sandbox::with_model("klein-base"));
    prepare(&sandbox, &base, &page);
    let hub = klein_hub(&sandbox);
    // Pages that don't download it find klein-4b in the models folder.
    if !page.contains("\nkiln pull klein-4b") {
        symlink(sandbox.model(), sandbox.path("data/kiln/models/klein-4b")).unwrap();
    }
    let mut commands = 0;
    for block in blocks(&page) {
        match block.language.as_str() {
            "toml" => drop(sandbox.write("model.toml", block.text.as_bytes())),
            "sh" => {
                let text = block.text.replace("cargo run --release -- ", "kiln ");
                let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("cargo ")).collect();
                commands += lines.iter().filter(|line| line.contains("kiln ")).count();
                let (served, ran): (Vec<&str>, Vec<&str>) =
                    lines.into_iter().partition(|line| line.contains("kiln serve"));
                let script = format!("set -eu\n{QUICK_IMAGES}{}", ran.join("\n"));
                run(name, shell(&sandbox, &hub.endpoint(), &script));
                for line in served {
                    serve(shell(&sandbox, &hub.endpoint(), &serve_line(line)));
                }
            }
            _ => {}
        }
    }
    commands
}

/// A shell in the sandbox that finds the program as `kiln`.
fn shell(sandbox: &Sandbox, endpoint: &str, script: &str) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_kiln")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = sandbox.command_of(Path::new("sh"), &["-c", script]);
    command.env("PATH", path).env("HF_ENDPOINT", endpoint);
    command
}

#[track_caller]
fn run(page: &str, mut command: Command) {
    let output = command.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{page}: {command:?}\n{err}");
}

/// A line that starts the server, on a free port and in place of the shell.
fn serve_line(line: &str) -> String {
    let command = line.split(" #").next().unwrap().trim_end();
    format!("{} --port 0", command.replace("kiln serve", "exec kiln serve"))
}

/// Starts the server, waits until it listens, and stops it as an operator would.
#[track_caller]
fn serve(mut command: Command) {
    let mut server = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(server.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut seen = String::new();
    let listens = log.any(|line| {
        seen = format!("{seen}{line}\n");
        line.contains("http://")
    });
    let stopped = Command::new("kill").arg(server.id().to_string()).status().unwrap();
    // The server writes on while it stops; a closed pipe must not be what stops it.
    seen.extend(log.map(|line| line + "\n"));
    let status = server.wait().unwrap();
    assert!(listens && stopped.success() && status.success(), "{command:?}: {status}\n{seen}");
}

macro_rules! pages {
    ($($test:ident $page:literal $least:literal;)*) => {
        const PAGES: &[&str] = &[$($page),*];
        $(#[test]
        fn $test() {
            let commands = run_page($page);
            assert!(commands >= $least, "{} ran {commands} commands", $page);
        })*
    };
}

pages! {
    the_commands_of_the_readme_run "README.md" 9;
    the_commands_about_generating_run "docs/generating.md" 13;
    the_commands_about_editing_run "docs/editing.md" 8;
    the_commands_about_models_run "docs/models.md" 14;
    the_commands_about_formats_run "docs/formats.md" 2;
    the_commands_about_loras_run "docs/loras.md" 3;
    the_commands_about_training_run "docs/training.md" 6;
    the_commands_about_quantizing_run "docs/quantizing.md" 6;
    the_commands_about_gpus_run "docs/gpu.md" 3;
    the_commands_about_the_server_run "docs/server.md" 6;
    the_commands_about_several_machines_run "docs/fleet.md" 1;
    the_commands_about_the_page_run "docs/page.md" 2;
    the_commands_about_caching_run "docs/caching.md" 2;
    the_commands_about_filters_run "docs/filters.md" 3;
    the_commands_about_c_run "docs/c.md" 1;
    the_commands_about_provenance_run "docs/provenance.md" 6;
    the_commands_about_security_run "docs/security.md" 1;
    the_commands_about_troubleshooting_run "docs/troubleshooting.md" 2;
    the_commands_about_errors_run "docs/errors.md" 1;
}

/// Pages that hold no commands to run here: install.md installs, windows.md is for PowerShell, library.md has Rust, a doc
/// test of kiln-engine, python.md is run by kiln-python's tests.
const OTHER_PAGES: &[&str] = &["docs/install.md", "docs/library.md", "docs/python.md", "docs/windows.md"];

#[test]
fn every_page_is_tested() {
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let page = format!("docs/{}", entry.unwrap().file_name().to_str().unwrap());
        assert!(PAGES.contains(&&*page) || OTHER_PAGES.contains(&&*page), "{page} is not in the list");
    }
}

/// The address of releases has one owner, `repository` in Cargo.toml, and pages repeat it.
#[test]
fn pages_name_the_address_of_releases() {
    for page in ["README.md", "docs/install.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let addresses = text.split("https://").filter_map(|rest| rest.split_once("/releases/"));
        let addresses: Vec<&str> =
            addresses.map(|(address, _)| address).filter(|a| !a.contains(' ')).collect();
        assert!(addresses.len() >= 2, "{page} names no release");
        for address in addresses {
            assert_eq!(format!("https://{address}"), env!("CARGO_PKG_REPOSITORY"), "{page}");
        }
    }
}

/// Files and headings that the pages link to.
#[test]
fn links_between_pages_lead_somewhere() {
    let others = ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"];
    let pages = PAGES.iter().chain(OTHER_PAGES).chain(&others);
    for page in pages {
        let text = fs::read_to_string(root().join(page)).unwrap();
        // A lambda of C++ looks like a link.
        let text: String = text.split("\n```").step_by(2).collect();
        let folder = root().join(page).parent().unwrap().to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("http") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { root().join(page) } else { folder.join(file) };
            assert!(target.exists(), "{page} links to {link}");
            if !heading.is_empty() {
                let target = fs::read_to_string(target).unwrap();
                assert!(
                    target.lines().any(|line| anchor(line) == Some(heading.into())),
                    "{page} links to {link}"
                );
            }
        }
    }
}

/// The anchor that a heading gets on the usual web pages for repositories.
fn anchor(line: &str) -> Option<String> {
    let title = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'))?;
    let kept = title.to_lowercase().replace(' ', "-");
    Some(kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect())
}
