//! `kiln generate`: prompts, seeds, outputs and options.

use std::fs;

use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};

use crate::sandbox::{Sandbox, golden, max_difference, pattern, png};

#[test]
fn a_prompt_becomes_an_image_and_messages_go_to_standard_error() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["a red fox", "-S", "42", "-o", "fox.png"]).ok();
    assert!(ran.out.is_empty());
    for line in [
        "seed 42",
        "64x64, 2 steps",
        "load ",
        "text ",
        "step 1/2 sigma 1.000",
        "step 2/2",
        "decode ",
        "saved `fox.png`",
    ] {
        assert!(ran.err.contains(line), "`{line}` is missing in:\n{}", ran.err);
    }
    let image = sandbox.image("fox.png");
    assert_eq!((image.width(), image.height()), (64, 64));
    assert_eq!(sandbox.names(), ["fox.png"]);
}

#[test]
fn the_default_name_comes_from_prompt_and_seed_and_overwrites_nothing() {
    let sandbox = Sandbox::new();
    sandbox.write("a-red-fox-42.png", b"mine");
    sandbox.generate(&["A red fox!", "-S", "42"]).ok();
    sandbox.generate(&["A red fox!", "-S", "42"]).ok();
    assert_eq!(sandbox.names(), ["a-red-fox-42-2.png", "a-red-fox-42-3.png", "a-red-fox-42.png"]);
    assert_eq!(fs::read(sandbox.path("a-red-fox-42.png")).unwrap(), b"mine");
}

#[test]
fn a_random_seed_is_printed_and_differs_between_runs() {
    let sandbox = Sandbox::new();
    let seed = |ran: crate::sandbox::RunOutput| {
        let line = ran.err.lines().find(|l| l.starts_with("seed ")).unwrap().to_owned();
        line.trim_start_matches("seed ").parse::<u64>().unwrap()
    };
    let first = seed(sandbox.generate(&["fox", "-s", "1"]).ok());
    assert_eq!(sandbox.names(), [format!("fox-{first}.png")]);
    assert_ne!(seed(sandbox.generate(&["fox", "-s", "1"]).ok()), first);
}

#[test]
fn standard_output_gets_only_the_png() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["fox", "-S", "1", "-o", "-"]).ok();
    sandbox.generate(&["fox", "-S", "1", "-o", "fox.png"]).ok();
    assert_eq!(ran.out, fs::read(sandbox.path("fox.png")).unwrap());
}

#[test]
fn the_extension_chooses_the_format() {
    let sandbox = Sandbox::new();
    for (name, magic) in [("a.jpg", &b"\xff\xd8"[..]), ("a.webp", b"RIFF"), ("a.PNG", b"\x89PNG")] {
        sandbox.generate(&["fox", "-S", "1", "-s", "1", "-o", name]).ok();
        assert!(fs::read(sandbox.path(name)).unwrap().starts_with(magic), "{name}");
        let recipe = sandbox.kiln(&["info", "--json", name]).ok();
        assert!(recipe.text().contains("\"prompt\": \"fox\""), "{name}: {}", recipe.text());
    }
}

#[test]
fn a_batch_gets_numbers_and_overwrites_nothing() {
    let sandbox = Sandbox::new();
    sandbox.write("out-2.png", b"mine");
    sandbox.write("out.png", b"mine, too");
    sandbox.generate(&["a fox", "a hen", "-b", "2", "-s", "1", "-S", "3", "-o", "out.png"]).ok();
    assert_eq!(sandbox.names(), ["out-2.png", "out-3.png", "out-4.png", "out-5.png", "out-6.png", "out.png"]);
    assert_eq!(fs::read(sandbox.path("out-2.png")).unwrap(), b"mine");
    assert_eq!(fs::read(sandbox.path("out.png")).unwrap(), b"mine, too");
    assert_ne!(sandbox.image("out-3.png"), sandbox.image("out-4.png"));
}

#[test]
fn each_seed_of_a_list_gives_the_same_image_as_alone() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["fox", "-s", "1", "-S", "11,18446744073709551615", "-o", "two.png"]).ok();
    sandbox.generate(&["fox", "-s", "1", "-S", "18446744073709551615", "-o", "one.png"]).ok();
    assert_eq!(sandbox.image("two-2.png"), sandbox.image("one.png"));
    assert_ne!(sandbox.image("two-1.png"), sandbox.image("two-2.png"));
}

