use std::fs;

use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};

use crate::kit::{Kit, golden, levels, pattern, png};

#[test]
fn a_prompt_becomes_a_picture_and_words_go_to_standard_error() {
    let kit = Kit::new();
    let ran = kit.generate(&["a red fox", "-S", "42", "-o", "fox.png"]).ok();
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
    let picture = kit.picture("fox.png");
    assert_eq!((picture.width(), picture.height()), (64, 64));
    assert_eq!(kit.names(), ["fox.png"]);
}

#[test]
fn the_default_name_comes_from_prompt_and_seed_and_overwrites_nothing() {
    let kit = Kit::new();
    kit.write("a-red-fox-42.png", b"mine");
    kit.generate(&["A red fox!", "-S", "42"]).ok();
    kit.generate(&["A red fox!", "-S", "42"]).ok();
    assert_eq!(kit.names(), ["a-red-fox-42-2.png", "a-red-fox-42-3.png", "a-red-fox-42.png"]);
    assert_eq!(fs::read(kit.path("a-red-fox-42.png")).unwrap(), b"mine");
}

#[test]
fn a_seed_that_was_not_given_is_told_and_differs_between_runs() {
    let kit = Kit::new();
    let seed = |ran: crate::kit::Ran| {
        let line = ran.err.lines().find(|l| l.starts_with("seed ")).unwrap().to_owned();
        line.trim_start_matches("seed ").parse::<u64>().unwrap()
    };
    let first = seed(kit.generate(&["fox", "-s", "1"]).ok());
    assert_eq!(kit.names(), [format!("fox-{first}.png")]);
    assert_ne!(seed(kit.generate(&["fox", "-s", "1"]).ok()), first);
}

#[test]
fn standard_output_gets_the_bytes_of_a_png_and_nothing_else() {
    let kit = Kit::new();
    let ran = kit.generate(&["fox", "-S", "1", "-o", "-"]).ok();
    kit.generate(&["fox", "-S", "1", "-o", "fox.png"]).ok();
    assert_eq!(ran.out, fs::read(kit.path("fox.png")).unwrap());
}

#[test]
fn the_extension_chooses_the_format() {
    let kit = Kit::new();
    for (name, magic) in [("a.jpg", &b"\xff\xd8"[..]), ("a.webp", b"RIFF"), ("a.PNG", b"\x89PNG")] {
        kit.generate(&["fox", "-S", "1", "-s", "1", "-o", name]).ok();
        assert!(fs::read(kit.path(name)).unwrap().starts_with(magic), "{name}");
        let recipe = kit.kiln(&["info", "--json", name]).ok();
        assert!(recipe.text().contains("\"prompt\": \"fox\""), "{name}: {}", recipe.text());
    }
}

#[test]
fn a_batch_gets_numbers_and_overwrites_nothing() {
    let kit = Kit::new();
    kit.write("out-2.png", b"mine");
    kit.write("out.png", b"mine, too");
    kit.generate(&["a fox", "a hen", "-b", "2", "-s", "1", "-S", "3", "-o", "out.png"]).ok();
    assert_eq!(kit.names(), ["out-2.png", "out-3.png", "out-4.png", "out-5.png", "out-6.png", "out.png"]);
    assert_eq!(fs::read(kit.path("out-2.png")).unwrap(), b"mine");
    assert_eq!(fs::read(kit.path("out.png")).unwrap(), b"mine, too");
    assert_ne!(kit.picture("out-3.png"), kit.picture("out-4.png"));
}

#[test]
fn a_list_of_seeds_is_a_picture_each_the_same_as_alone() {
    let kit = Kit::new();
    kit.generate(&["fox", "-s", "1", "-S", "11,18446744073709551615", "-o", "two.png"]).ok();
    kit.generate(&["fox", "-s", "1", "-S", "18446744073709551615", "-o", "one.png"]).ok();
    assert_eq!(kit.picture("two-2.png"), kit.picture("one.png"));
    assert_ne!(kit.picture("two-1.png"), kit.picture("two-2.png"));
}

#[test]
fn a_prompt_may_come_from_standard_input_or_be_empty() {
    let kit = Kit::new();
    kit.generate_with_input(&["-", "-S", "1", "-o", "piped.png"], "a red fox\n".as_bytes()).ok();
    kit.generate(&["a red fox", "-s", "1", "-S", "1", "-o", "typed.png"]).ok();
    assert_eq!(kit.picture("piped.png"), kit.picture("typed.png"));
    kit.generate(&["", "-s", "1", "-S", "1", "-o", "empty.png"]).ok();
    assert_ne!(kit.picture("empty.png"), kit.picture("typed.png"));
    kit.generate_with_input(&["-", "-S", "1"], b"\xff\xfe").refused(1, &["standard input", "UTF-8"]);
}

