//! `kiln train`: a LoRA from a folder of images, with tiny models.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use kiln_image::RgbImage;

use crate::sandbox::{RunOutput, Sandbox, interrupt, max_difference, pattern, png};

/// A sandbox with an undistilled model and four images with captions.
fn with_images() -> Sandbox {
    let sandbox = Sandbox::with_model("klein-base");
    // Short texts make short steps.
    sandbox.edit_model("tokenizer/tokenizer_config.json", "model_max_length", 16.into());
    fs::create_dir(sandbox.path("images")).unwrap();
    for (i, caption) in ["a fox", "a hen", "a cat", "an owl"].iter().enumerate() {
        let level = 60 * i as u8;
        let pixels = pattern(64, 64).pixels().iter().map(|value| value / 3 + level / 2).collect();
        sandbox.write(&format!("images/{i}.png"), &png(&RgbImage::new(64, 64, pixels).unwrap()));
        sandbox.write(&format!("images/{i}.txt"), caption.as_bytes());
    }
    sandbox
}

/// The arguments of a quick training.
fn quick<'a>(sandbox: &'a Sandbox, args: &[&'a str]) -> Vec<&'a str> {
    let model = sandbox.model().to_str().unwrap();
    let mut all = vec!["train", "images", "-m", model, "--resolution", "64", "--rank", "4", "--lr", "1e-2"];
    if !args.contains(&"-o") {
        all.extend(["-o", "me.safetensors"]);
    }
    all.extend(args);
    all
}

fn train(sandbox: &Sandbox, args: &[&str]) -> RunOutput {
    sandbox.kiln(&quick(sandbox, args))
}

fn bytes(sandbox: &Sandbox, name: &str) -> Vec<u8> {
    fs::read(sandbox.path(name)).unwrap()
}

/// The two losses at fixed noise that a training ends with.
fn fixed_losses(ran: &RunOutput) -> [f32; 2] {
    let line = ran.err.lines().find_map(|line| line.strip_prefix("loss at fixed noise: ")).unwrap();
    let loss = |part: &str| part.split_whitespace().next().unwrap().parse().unwrap();
    let (before, after) = line.split_once(", ").unwrap();
    [loss(before), loss(after)]
}

#[test]
fn a_training_learns_and_its_lora_changes_the_image_under_every_naming() {
    let sandbox = with_images();
    let ran = train(&sandbox, &["--steps", "30"]).ok();
    let [before, after] = fixed_losses(&ran);
    assert!(after < 0.9 * before, "the loss at fixed noise was {before}, and is {after}");
    for words in ["4 examples: 64x64 (4)", "parameters; about", "norm of the update", "kiln generate"] {
        assert!(ran.err.contains(words), "`{words}` is missing in:\n{}", ran.err);
    }
    assert_eq!(fs::read_to_string(sandbox.path("me.train/log.jsonl")).unwrap().lines().count(), 30);
    let image = |name: &str, lora: &[&str]| {
        sandbox.generate(&[&["a fox", "-S", "1", "-o", name, "--dtype", "f32"], lora].concat()).ok();
        sandbox.image(name)
    };
    let (without, with) = (image("0.png", &[]), image("1.png", &["--lora", "me.safetensors"]));
    assert!(max_difference(&without, &with) > 5, "{}", max_difference(&without, &with));
    // A finished training that is resumed only writes its LoRA again.
    for (layout, key) in
        [("comfyui", "diffusion_model.double_blocks.0."), ("kohya", "lora_unet_double_blocks_0_")]
    {
        train(&sandbox, &["--steps", "30", "--resume", "--layout", layout]).ok();
        let header = bytes(&sandbox, "me.safetensors");
        assert!(String::from_utf8_lossy(&header).contains(key), "{layout}");
        let other = image(&format!("{layout}.png"), &["--lora", "me.safetensors"]);
        assert!(max_difference(&with, &other) <= 1, "{layout}: {}", max_difference(&with, &other));
    }
}

/// Starts a training that saves often, and returns when it has saved a state.
fn start(sandbox: &Sandbox, steps: &str) -> std::process::Child {
    let args = quick(sandbox, &["--steps", steps, "--save-every", "3", "-o", "stopped.safetensors"]);
    let child = sandbox.command(&args).stderr(Stdio::piped()).spawn().unwrap();
    while !sandbox.path("stopped.train/state.safetensors").exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

#[test]
fn a_training_that_is_killed_or_cancelled_and_resumed_gives_the_same_bytes() {
    let sandbox = with_images();
    let same = ["--steps", "60", "--save-every", "3"];
    train(&sandbox, &[&same[..], &["-o", "whole.safetensors"]].concat()).ok();
    let mut child = start(&sandbox, "60");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!sandbox.path("stopped.safetensors").exists());
    // Again from the state, and with Ctrl-C.
    let resumed = [&same[..], &["-o", "stopped.safetensors", "--resume"]].concat();
    let child = sandbox.command(&quick(&sandbox, &resumed)).stderr(Stdio::piped()).spawn().unwrap();
    let log = sandbox.path("stopped.train/log.jsonl");
    let steps = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let before = steps();
    while steps() <= before.min(40) {
        std::thread::sleep(Duration::from_millis(2));
    }
    interrupt(&child);
    let ran: RunOutput = child.wait_with_output().unwrap().into();
    assert_eq!(ran.code, 130, "{}", ran.err);
    assert!(
        ran.err.contains("continuing after step") && ran.err.contains("continue with --resume"),
        "{}",
        ran.err
    );
    assert!(!sandbox.path("stopped.safetensors").exists());
    train(&sandbox, &resumed).ok();
    assert!(
        bytes(&sandbox, "whole.safetensors") == bytes(&sandbox, "stopped.safetensors"),
        "the LoRAs differ"
    );
}

#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing_of_the_last_checkpoint() {
    let sandbox = with_images();
    train(&sandbox, &["--steps", "2", "-q"]).ok();
    let saved = ["me.safetensors", "me.train/state.safetensors"].map(|name| bytes(&sandbox, name));
    let args = quick(&sandbox, &["--steps", "4", "--resume"]);
    // Files of at most eight kilobytes; without the trap, the system would end the program.
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\"";
    let mut command = sandbox.command_of("sh".as_ref(), &["-c", script, env!("CARGO_BIN_EXE_kiln")]);
    let ran = RunOutput::from(command.args(&args).output().unwrap());
    ran.fails(1, &["state.safetensors", "the last checkpoint is kept", "--resume"]);
    assert!(saved == ["me.safetensors", "me.train/state.safetensors"].map(|name| bytes(&sandbox, name)));
    train(&sandbox, &["--steps", "4", "--resume"]).ok();
    train(&sandbox, &["--steps", "4", "-o", "whole.safetensors"]).ok();
    assert!(bytes(&sandbox, "whole.safetensors") == bytes(&sandbox, "me.safetensors"), "the LoRAs differ");
}

