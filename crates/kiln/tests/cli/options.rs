//! Options of `kiln generate` as other programs name them, prompts from files and templates for file names.

use std::fs;

use crate::sandbox::{Sandbox, pattern, png};

#[test]
fn names_of_other_programs_are_understood() {
    let sandbox = Sandbox::with_model("klein-base");
    sandbox.write("r.png", &png(&pattern(64, 64)));
    let image = |args: &[&str]| {
        sandbox.kiln(&[&["generate", "--max-tokens", "32", "-S", "1", "-o", "a.png"], args].concat()).ok();
        sandbox.image("a.png")
    };
    let model = sandbox.model().to_str().unwrap();
    let own = [
        "-m", model, "a fox", "-n", "-rain", "-g", "2.5", "-s", "1", "-b", "1", "-r", "r.png", "-W", "64",
        "-H", "48",
    ];
    let other = [
        "-m",
        model,
        "--prompt",
        "a fox",
        "--negative-prompt",
        "-rain",
        "--cfg-scale",
        "2.5",
        "--num-inference-steps",
        "1",
        "--batch-count",
        "1",
        "--ref-image",
        "r.png",
        "--size",
        "64x48",
    ];
    let own = image(&own);
    assert_eq!(image(&other), own);
    let other = other.map(|arg| if arg == "--cfg-scale" { "--guidance-scale" } else { arg });
    assert_eq!(image(&other.map(|arg| if arg == "--prompt" { "-p" } else { arg })), own);
    let init = |name| image(&["-m", model, "fox", "-s", "1", name, "r.png"]);
    assert_eq!(init("--init-img"), init("--init"));
    let help = sandbox.kiln(&["generate", "--help"]).ok();
    for name in
        ["--prompt", "--negative-prompt", "--cfg-scale", "--num-inference-steps", "--ref-image", "--init-img"]
    {
        assert!(help.text().contains(name), "{name} is missing in the help");
    }
}

#[test]
fn a_misspelt_option_gets_a_suggestion_that_fits() {
    let sandbox = Sandbox::new();
    for (wrong, right) in [
        ("--negative_prompt", "--negative-prompt"),
        ("--num_inference_steps", "--num-inference-steps"),
        ("--guidence", "--guidance"),
        ("--hight", "--height"),
        ("--output-file", "--output"),
    ] {
        sandbox.kiln(&["generate", "fox", wrong, "1"]).fails(2, &[wrong, right]);
    }
}

#[test]
fn an_aspect_ratio_gives_a_size_near_the_models() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    let size = |args: &[&str]| {
        let quick = ["generate", "fox", "-m", model, "-s", "1", "-q", "-o", "a.png"];
        sandbox.kiln(&[&quick, args].concat()).ok();
        let image = sandbox.image("a.png");
        (image.width(), image.height())
    };
    assert_eq!(size(&["--aspect", "2:1", "-W", "96"]), (96, 48));
    assert_eq!(size(&["--from", "a.png", "--aspect", "1:2", "-H", "64"]), (32, 64));
    let fails = |args: &[&str], words| sandbox.kiln(&[&["generate", "fox"], args].concat()).fails(2, words);
    fails(&["--aspect", "16"], &["--aspect", "such as 16:9"]);
    fails(&["--aspect", "2:1", "-W", "64", "-H", "64"], &["--aspect", "hint: "]);
    fails(&["--size", "64x64", "-W", "64"], &["cannot be used with"]);
    fails(&["--size", "64"], &["such as 768x512"]);
}

#[cfg(feature = "ember")]
#[test]
fn an_aspect_ratio_without_a_side_keeps_the_number_of_pixels() {
    let sandbox = Sandbox::new();
    let ran = sandbox.kiln(&["generate", "fox", "-s", "1", "--aspect", "16:9", "-o", "a.png"]).ok();
    assert!(ran.err.contains("336x192"), "{}", ran.err);
}

#[test]
fn a_seed_of_minus_one_is_random_and_a_large_number_of_steps_is_noted() {
    let sandbox = Sandbox::new();
    let seed = |args: &[&str]| {
        let ran = sandbox.generate(&[&["fox", "-s", "1", "-o", "a.png"], args].concat()).ok();
        ran.err.lines().find_map(|line| line.strip_prefix("seed ")).unwrap().parse::<u64>().unwrap()
    };
    assert_ne!(seed(&["-S", "-1"]), seed(&["-S", "-1"]));
    assert_ne!(seed(&["--from", "a.png", "--seed=-1"]), seed(&["-S", "3"]));
    sandbox.generate(&["fox", "-S", "-2"]).fails(2, &["-1 for a random seed"]);
    let ran = sandbox.generate(&["fox", "-W", "16", "-H", "16", "-s", "201", "-S", "1", "-o", "a.png"]).ok();
    assert!(
        ran.err.contains("note: 201 steps are many: -s is the number of steps, -S the seed"),
        "{}",
        ran.err
    );
}

