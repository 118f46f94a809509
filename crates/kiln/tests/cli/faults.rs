//! Signals at blocked input and output, what killed runs leave behind, damaged weights, and variables with nonsense.

use std::fs;
use std::process::{Child, Command, Stdio};

use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};

use crate::sandbox::{RunOutput, Sandbox, pattern, png, signal};

/// Waits until the program handles Ctrl-C: before that, the system would end it in any case.
#[cfg(target_os = "linux")]
fn wait_for_handler(child: &Child) {
    const INTERRUPT: u64 = 1 << 1;
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        if u64::from_str_radix(caught.trim(), 16).unwrap() & INTERRUPT != 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_first_ctrl_c_ends_a_run_that_waits_for_input() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    for args in
        [["generate", "-", "-m", model].as_slice(), &["generate", "fox", "-m", model, "-r", "/dev/stdin"]]
    {
        let mut command = sandbox.command(args);
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for_handler(&child);
        // Long enough to reach the read, where it waits.
        std::thread::sleep(std::time::Duration::from_millis(300));
        signal(&child, "-INT");
        let _open = child.stdin.take();
        let ran: RunOutput = child.wait_with_output().unwrap().into();
        assert_eq!((ran.code, ran.err.as_str()), (130, "cancelled\n"));
    }
    assert_eq!(sandbox.names(), [""; 0]);
}

#[cfg(target_os = "linux")]
#[test]
fn the_first_ctrl_c_ends_a_run_that_waits_for_a_reader() {
    use std::io::{BufRead, BufReader};
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    assert!(Command::new("mkfifo").arg(sandbox.path("fifo.png")).status().unwrap().success());
    let args = ["generate", "fox", "-m", model, "-W", "64", "-H", "64", "-s", "1", "--max-tokens", "32"];
    let mut command = sandbox.command(&[&args[..], &["-o", "fifo.png", "-v"]].concat());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 1/1")));
    signal(&child, "-INT");
    // At once, or after decoding: never after a second signal.
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// A model that takes a while to quantize.
fn write_large_model(sandbox: &Sandbox) {
    let values = (0..512 * 512).map(|i| (i % 509) as f32 / 509.0).collect();
    let matrix = HostTensor::from_f32([512, 512], values).unwrap();
    let mut names = vec!["single_stream_modulation.linear.weight".to_owned()];
    names.extend((0..300).map(|i| format!("single_transformer_blocks.{i}.attn.to_out.weight")));
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), matrix.clone())).collect();
    save::save(sandbox.path("a.safetensors"), &tensors, &Default::default()).unwrap();
}

/// Starts to quantize it, and returns when the first tensors are written.
fn start_quantizing(sandbox: &Sandbox) -> Child {
    use std::io::{BufRead, BufReader};
    let args = ["quantize", "a.safetensors", "b.gguf", "--to", "q4_k", "--threads", "1"];
    let mut child = sandbox.command(&args).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.ends_with(" of 301 tensors")));
    std::thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
fn sigterm_leaves_nothing_of_a_conversion() {
    let sandbox = Sandbox::new();
    write_large_model(&sandbox);
    let mut child = start_quantizing(&sandbox);
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(sandbox.names(), ["a.safetensors"]);
}