#[test]
fn a_prompt_may_come_from_standard_input_or_be_empty() {
    let sandbox = Sandbox::new();
    sandbox.generate_with_input(&["-", "-S", "1", "-o", "piped.png"], "a red fox\n".as_bytes()).ok();
    sandbox.generate(&["a red fox", "-s", "1", "-S", "1", "-o", "typed.png"]).ok();
    assert_eq!(sandbox.image("piped.png"), sandbox.image("typed.png"));
    sandbox.generate(&["", "-s", "1", "-S", "1", "-o", "empty.png"]).ok();
    assert_ne!(sandbox.image("empty.png"), sandbox.image("typed.png"));
    sandbox.generate_with_input(&["-", "-S", "1"], b"K\x84fer").fails(1, &["standard input", "UTF-8"]);
}

#[test]
fn a_size_is_rounded_down_with_a_note() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["fox", "-W", "79", "-H", "65", "-s", "1", "-S", "1", "-o", "a.png"]).ok();
    assert!(ran.err.contains("note: width 79 is rounded down to 64"), "{}", ran.err);
    assert!(ran.err.contains("note: height 65 is rounded down to 64"), "{}", ran.err);
    assert_eq!(sandbox.image("a.png").width(), 64);
}

#[test]
fn options_without_effect_are_noted() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["fox", "-g", "3", "-n", "bad", "-s", "1", "-o", "a.png"]).ok();
    assert!(ran.err.contains("note: guidance has no effect"), "{}", ran.err);
    assert!(ran.err.contains("note: the negative prompt has no effect"), "{}", ran.err);
}

#[test]
fn quiet_prints_nothing_and_verbose_more() {
    let sandbox = Sandbox::new();
    let quiet = sandbox.generate(&["fox", "-S", "1", "-q", "-o", "a.png"]).ok();
    assert!(quiet.err.is_empty() && quiet.out.is_empty(), "{}", quiet.err);
    let verbose = sandbox.generate(&["fox", "-S", "1", "-v", "-o", "a.png"]).ok();
    assert!(verbose.err.contains("sigmas [1.0,") && verbose.err.contains("on cpu ("), "{}", verbose.err);
    sandbox.generate(&["fox", "-q", "-v"]).fails(2, &["cannot be used with"]);
}

#[test]
fn json_is_one_event_per_line() {
    let sandbox = Sandbox::new();
    let lora = kiln_golden::testdata().join("tiny/lora/lora_diffusers.safetensors");
    let ran = sandbox
        .generate(&[
            "a fox",
            "-S",
            "7",
            "-W",
            "70",
            "--json",
            "--lora",
            lora.to_str().unwrap(),
            "-o",
            "a.png",
        ])
        .ok();
    assert!(ran.err.is_empty(), "{}", ran.err);
    let events = ran.events();
    let of = |kind: &str| events.iter().filter(|e| e["event"] == kind).collect::<Vec<_>>();
    assert_eq!(events[0]["event"], "started");
    assert_eq!(events[0]["seeds"][0], 7);
    assert_eq!(events[0]["random_seed"], false);
    assert_eq!((&of("resolved")[0]["width"], &of("resolved")[0]["steps"]), (&64.into(), &2.into()));
    assert_eq!(of("step").len(), 2);
    assert!(of("step")[1]["seconds"].as_f64().unwrap() > 0.0);
    assert_eq!((&of("step")[1]["step"], &of("step")[1]["steps"]), (&2.into(), &2.into()));
    let phases: Vec<_> = of("phase").iter().map(|e| e["phase"].as_str().unwrap().to_owned()).collect();
    assert_eq!(phases, ["load", "text", "steps", "decode"]);
    assert_eq!(of("note").len(), 1);
    assert_eq!(of("lora").len(), 1);
    assert_eq!((&of("image")[0]["file"], &of("image")[0]["seed"]), (&"a.png".into(), &7.into()));
    let done = events.last().unwrap();
    assert_eq!((&done["event"], &done["files"][0]), (&"done".into(), &"a.png".into()));
    assert!(of("progress").is_empty(), "progress events need -v");

    let failed = sandbox.generate(&["a fox", "--json", "-W", "9999999"]);
    assert_eq!(failed.code, 2);
    assert_eq!(failed.events().last().unwrap()["event"], "error");
    assert!(failed.err.contains("error: width"));
}