#[test]
fn image_i_of_a_batch_has_the_seed_plus_i() {
    let sandbox = Sandbox::new();
    let run = |args: &[&str]| sandbox.generate(&[&["-s", "1"], args].concat()).ok();
    let ran = run(&["fox", "hen", "-b", "2", "-S", "18446744073709551614", "-o", "a.png"]);
    assert!(ran.err.contains("seeds 18446744073709551614 to 1"), "{}", ran.err);
    for (prompt, seed, name) in [("fox", "18446744073709551615", "a-2.png"), ("hen", "0", "a-3.png")] {
        run(&[prompt, "-S", seed, "-o", "alone.png"]);
        assert_eq!(sandbox.image("alone.png"), sandbox.image(name), "{name}");
        let recipe = sandbox.kiln(&["info", "--json", name]).ok();
        assert!(recipe.text().contains(&format!("\"seed\": {seed}")), "{}", recipe.text());
    }
    run(&["fox", "-b", "2", "-S", "4", "-o", "each.png"]);
    run(&["fox", "-b", "2", "-S", "4", "--one-generator", "-o", "one.png"]);
    assert_eq!(sandbox.image("each-1.png"), sandbox.image("one-1.png"));
    assert_ne!(sandbox.image("each-2.png"), sandbox.image("one-2.png"));
}

#[test]
fn images_go_into_a_folder_or_get_names_from_a_template() {
    let sandbox = Sandbox::new();
    let run = |args: &[&str]| {
        sandbox.generate(&[&["a fox", "-s", "1", "-S", "7", "-W", "32", "-H", "16"], args].concat())
    };
    let names = |folder: &str| {
        let mut names: Vec<_> =
            fs::read_dir(sandbox.path(folder)).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names.into_iter().map(|name| name.into_string().unwrap()).collect::<Vec<_>>()
    };
    let ran = run(&["-o", "new/deep/", "-b", "2"]).ok();
    assert!(ran.err.contains("saved `new/deep/a-fox-7.png`"), "{}", ran.err);
    assert_eq!(names("new/deep"), ["a-fox-7.png", "a-fox-8.png"]);
    run(&["-o", "new/deep"]).ok();
    assert_eq!(names("new/deep"), ["a-fox-7-2.png", "a-fox-7.png", "a-fox-8.png"]);
    let template = "t/{prompt}_{seed}_{width}x{height}_{steps}-{n}.jpg";
    run(&["-o", template, "-b", "2"]).ok();
    run(&["-o", template, "-b", "2"]).ok();
    assert_eq!(
        names("t"),
        ["a-fox_7_32x16_1-1.jpg", "a-fox_7_32x16_1-2.jpg", "a-fox_8_32x16_1-2.jpg", "a-fox_8_32x16_1-3.jpg"]
    );
    run(&["-o", "{date}/{seed}"]).ok();
    let day = sandbox.names().into_iter().find(|name| name.starts_with("20")).unwrap();
    assert_eq!((day.len(), names(&day)), (10, vec!["7.png".to_owned()]));
    run(&["-o", "{size}.png"]).fails(2, &["`{size}`", "hint: placeholders are {prompt}"]);
    run(&["-o", "t/a-fox_7_32x16_1-1.jpg/x/"]).fails(1, &["is not a folder", "hint: "]);
    sandbox.write("mine.txt", b"");
    run(&["-o", "mine.txt/"]).fails(1, &["mine.txt", "hint: "]);
}

#[test]
fn quality_makes_jpeg_and_webp_files_smaller_and_is_noted_for_others() {
    let sandbox = Sandbox::new();
    let size = |name: &str, args: &[&str]| {
        let ran = sandbox.generate(&[&["a fox", "-s", "1", "-S", "7", "-o", name], args].concat()).ok();
        (fs::metadata(sandbox.path(name)).unwrap().len(), ran.err)
    };
    for extension in ["jpg", "webp"] {
        let name = |name: &str| format!("{name}.{extension}");
        let (plain, small) = (size(&name("a"), &[]).0, size(&name("b"), &["--quality", "30"]).0);
        assert!(small < plain, "{extension}: {small} < {plain}");
    }
    sandbox.kiln(&["info", "b.webp"]).ok();
    let (_, notes) = size("a.png", &["--quality", "30"]);
    assert!(notes.contains("note: --quality has no effect: PNG files are lossless"), "{notes}");
    sandbox.generate(&["a fox", "--quality", "101"]).fails(2, &["101", "--quality"]);
}

#[test]
fn a_file_holds_prompts_one_per_line() {
    let sandbox = Sandbox::new();
    sandbox.write("prompts.txt", "# two\na fox\n\na hen\n".as_bytes());
    sandbox.generate(&["--prompt-file", "prompts.txt", "-s", "1", "-S", "7", "-o", "out/"]).ok();
    sandbox.generate(&["a hen", "-s", "1", "-S", "8", "-o", "alone.png"]).ok();
    assert_eq!(sandbox.image("out/a-hen-8.png"), sandbox.image("alone.png"));
    assert!(sandbox.path("out/a-fox-7.png").exists());
    sandbox.write("empty.txt", b"\n# none\n");
    sandbox.generate(&["--prompt-file", "empty.txt"]).fails(1, &["empty.txt", "no prompt", "hint: "]);
    sandbox.generate(&["--prompt-file", "none.txt"]).fails(1, &["none.txt"]);
}