#[test]
fn edits_samples_and_every_kind_of_adapter() {
    let sandbox = with_images();
    for (folder, name) in [("before", "0.png"), ("before2", "1.png"), ("after", "2.png")] {
        fs::create_dir_all(sandbox.path("edits").join(folder)).unwrap();
        fs::copy(sandbox.path("images").join(name), sandbox.path("edits").join(folder).join("x.png"))
            .unwrap();
    }
    sandbox.write("edits/after/x.txt", b"make it [trigger]");
    let args = |kind: &'static str, optimizer: &'static str| {
        let name = format!("{kind}.safetensors");
        let mut args = quick(&sandbox, &["--steps", "2", "--accumulate", "2", "--ema", "0.5", "-o"]);
        args[1] = "edits";
        let mut args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        args.push(name);
        args.extend(["--kind", kind, "--optimizer", optimizer, "--trigger", "night"].map(str::to_owned));
        args.extend(["--reference-dropout", "0.3", "--flip"].map(str::to_owned));
        args
    };
    for (kind, optimizer) in [("lora", "adamw8bit"), ("lokr", "prodigy"), ("dora", "adamw")] {
        let args = args(kind, optimizer);
        let samples =
            ["--sample-every", "2", "--sample-steps", "1", "--tensorboard", "--checkpointing", "on"];
        let args: Vec<&str> = args.iter().map(String::as_str).chain(samples).collect();
        let ran = sandbox.kiln(&args).ok();
        assert!(ran.err.contains("the references make a step"), "{}", ran.err);
        let file = format!("{kind}.safetensors");
        let info = sandbox.kiln(&["info", &file]).ok();
        assert!(info.text().to_lowercase().contains(kind), "{}", info.text());
        sandbox.generate(&["night", "-S", "1", "-s", "1", "-o", "a.png", "--lora", &file]).ok();
        let folder = PathBuf::from(format!("{kind}.train"));
        let sheet = folder.join("samples/samples.png");
        assert_eq!(sandbox.image(sheet.to_str().unwrap()).height(), 256);
        assert!(
            kiln_image::read_ai_mark(&fs::read(sandbox.path("").join(&sheet)).unwrap()).unwrap().is_some()
        );
        assert_eq!(fs::read_dir(sandbox.path("").join(&folder).join("tensorboard")).unwrap().count(), 1);
    }
}