#[test]
fn a_size_is_rounded_down_with_a_note() {
    let kit = Kit::new();
    let ran = kit.generate(&["fox", "-W", "79", "-H", "65", "-s", "1", "-S", "1", "-o", "a.png"]).ok();
    assert!(ran.err.contains("note: width 79 is rounded down to 64"), "{}", ran.err);
    assert!(ran.err.contains("note: height 65 is rounded down to 64"), "{}", ran.err);
    assert_eq!(kit.picture("a.png").width(), 64);
}

#[test]
fn options_without_effect_are_noted() {
    let kit = Kit::new();
    let ran = kit.generate(&["fox", "-g", "3", "-n", "bad", "-s", "1", "-o", "a.png"]).ok();
    assert!(ran.err.contains("note: guidance has no effect"), "{}", ran.err);
    assert!(ran.err.contains("note: the negative prompt has no effect"), "{}", ran.err);
}

#[test]
fn quiet_says_nothing_and_verbose_more() {
    let kit = Kit::new();
    let quiet = kit.generate(&["fox", "-S", "1", "-q", "-o", "a.png"]).ok();
    assert!(quiet.err.is_empty() && quiet.out.is_empty(), "{}", quiet.err);
    let verbose = kit.generate(&["fox", "-S", "1", "-v", "-o", "a.png"]).ok();
    assert!(verbose.err.contains("sigmas [1.0,") && verbose.err.contains("on cpu ("), "{}", verbose.err);
    kit.generate(&["fox", "-q", "-v"]).refused(2, &["cannot be used with"]);
}

#[test]
fn json_is_an_event_a_line() {
    let kit = Kit::new();
    let lora = kiln_golden::in_tree().join("tiny/lora/lora_diffusers.safetensors");
    let ran = kit
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
    assert_eq!((&of("picture")[0]["file"], &of("picture")[0]["seed"]), (&"a.png".into(), &7.into()));
    let done = events.last().unwrap();
    assert_eq!((&done["event"], &done["files"][0]), (&"done".into(), &"a.png".into()));
    assert!(of("progress").is_empty(), "blocks are told with -v only");

    let failed = kit.generate(&["a fox", "--json", "-W", "9999999"]);
    assert_eq!(failed.code, 1);
    assert_eq!(failed.events().last().unwrap()["event"], "error");
    assert!(failed.err.contains("error: width"));
}

#[test]
fn latents_are_written_and_noise_is_read() {
    let kit = Kit::new();
    kit.generate(&["a", "b", "-S", "5", "-o", "a.png", "--latents-out", "l.safetensors"]).ok();
    let latents = WeightSource::open(kit.path("l.safetensors")).unwrap().tensor("latents").unwrap();
    assert_eq!(latents.shape().dims(), [2, 16, 128]);

    let values = kiln_tensor::rng::Generator::cpu(5).randn(2 * 128 * 16);
    let noise = HostTensor::from_f32([2, 128, 4, 4], values).unwrap();
    save::save(kit.path("n.safetensors"), &[("anything", noise)], &Default::default()).unwrap();
    kit.generate(&["a", "b", "--noise", "n.safetensors", "-o", "b.png"]).ok();
    assert_eq!(kit.picture("a-1.png"), kit.picture("b-1.png"));
    assert_eq!(kit.picture("a-2.png"), kit.picture("b-2.png"));
}

#[test]
fn threads_and_instruction_sets_do_not_change_the_picture() {
    let kit = Kit::new();
    // Which dtype `auto` stands for depends on the instruction set.
    let fox = |args: &[&str]| kit.generate(&[&["fox", "-S", "1", "--dtype", "f32"], args].concat()).ok();
    fox(&["--threads", "1", "-o", "one.png"]);
    fox(&["--threads", "3", "-o", "three.png"]);
    assert_eq!(kit.picture("one.png"), kit.picture("three.png"));
    fox(&["--cpu-isa", "portable", "-o", "portable.png"]);
    assert!(levels(&kit.picture("one.png"), &kit.picture("portable.png")) <= 1);
}