#[test]
fn a_line_of_json_has_options_of_its_own() {
    let sandbox = Sandbox::new();
    let lora = kiln_golden::testdata().join("tiny/lora/lora_diffusers.safetensors");
    let lora = lora.display().to_string().replace('\\', "/");
    let lines = format!(
        "a fox\n{{\"prompt\": \"a hen\", \"width\": 32, \"n\": 2}}\n{{\"prompt\": \"a fox\", \"seed\": 7, \"loras\": \
         [{{\"name\": \"{lora}\", \"weight\": 9}}]}}\na fox\n"
    );
    sandbox.write("prompts.jsonl", lines.as_bytes());
    let ran = sandbox
        .generate(&["--prompt-file", "prompts.jsonl", "-s", "1", "-S", "7", "-o", "{n}-{seed}.png"])
        .ok();
    assert_eq!(
        sandbox.names(),
        ["1-7.png", "2-8.png", "3-9.png", "4-7.png", "5-11.png", "prompts.jsonl"],
        "{}",
        ran.err
    );
    assert_eq!((sandbox.image("2-8.png").width(), sandbox.image("1-7.png").width()), (32, 64));
    assert_ne!(sandbox.image("4-7.png"), sandbox.image("1-7.png"), "the LoRA is applied");
    sandbox.generate(&["a fox", "-s", "1", "-S", "11", "-o", "alone.png"]).ok();
    assert_eq!(sandbox.image("5-11.png"), sandbox.image("alone.png"), "the LoRA is removed");
    sandbox.write("wrong.jsonl", b"{\"prompt\": \"a\", \"widht\": 3}");
    sandbox.generate(&["--prompt-file", "wrong.jsonl"]).fails(1, &["line 1", "widht"]);
    sandbox.generate(&["a hen", "--prompt-file", "prompts.jsonl"]).fails(2, &["other prompts", "hint: "]);
}

#[test]
fn wildcards_are_chosen_by_the_seed_and_the_recipe_has_the_result() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("lists")).unwrap();
    sandbox.write("lists/animal.txt", b"fox\nhen\ncat\ndog\n");
    let run = |args: &[&str]| {
        let prompt = ["a {red|green|blue} __animal__", "--wildcards", "lists", "-s", "1"];
        sandbox.generate(&[&prompt, args].concat()).ok()
    };
    run(&["-S", "1", "-b", "6", "-o", "w/"]);
    let mut names: Vec<_> = fs::read_dir(sandbox.path("w"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names.dedup_by_key(|name| name.rsplit_once('-').unwrap().0.to_owned());
    assert!(names.len() > 2 && names.iter().all(|name| !name.contains("animal")), "{names:?}");
    let (words, seed) = names[0].trim_end_matches(".png").rsplit_once('-').unwrap();
    run(&["-S", seed, "-o", "alone.png"]);
    assert_eq!(sandbox.image("alone.png"), sandbox.image(&format!("w/{}", names[0])));
    let recipe = sandbox.kiln(&["info", "--json", "alone.png"]).ok();
    assert!(
        recipe.text().contains(&format!("\"prompt\": \"{}\"", words.replace('-', " "))),
        "{}",
        recipe.text()
    );
    sandbox.kiln(&["generate", "--from", "alone.png", "-o", "again.png"]).ok();
    assert_eq!(fs::read(sandbox.path("again.png")).unwrap(), fs::read(sandbox.path("alone.png")).unwrap());
    let ran = sandbox.generate(&["a __animal__", "-s", "1", "-o", "a.png"]).ok();
    assert!(ran.err.contains("note: `__animal__` stays as it is"), "{}", ran.err);
    let none = ["a __none__", "--wildcards", "lists"];
    sandbox.generate(&none).fails(1, &["`__none__`", "none.txt", "hint: "]);
}

#[test]
fn a_png_also_says_how_it_was_made_in_the_words_of_a1111() {
    let sandbox = Sandbox::with_model("klein-base");
    let args = ["a fox", "-n", "rain", "-g", "2.5", "-s", "1", "-S", "7", "-o", "a.png"];
    sandbox.generate(&args).ok();
    let bytes = fs::read(sandbox.path("a.png")).unwrap();
    let text =
        b"tEXtparameters\0a fox\nNegative prompt: rain\nSteps: 1, Sampler: Euler, CFG scale: 2.5, Seed: 7, ";
    assert!(bytes.windows(text.len()).any(|window| window == text));
    sandbox.generate(&[&args[..], &["--no-recipe"]].concat()).ok();
    let bytes = fs::read(sandbox.path("a.png")).unwrap();
    assert!(!bytes.windows(10).any(|window| window == b"parameters"));
}