#[test]
fn latents_are_written_and_noise_is_read() {
    let sandbox = Sandbox::new();
    let one_generator = ["a", "b", "-S", "5", "--one-generator", "-o", "a.png"];
    sandbox.generate(&[&one_generator[..], &["--latents-out", "l.safetensors"]].concat()).ok();
    let latents = WeightSource::open(sandbox.path("l.safetensors")).unwrap().tensor("latents").unwrap();
    assert_eq!(latents.shape().dims(), [2, 16, 128]);

    let values = kiln_tensor::rng::Generator::cpu(5).randn(2 * 128 * 16);
    let noise = HostTensor::from_f32([2, 128, 4, 4], values).unwrap();
    save::save(sandbox.path("n.safetensors"), &[("anything", noise)], &Default::default()).unwrap();
    sandbox.generate(&["a", "b", "--noise", "n.safetensors", "-o", "b.png"]).ok();
    assert_eq!(sandbox.image("a-1.png"), sandbox.image("b-1.png"));
    assert_eq!(sandbox.image("a-2.png"), sandbox.image("b-2.png"));
}

#[test]
fn threads_and_instruction_sets_do_not_change_the_image() {
    let sandbox = Sandbox::new();
    // The dtype of `auto` depends on the instruction set.
    let fox = |args: &[&str]| sandbox.generate(&[&["fox", "-S", "1", "--dtype", "f32"], args].concat()).ok();
    fox(&["--threads", "1", "-o", "one.png"]);
    fox(&["--threads", "3", "-o", "three.png"]);
    assert_eq!(sandbox.image("one.png"), sandbox.image("three.png"));
    fox(&["--cpu-isa", "portable", "-o", "portable.png"]);
    assert!(max_difference(&sandbox.image("one.png"), &sandbox.image("portable.png")) <= 1);
}

#[test]
fn schedules_generators_and_dtypes_change_the_image() {
    let sandbox = Sandbox::new();
    let image = |args: &[&str]| {
        sandbox.generate(&[&["fox", "-S", "1", "-o", "a.png"], args].concat()).ok();
        sandbox.image("a.png")
    };
    let plain = image(&[]);
    assert_eq!(
        image(&["--schedule", "shifted", "--rng", "cpu", "--device", "auto", "--dtype", "auto"]),
        plain
    );
    assert_ne!(image(&["--schedule", "power"]), plain);
    assert_ne!(image(&["--schedule", "power", "--rho", "3"]), image(&["--schedule", "power", "--rho", "2"]));
    assert_eq!(image(&["--schedule", "power", "--rho", "2"]), image(&["--schedule", "power"]));
    let [bf16, f16, cuda] = ["cpu-bf16", "cpu-f16", "cuda"].map(|rng| image(&["--rng", rng]));
    assert!(bf16 != plain && f16 != plain && cuda != plain && bf16 != f16);
    assert_ne!(image(&["--dtype", "bf16"]), image(&["--dtype", "f32"]));
    assert_eq!(image(&["--cpu-isa", "portable"]), image(&["--cpu-isa", "portable", "--dtype", "f32"]));
}

#[test]
fn a_vram_limit_on_the_cpu_is_noted() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["fox", "-S", "1", "--device", "cpu", "--vram-limit", "6G"]).ok();
    assert!(ran.err.contains("--vram-limit has no effect on the CPU"), "{}", ran.err);
}

#[test]
fn an_initial_image_sets_the_size_and_strength_the_steps() {
    let sandbox = Sandbox::new();
    sandbox.write("house.png", &png(&pattern(100, 70)));
    let model = sandbox.model().to_str().unwrap().to_owned();
    let start = [
        "generate",
        "-m",
        &model,
        "--max-tokens",
        "32",
        "fox",
        "-S",
        "1",
        "--init",
        "house.png",
        "-o",
        "a.png",
    ];
    let ran = sandbox.kiln(&start).ok();
    assert!(ran.err.contains("96x64, 3 steps"), "{}", ran.err);
    let ran = sandbox.kiln(&[&start[..], &["--strength", "0.25"]].concat()).ok();
    assert!(ran.err.contains("96x64, 1 step"), "{}", ran.err);
    let inpaint = ["--mask", &golden("inputs/mask_100x72.png")];
    sandbox.write("house.png", &png(&pattern(100, 72)));
    let ran = sandbox.kiln(&[&start[..], &inpaint].concat()).ok();
    assert!(ran.err.contains("96x64, 4 steps"), "{}", ran.err);
    assert_eq!((sandbox.image("a.png").width(), sandbox.image("a.png").height()), (96, 64));
}

#[test]
fn no_recipe_leaves_the_prompt_out() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["secret words", "-s", "1", "--no-recipe", "-o", "a.png"]).ok();
    let bytes = fs::read(sandbox.path("a.png")).unwrap();
    assert!(!bytes.windows(6).any(|w| w == b"secret"));
}