#[test]
fn schedules_generators_and_types_are_choices() {
    let kit = Kit::new();
    let picture = |args: &[&str]| {
        kit.generate(&[&["fox", "-S", "1", "-o", "a.png"], args].concat()).ok();
        kit.picture("a.png")
    };
    let plain = picture(&[]);
    assert_eq!(
        picture(&["--schedule", "shifted", "--rng", "cpu", "--device", "auto", "--dtype", "auto"]),
        plain
    );
    assert_ne!(picture(&["--schedule", "power"]), plain);
    assert_ne!(
        picture(&["--schedule", "power", "--rho", "3"]),
        picture(&["--schedule", "power", "--rho", "2"])
    );
    assert_eq!(picture(&["--schedule", "power", "--rho", "2"]), picture(&["--schedule", "power"]));
    let [bf16, f16, cuda] = ["cpu-bf16", "cpu-f16", "cuda"].map(|rng| picture(&["--rng", rng]));
    assert!(bf16 != plain && f16 != plain && cuda != plain && bf16 != f16);
    assert_ne!(picture(&["--dtype", "bf16"]), picture(&["--dtype", "f32"]));
    assert_eq!(picture(&["--cpu-isa", "portable"]), picture(&["--cpu-isa", "portable", "--dtype", "f32"]));
}

#[test]
fn a_limit_on_a_gpus_memory_is_told_to_mean_nothing_on_the_cpu() {
    let kit = Kit::new();
    let ran = kit.generate(&["fox", "-S", "1", "--device", "cpu", "--vram-limit", "6G"]).ok();
    assert!(ran.err.contains("--vram-limit has no effect: the CPU computes"), "{}", ran.err);
}

#[test]
fn a_picture_to_start_from_keeps_its_size_and_strength_decides_the_steps() {
    let kit = Kit::new();
    kit.write("house.png", &png(&pattern(100, 70)));
    let model = kit.model().to_str().unwrap().to_owned();
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
    let ran = kit.kiln(&start).ok();
    assert!(ran.err.contains("96x64, 3 steps"), "{}", ran.err);
    let ran = kit.kiln(&[&start[..], &["--strength", "0.25"]].concat()).ok();
    assert!(ran.err.contains("96x64, 1 step"), "{}", ran.err);
    let inpaint = ["--mask", &golden("inputs/mask_100x72.png")];
    kit.write("house.png", &png(&pattern(100, 72)));
    let ran = kit.kiln(&[&start[..], &inpaint].concat()).ok();
    assert!(ran.err.contains("96x64, 4 steps"), "{}", ran.err);
    assert_eq!((kit.picture("a.png").width(), kit.picture("a.png").height()), (96, 64));
}

#[test]
fn the_picture_is_shown_in_the_terminal_on_request() {
    let kit = Kit::new();
    let starts =
        [("kitty", "\x1b_G"), ("iterm2", "\x1b]1337;"), ("sixel", "\x1bP"), ("blocks", "\x1b[38;2;")];
    for (how, start) in starts {
        let ran = kit.generate(&["fox", "-s", "1", "-q", &format!("--preview={how}"), "-o", "a.png"]).ok();
        assert!(ran.text().starts_with(start), "{how}");
    }
    let ran = kit.generate(&["--preview", "fox", "-s", "1", "-q", "-o", "a.png"]).ok();
    assert!(!ran.out.is_empty(), "a prompt after --preview is a prompt");
}

#[test]
fn no_recipe_leaves_the_prompt_out() {
    let kit = Kit::new();
    kit.generate(&["secret words", "-s", "1", "--no-recipe", "-o", "a.png"]).ok();
    let bytes = fs::read(kit.path("a.png")).unwrap();
    assert!(!bytes.windows(6).any(|w| w == b"secret"));
}

#[test]
fn the_model_may_come_from_the_environment() {
    let kit = Kit::new();
    let mut command =
        kit.command(&["generate", "fox", "-W", "16", "-H", "16", "-s", "1", "-q", "-o", "a.png"]);
    command.env("KILN_MODEL", kit.model());
    assert!(command.status().unwrap().success());
    assert_eq!(kit.picture("a.png").width(), 16);
}

#[test]
fn the_last_of_repeated_options_counts_and_lists_grow() {
    let kit = Kit::new();
    kit.write("r.png", &png(&pattern(64, 64)));
    let picture = |args: &[&str]| {
        kit.generate(&[&["fox", "-s", "1"], args].concat()).ok();
        kit.picture("a.png")
    };
    let twice = [
        "-S", "1,2", "-S", "3", "-o", "b.png", "-o", "a.png", "-q", "-q", "--sigmas", "1,0.5", "--sigmas",
        "1",
    ];
    assert_eq!(picture(&twice), picture(&["-S", "3", "-o", "a.png"]));
    let (one, two) = (["-r", "r.png"], ["-r", "r.png", "-r", "r.png"]);
    let with = |references: &[&str]| picture(&[&["-S", "3", "-o", "a.png"], references].concat());
    assert_ne!(with(&one), with(&two));
    assert_eq!(kit.names(), ["a.png", "r.png"]);
}