#[test]
fn the_next_run_removes_what_a_killed_one_left() {
    let sandbox = Sandbox::new();
    write_large_model(&sandbox);
    let mut running = start_quantizing(&sandbox);
    let mut killed = start_quantizing(&sandbox);
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_eq!(sandbox.names().len(), 3, "{:?}", sandbox.names());
    fs::create_dir_all(sandbox.path(".kiln-AbCdEf.tmp/transformer")).unwrap();
    // Any run that writes to the folder; the file of the run that goes on stays.
    sandbox.generate(&["fox", "-s", "1", "-o", "fox.png"]).ok();
    let names = sandbox.names();
    assert_eq!(names.iter().filter(|name| name.starts_with(".kiln-")).count(), 1, "{names:?}");
    running.kill().unwrap();
    running.wait().unwrap();
    sandbox.kiln(&["convert", sandbox.model().to_str().unwrap(), "t.safetensors", "-q"]).ok();
    assert_eq!(sandbox.names(), ["a.safetensors", "fox.png", "t.safetensors"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_closed_standard_output_is_an_error() {
    let sandbox = Sandbox::new();
    let run = |redirection: &str| {
        let script = format!("exec \"$0\" \"$@\" {redirection}");
        let (kiln, model) = (env!("CARGO_BIN_EXE_kiln"), sandbox.model().to_str().unwrap());
        let args = ["generate", "fox", "-m", model, "-W", "64", "-H", "64", "-s", "1", "-o", "-"];
        let mut command = sandbox.command_of("sh".as_ref(), &["-c", &script, kiln]);
        RunOutput::from(command.args(args).args(["--max-tokens", "32"]).output().unwrap())
    };
    let closed = run(">&-");
    assert!(!closed.err.contains("saved"), "{}", closed.err);
    closed.fails(2, &["standard output is closed"]);
    run(">/dev/null").ok();
}

#[test]
fn damaged_weights_are_named() {
    let sandbox = Sandbox::new();
    let file = "transformer/diffusion_pytorch_model.safetensors";
    let source = WeightSource::open(sandbox.model().join(file)).unwrap();
    let name = "x_embedder.weight";
    let mut tensors: Vec<(&str, HostTensor)> =
        source.names().map(|name| (name, source.tensor(name).unwrap())).collect();
    let damaged = tensors.iter_mut().find(|(found, _)| *found == name).unwrap();
    let mut values = damaged.1.to_f32().unwrap().into_owned();
    values[5] = f32::NAN;
    damaged.1 = HostTensor::from_f32(damaged.1.shape().dims().to_vec(), values).unwrap();
    save::save(sandbox.path("nan.safetensors"), &tensors, &Default::default()).unwrap();
    let bytes = fs::read(sandbox.path("nan.safetensors")).unwrap();
    sandbox.write_to_model(file, &bytes);
    sandbox.generate(&["fox"]).fails(1, &[name, "not finite", "hint: "]);

    // Integers where numbers should be.
    let text = String::from_utf8_lossy(&bytes[..100_000.min(bytes.len())]).into_owned();
    let at = text.find("\"F32\"").unwrap();
    let mut integers = bytes.clone();
    integers[at..at + 5].copy_from_slice(b"\"I32\"");
    sandbox.write_to_model(file, &integers);
    sandbox.generate(&["fox"]).fails(1, &[name, "stored as i32", "hint: "]);
}

#[test]
fn files_that_are_no_weights_are_told_apart() {
    let sandbox = Sandbox::new();
    let told = |name: &str, bytes: &[u8], words: &str| {
        sandbox.write(name, bytes);
        let ran = sandbox.kiln(&["info", name]);
        assert!(!ran.err.contains("a header of"), "{}", ran.err);
        ran.fails(1, &[name, words, "hint: "]);
    };
    told("a.json", b"{\"architectures\": []}", "JSON");
    told("b.safetensors", b"\n<!doctype HTML><title>404</title>", "an HTML page");
    told("c.safetensors", b"Entry not found, sorry", "a text file");
    told("d.gguf", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer");
    told("e.bin", b"PK\x03\x04\x14\0\0\0\0\0\0\0", "a zip archive");
    told("f.pt", b"\x80\x04\x95\x10\0\0\0\0\0\0\0}", "a Python pickle");
    sandbox.write("model.toml", b"transformer = 'a.safetensors'\nvea = 'b'");
    let ran = sandbox.kiln(&["generate", "fox", "-m", "model.toml"]);
    assert!(!ran.err.contains("download"), "{}", ran.err);
    ran.fails(1, &["model.toml", "unknown field `vea`", "hint: correct the file"]);
}

#[test]
fn empty_file_names_are_wrong_usage() {
    let sandbox = Sandbox::new();
    for option in ["--ref", "--vae", "--init", "--noise"] {
        sandbox.generate(&["fox", option, ""]).fails(2, &[option, "an empty name", "hint: "]);
    }
}

#[test]
fn blocks_that_the_configuration_leaves_out_are_an_error() {
    let sandbox = Sandbox::new();
    sandbox.edit_model("transformer/config.json", "num_single_layers", 1.into());
    sandbox.generate(&["fox"]).fails(1, &["single_transformer_blocks.1", "transformer", "hint: "]);
}

#[test]
fn doubtful_options_and_masks_get_notes() {
    let sandbox = Sandbox::new();
    let note = |args: &[&str], words: &str| {
        let ran = sandbox.generate(&[&["fox", "-S", "1", "-o", "a.png"], args].concat()).ok();
        assert!(
            ran.err.contains("note: ") && ran.err.contains(words),
            "`{words}` is missing in:\n{}",
            ran.err
        );
    };
    note(&["--sigmas", "1,0.7,0.4", "-s", "8"], "the 3 sigmas decide on the number of steps, not the 8");
    sandbox.write("init.png", &png(&pattern(64, 64)));
    sandbox.write("black.png", &png(&kiln_image::RgbImage::black(64, 64)));
    let white = kiln_image::RgbImage::new(32, 64, vec![255; 32 * 64 * 3]).unwrap();
    sandbox.write("white.png", &png(&white));
    note(&["--init", "init.png", "--mask", "black.png"], "the mask is black everywhere");
    note(&["--init", "init.png", "--mask", "white.png"], "the mask is white everywhere");
    note(&["--init", "init.png", "--mask", "white.png"], "the mask is 32x64, the initial image 64x64");
}

#[test]
fn variables_with_nonsense_are_named() {
    let sandbox = Sandbox::new();
    sandbox.write("file", b"x");
    let model = sandbox.model().to_str().unwrap();
    let fails = |name: &str, value: &str, args: &[&str], code: i32| {
        let ran = sandbox.command(args).env(name, value).output().unwrap();
        RunOutput::from(ran).fails(code, &[name, "hint: "]);
    };
    let generate = ["generate", "fox", "-m", model];
    fails("KILN_CACHE_MB", "plenty", &generate, 2);
    fails("KILN_CACHE_DIR", "file", &generate, 2);
    fails("KILN_MODEL", "no-such-model", &["generate", "fox"], 1);
    fails("KILN_MODELS", "file", &["generate", "fox", "-m", "no-such-model"], 1);
    fails("KILN_CUDA_PATH", "file", &generate, 2);
    fails("KILN_CUDA_PATH", "/no/such/folder", &["bench", "--phase", "text"], 2);
    #[cfg(feature = "serve")]
    fails("KILN_MODEL", "no-such-model", &["serve", "--port", "0", "--data", "served"], 1);
    for proxy in ["HTTPS_PROXY", "all_proxy"] {
        fails(proxy, "not a proxy", &["pull", "klein-4b"], 2);
    }
    fails("HF_ENDPOINT", "nonsense", &["pull", "klein-4b"], 2);
}