#[test]
fn files_say_that_a_model_made_them_unless_told_otherwise() {
    let sandbox = Sandbox::new();
    sandbox.write("house.png", &png(&pattern(64, 64)));
    let mark = |name: &str, args: &[&str]| {
        let ran = sandbox.generate(&[&["a fox", "-s", "1", "-o", name], args].concat()).ok();
        (kiln_image::read_ai_mark(&fs::read(sandbox.path(name)).unwrap()).unwrap(), ran.err)
    };
    for name in ["a.png", "a.jpg", "a.webp"] {
        let (found, _) = mark(name, &[]);
        let found = found.unwrap();
        assert_eq!(found.source, "trainedAlgorithmicMedia");
        assert_eq!(found.system.as_deref(), Some("Kiln, FLUX.2"));
        assert_eq!(found.version.as_deref(), Some(env!("CARGO_PKG_VERSION")));
        let (found, _) = mark(name, &["--no-recipe", "-r", "house.png"]);
        assert_eq!(found.unwrap().source, "trainedAlgorithmicMedia", "a reference is only looked at");
        let (found, _) = mark(name, &["--init", "house.png"]);
        assert_eq!(found.unwrap().source, "compositeWithTrainedAlgorithmicMedia");
        let said = sandbox.kiln(&["info", name]).ok();
        assert!(said.text().contains("edited or extended by Kiln, FLUX.2"), "{}", said.text());
        let (found, words) = mark(name, &["--no-ai-mark"]);
        assert_eq!(found, None);
        assert!(words.contains("won't say that a model made the image"), "{words}");
    }
}

#[test]
fn the_model_may_come_from_the_environment() {
    let sandbox = Sandbox::new();
    let mut command =
        sandbox.command(&["generate", "fox", "-W", "16", "-H", "16", "-s", "1", "-q", "-o", "a.png"]);
    command.env("KILN_MODEL", sandbox.model());
    assert!(command.status().unwrap().success());
    assert_eq!(sandbox.image("a.png").width(), 16);
}

#[test]
fn the_last_of_repeated_options_counts_and_lists_accumulate() {
    let sandbox = Sandbox::new();
    sandbox.write("r.png", &png(&pattern(64, 64)));
    let image = |args: &[&str]| {
        sandbox.generate(&[&["fox", "-s", "1"], args].concat()).ok();
        sandbox.image("a.png")
    };
    let twice = [
        "-S", "1,2", "-S", "3", "-o", "b.png", "-o", "a.png", "-q", "-q", "--sigmas", "1,0.5", "--sigmas",
        "1",
    ];
    assert_eq!(image(&twice), image(&["-S", "3", "-o", "a.png"]));
    let (one, two) = (["-r", "r.png"], ["-r", "r.png", "-r", "r.png"]);
    let with = |references: &[&str]| image(&[&["-S", "3", "-o", "a.png"], references].concat());
    assert_ne!(with(&one), with(&two));
    assert_eq!(sandbox.names(), ["a.png", "r.png"]);
}

#[test]
fn strength_0_keeps_the_initial_image() {
    let sandbox = Sandbox::new();
    let init = ["generate", "a cat", "-m", "ember", "-S", "1", "-o", "cat.png", "-q"];
    sandbox.kiln(&init).ok();
    let again = ["generate", "a rocket", "-m", "ember", "--init", "cat.png", "--strength", "0", "-S", "2"];
    let ran = sandbox.kiln(&[&again[..], &["-o", "same.png"]].concat()).ok();
    assert!(ran.err.contains("256x256, 0 steps"), "{}", ran.err);
    let (cat, same) = (sandbox.image("cat.png"), sandbox.image("same.png"));
    let sum: u64 = cat.pixels().iter().zip(same.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
    let mean = sum as f64 / cat.pixels().len() as f64;
    assert!(mean < 4.0, "the autoencoder alone changes it by {mean:.1} levels");
    // The seed has nothing to decide, nor has the mask.
    let other = [&again[..again.len() - 1], &["3", "-b", "2", "-o", "other.png"]].concat();
    sandbox.kiln(&other).ok();
    assert_eq!((sandbox.image("other-1.png"), sandbox.image("other-2.png")), (same.clone(), same));
    sandbox.write("mask.png", &crate::sandbox::png(&crate::sandbox::pattern(256, 256)));
    sandbox.kiln(&[&again[..], &["--mask", "mask.png", "-o", "masked.png"]].concat()).ok();
}