#[test]
fn what_can_not_be_trained_is_refused_before_it_starts() {
    let sandbox = with_images();
    let fails = |args: &[&str], words: &[&str]| train(&sandbox, args).fails(1, words);
    sandbox.write("me.safetensors", b"mine");
    fails(&[], &["me.safetensors", "exists already", "--overwrite"]);
    fails(&["-o", "new.safetensors", "--resume"], &["nothing to resume"]);
    train(&sandbox, &["-o", "me.png"]).fails(2, &["a LoRA is a .safetensors file"]);
    train(&sandbox, &["-o", "a.safetensors", "--ranks", "1,2"]).fails(2, &["--ranks needs four numbers"]);
    let fused = ["-o", "a.safetensors", "--kind", "lokr", "--layout", "kohya"];
    train(&sandbox, &fused).fails(2, &["a LoKr can't be written with names of fused q, k and v"]);
    train(&sandbox, &["-o", "a.safetensors", "--targets", "no.such.layer"]).fails(2, &["no.such.layer"]);

    let folder = |name: &str, files: &[(&str, &[u8])]| {
        fs::create_dir(sandbox.path(name)).unwrap();
        files.iter().for_each(|(file, bytes)| fs::write(sandbox.path(name).join(file), bytes).unwrap());
        let mut args =
            quick(&sandbox, &["-o", "a.safetensors"]).iter().map(|arg| arg.to_string()).collect::<Vec<_>>();
        args[1] = name.to_owned();
        sandbox.kiln(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let image = png(&pattern(64, 64));
    folder("junk", &[("notes.md", b"x"), ("a.zip", b"PK")]).fails(1, &["no images in", "notes.md"]);
    folder("broken", &[("a.png", &image[..200]), ("a.txt", b"a fox")]).fails(1, &["a.png", "--skip-bad"]);
    folder("tiny", &[("a.png", &png(&pattern(16, 16))), ("a.txt", b"a fox")])
        .fails(1, &["16x16", "--skip-bad"]);
    folder("bare", &[("a.png", &image)]).fails(1, &["1 of 1 images have no caption", "--trigger"]);
    folder("list", &[("a.png", &image), ("metadata.jsonl", b"{}")]).fails(1, &["line 1", "names no image"]);
    assert!(!sandbox.path("a.train").exists(), "something was created");
}

#[test]
fn a_distilled_model_is_refused_and_other_settings_can_not_be_resumed() {
    let (base, distilled) = (with_images(), Sandbox::new());
    let model = distilled.model().to_str().unwrap();
    let args = ["--steps", "1", "-m", model];
    train(&base, &args).fails(1, &["a distilled model", "klein-base-4b", "--distilled-anyway"]);
    train(&base, &[&args[..], &["--distilled-anyway"]].concat()).ok();
    let resumed = [&args[..], &["--distilled-anyway", "--resume"]].concat();
    let fails = |other: &[&str], words| train(&base, &[&resumed[..], other].concat()).fails(1, &[words]);
    fails(&["--seed", "3"], "`seed` was 0 and is 3");
    fails(&["--trigger", "night"], "the images, captions or their options have changed");
}

#[test]
fn a_dry_run_tells_the_cost_and_writes_nothing() {
    let sandbox = with_images();
    let ran = train(&sandbox, &["--dry-run", "--ranks", "8,4,4,2"]).ok();
    assert!(ran.err.contains("of memory") && ran.err.contains("4 examples"), "{}", ran.err);
    assert_eq!(sandbox.names(), ["images"]);
}

#[test]
fn a_dry_run_refuses_what_the_run_refuses() {
    let sandbox = with_images();
    let refused = |args: &[&str], code: i32, words: &[&str]| {
        train(&sandbox, args).fails(code, words);
        train(&sandbox, &[args, &["--dry-run"]].concat()).fails(code, words);
    };
    refused(&["--dtype", "fp8", "--device", "cpu"], 1, &["does not support fp8", "hint: "]);
    refused(&["--sample-every", "1", "--sample-model", "nowhere"], 1, &["`nowhere` does not exist"]);
    refused(&["--resume"], 1, &["nothing to resume"]);
    sandbox.write("file", b"");
    refused(&["-o", "file/me.safetensors"], 1, &["`file` is not a folder", "hint: "]);
    sandbox.write("me.safetensors", b"mine");
    refused(&["-o", "me.safetensors"], 1, &["exists already", "--overwrite"]);
    assert_eq!(sandbox.names(), ["file", "images", "me.safetensors"]);
}

#[test]
fn a_loss_that_explodes_stops_and_continues_at_a_lower_rate() {
    let sandbox = with_images();
    let explode = ["--steps", "200", "--lr", "1e6", "--clip", "0"];
    train(&sandbox, &explode).fails(1, &["start over with a lower --lr"]);
    train(&sandbox, &["--steps", "2"]).ok();
    let resumed = [&explode[..], &["--resume"]].concat();
    train(&sandbox, &resumed)
        .fails(1, &["continue from the checkpoint of step 2 with --resume", "lower --lr"]);
    let ran = train(&sandbox, &["--steps", "4", "--lr", "3e-3", "--resume"]).ok();
    assert!(ran.err.contains("`learning_rate.peak` was 0.01 and is 0.003"), "{}", ran.err);
    assert!(ran.err.contains("wrote `me.safetensors`"), "{}", ran.err);
}

#[test]
fn more_steps_continue_a_finished_training_on_a_cosine_too() {
    let sandbox = with_images();
    train(&sandbox, &["--steps", "2", "--schedule", "cosine"]).ok();
    let ran = train(&sandbox, &["--steps", "4", "--schedule", "cosine", "--resume"]).ok();
    assert!(ran.err.contains("`learning_rate.cosine_steps` was 2 and is 4"), "{}", ran.err);
    let log = fs::read_to_string(sandbox.path("me.train/log.jsonl")).unwrap();
    let rates: Vec<f64> = log
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["learning_rate"].as_f64().unwrap()
        })
        .collect();
    // The third step is at half of the longer curve, from which it falls.
    assert!(rates.len() == 4 && (rates[2] - 5e-3).abs() < 1e-6 && rates[3] < rates[2], "{rates:?}");
}

#[test]
fn a_damaged_state_is_not_a_download() {
    let sandbox = with_images();
    train(&sandbox, &["--steps", "1"]).ok();
    let state = bytes(&sandbox, "me.train/state.safetensors");
    sandbox.write("me.train/state.safetensors", &state[..state.len() / 2]);
    let ran = train(&sandbox, &["--steps", "2", "--resume"]);
    assert!(!ran.err.contains("download"), "{}", ran.err);
    ran.fails(1, &["the state of the training, `me.train", "is damaged", "--overwrite"]);
}

#[test]
fn two_trainings_do_not_write_the_same_lora() {
    let sandbox = with_images();
    let mut child = start(&sandbox, "5000");
    let same = ["--steps", "60", "-o", "stopped.safetensors"];
    for other in ["--resume", "--overwrite"] {
        let ran = train(&sandbox, &[&same[..], &[other]].concat());
        ran.fails(1, &["another training writes to `stopped.train`", "another -o"]);
    }
    assert!(child.try_wait().unwrap().is_none(), "the first training ended too early for this test");
    child.kill().unwrap();
    child.wait().unwrap();
    train(&sandbox, &["--steps", "6", "-o", "stopped.safetensors", "--overwrite"]).ok();
}

#[test]
fn int8_is_trained_on_every_instruction_set() {
    let sandbox = with_images();
    for isa in kiln_engine::Isa::available() {
        for kind in ["lora", "dora"] {
            let (isa, output) = (isa.to_string(), format!("{isa}-{kind}.safetensors"));
            let args = ["--dtype", "int8", "--steps", "20", "--cpu-isa", &isa, "--kind", kind, "-o", &output];
            let [before, after] = fixed_losses(&train(&sandbox, &args).ok());
            assert!(after < 0.95 * before, "{isa}, {kind}: the loss was {before}, and is {after}");
        }
    }
}

#[cfg(feature = "ember")]
#[test]
fn without_a_model_ember_base_is_trained_and_ember_names_it() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("images")).unwrap();
    sandbox.write("images/a.png", &png(&pattern(64, 64)));
    sandbox.write("images/a.txt", b"a fox");
    let args =
        ["train", "images", "-o", "me.safetensors", "--steps", "1", "--resolution", "64", "--rank", "2"];
    let ran = sandbox.kiln(&args).ok();
    for words in
        ["training on the built-in Ember base", "1 example: 64x64 (1)", "base: ember-base, klein base"]
    {
        assert!(ran.err.contains(words), "`{words}` is missing in:\n{}", ran.err);
    }
    let ember = [&args[..], &["-m", "ember", "--overwrite"]].concat();
    sandbox.kiln(&ember).fails(1, &["a distilled model", "-m ember-base"]);
    let info = sandbox.kiln(&["info", "me.safetensors"]).ok();
    assert!(info.text().contains("ember-base"), "{}", info.text());
    let models = sandbox.kiln(&["models"]).ok();
    assert!(models.text().contains("ember-base"), "{}", models.text());
}

#[test]
fn a_lora_that_changes_nothing_is_told() {
    let sandbox = with_images();
    let ran = train(&sandbox, &["--steps", "1", "--lr", "1e-12"]).ok();
    assert!(ran.err.contains("the LoRA changes nothing"), "{}", ran.err);
}
