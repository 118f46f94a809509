//! `--from`: generating an image again from its recipe.

use std::fs;

use kiln_golden::testdata;

use crate::sandbox::{Sandbox, golden, pattern, png};

/// Generates images, generates each again from its recipe, and asserts that the files are equal.
#[track_caller]
fn round_trip(sandbox: &Sandbox, args: &[&str], images: &[&str]) {
    sandbox.generate(&[args, &["-o", "a.png"]].concat()).ok();
    for name in images {
        let ran = sandbox.kiln(&["generate", "--from", name, "-o", "again.png"]).ok();
        assert!(!ran.err.contains("warning"), "{}", ran.err);
        let (first, again) =
            (fs::read(sandbox.path(name)).unwrap(), fs::read(sandbox.path("again.png")).unwrap());
        assert!(first == again, "{name} differs");
    }
}

#[test]
fn a_recipe_gives_the_same_file() {
    round_trip(&Sandbox::new(), &["a \"red\" fox", "-S", "18446744073709551615"], &["a.png"]);
}

#[test]
fn one_image_of_a_batch_is_generated_again_alone() {
    for rng in ["cpu", "cpu-bf16"] {
        for draw in [&[][..], &["--one-generator"]] {
            let args = [&["a fox", "a hen", "-b", "2", "-S", "4", "--rng", rng], draw].concat();
            round_trip(&Sandbox::new(), &args, &["a-1.png", "a-4.png"]);
        }
    }
}

#[test]
fn images_of_a_list_of_seeds_are_generated_again() {
    for rng in ["cuda", "cpu-f16"] {
        round_trip(&Sandbox::new(), &["a fox", "-S", "4,5", "--rng", rng], &["a-1.png", "a-2.png"]);
    }
}

#[test]
fn guidance_and_the_negative_prompt_are_remembered() {
    let args = ["a fox", "-S", "4", "-g", "2.5", "-n", "blurry", "--sigmas", "1,0.6,0.2", "-s", "5"];
    round_trip(&Sandbox::with_model("klein-base"), &args, &["a.png"]);
}

#[test]
fn references_loras_and_dtypes_are_remembered() {
    let lora = testdata().join("tiny/lora/lora_diffusers.safetensors");
    let lora = format!("{}:-0.5", lora.display());
    let (a, b) = (golden("inputs/ref_a_80x70.png"), golden("inputs/ref_b_64x112.png"));
    let args =
        ["fox", "-S", "4", "-r", &a, "-r", &b, "--lora", &lora, "--dtype", "bf16", "--schedule", "power"];
    round_trip(&Sandbox::new(), &args, &["a.png"]);
}

#[test]
fn the_recipes_model_takes_precedence_over_the_environment() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["fox", "-S", "4", "-o", "a.png"]).ok();
    let again = |args: &[&str]| {
        let mut command =
            sandbox.command(&[&["generate", "--from", "a.png", "-o", "again.png"], args].concat());
        command.env("KILN_MODEL", "no/such/model").output().unwrap()
    };
    let ran = again(&[]);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert!(fs::read(sandbox.path("a.png")).unwrap() == fs::read(sandbox.path("again.png")).unwrap());
    assert!(!again(&["-m", "none/either"]).status.success(), "an option takes precedence over the recipe");
    // Without a recipe the variable applies.
    let ran = sandbox.command(&["generate", "fox"]).env("KILN_MODEL", "no/such/model").output().unwrap();
    assert!(String::from_utf8_lossy(&ran.stderr).contains("no/such/model"));
}

#[test]
fn a_partial_lora_is_remembered() {
    let sandbox = Sandbox::new();
    let source = kiln_weights::WeightSource::open(testdata().join("tiny/lora/lora_bfl.safetensors")).unwrap();
    let mut tensors: Vec<_> = source.names().map(|name| (name, source.tensor(name).unwrap())).collect();
    tensors.push(("text_encoder.q_proj.lora_A.weight", kiln_tensor::HostTensor::zeros([1, 1])));
    kiln_weights::save::save(sandbox.path("ink.safetensors"), &tensors, &Default::default()).unwrap();
    let args = ["fox", "-S", "4", "--lora", "ink.safetensors:0.5"];
    sandbox.generate(&args).fails(1, &["text encoder", "hint: --lora-partial"]);
    let ran = sandbox.generate(&[&args[..], &["--lora-partial", "-o", "b.png"]].concat()).ok();
    assert!(ran.err.contains("modules, rank 4, weight 0.5; left out: `text_encoder"), "{}", ran.err);
    round_trip(&sandbox, &[&args[..], &["--lora-partial"]].concat(), &["a.png"]);
}

#[test]
fn the_rule_for_doras_is_remembered() {
    let sandbox = Sandbox::new();
    let lora = testdata().join("tiny/lora/lora_diffusers.safetensors");
    let lora = format!("{}:0.5", lora.display());
    round_trip(&sandbox, &["fox", "-S", "4", "--lora", &lora, "--dora-rule", "diffusers"], &["a.png"]);
    assert!(sandbox.kiln(&["info", "a.png"]).ok().text().contains("diffusers"));
    sandbox.generate(&["fox", "--dora-rule", "a1111"]).fails(2, &["comfyui", "diffusers"]);
}

#[test]
fn a_number_that_is_not_finite_does_not_leave_the_recipes_in_place() {
    let sandbox = Sandbox::with_model("klein-base");
    sandbox.generate(&["fox", "-S", "4", "-g", "2.5", "-o", "a.png"]).ok();
    for wrong in ["1e99", "nan"] {
        sandbox
            .kiln(&["generate", "--from", "a.png", "-g", wrong, "-o", "b.png"])
            .fails(2, &["`guidance` must be a finite number"]);
    }
    assert!(!sandbox.path("b.png").exists());
}

#[test]
fn another_autoencoder_is_remembered() {
    let other = Sandbox::with_model("klein-small-decoder");
    let vae = other.model().join("vae").display().to_string();
    round_trip(&Sandbox::new(), &["fox", "-S", "4", "--vae", &vae], &["a.png"]);
}

#[test]
fn inpainting_is_remembered() {
    let (init, mask) = (golden("inputs/inpaint_100x72.png"), golden("inputs/mask_small_100x72.png"));
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    let args = ["generate", "-m", model, "fox", "-s", "4", "-S", "1", "--init", &init, "--mask", &mask];
    sandbox.kiln(&[&args[..], &["--mask-padding", "8", "--strength", "0.7", "-o", "a.png"]].concat()).ok();
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "again.png"]).ok();
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("again.png")).unwrap());
}

#[test]
fn an_initial_image_is_remembered_with_its_size() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    sandbox.write("house.png", &png(&pattern(100, 70)));
    let args = ["generate", "-m", model, "fox", "-s", "2", "-S", "1", "--init", "house.png", "-o", "a.png"];
    sandbox.kiln(&args).ok();
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "again.png"]).ok();
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("again.png")).unwrap());
    assert_eq!(sandbox.image("a.png").width(), 96);
}

#[test]
fn noise_and_embeddings_are_remembered_with_their_batch_position() {
    let sandbox = Sandbox::with_model("dev");
    let noise =
        kiln_tensor::HostTensor::from_f32([2, 128, 3, 3], kiln_tensor::rng::Generator::cpu(1).randn(2304));
    let dim = kiln_engine::Model::open(sandbox.model()).unwrap().transformer.config.joint_attention_dim;
    let texts = kiln_tensor::rng::Generator::cpu(2).randn(2 * 8 * dim);
    let texts = kiln_tensor::HostTensor::from_f32([2, 8, dim], texts).unwrap();
    let save = |name: &str, key, tensor| {
        kiln_weights::save::save(sandbox.path(name), &[(key, tensor)], &Default::default()).unwrap();
    };
    save("n.safetensors", "latents", noise.unwrap());
    save("e.safetensors", "prompt_embeds", texts);
    let args = ["--embeds", "e.safetensors", "--noise", "n.safetensors", "-W", "48", "-H", "48"];
    round_trip(&sandbox, &args, &["a-1.png", "a-2.png"]);
}

#[test]
fn options_override_the_recipe() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["a fox", "-S", "4", "-o", "a.png"]).ok();
    sandbox.kiln(&["generate", "--from", "a.png", "-S", "5", "-W", "96", "-o", "b.png"]).ok();
    sandbox.generate(&["a fox", "-S", "5", "-W", "96", "-o", "c.png"]).ok();
    assert_eq!(fs::read(sandbox.path("b.png")).unwrap(), fs::read(sandbox.path("c.png")).unwrap());
}

#[test]
fn a_prompt_of_one_dash_is_not_read_from_standard_input_again() {
    let sandbox = Sandbox::new();
    sandbox.generate_with_input(&["-", "-S", "1", "-o", "a.png"], b"-\n").ok();
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("b.png")).unwrap());
}

#[test]
fn changed_files_are_a_warning_and_missing_ones_an_error() {
    let sandbox = Sandbox::new();
    sandbox.write("r.png", &png(&pattern(64, 64)));
    sandbox.generate(&["a fox", "-S", "4", "-r", "r.png", "-o", "a.png"]).ok();
    sandbox.write("r.png", &png(&pattern(80, 64)));
    let ran = sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert!(ran.err.contains("warning: `") && ran.err.contains("r.png` has changed"), "{}", ran.err);
    fs::remove_file(sandbox.path("r.png")).unwrap();
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "c.png"]).fails(1, &["r.png", "reference image"]);
    assert_eq!(sandbox.names(), ["a.png", "b.png"]);
}

#[test]
fn another_model_is_a_warning() {
    let sandbox = Sandbox::new();
    let other = Sandbox::with_model("klein-small-decoder");
    sandbox.generate(&["a fox", "-S", "4", "-o", "a.png"]).ok();
    let model = other.model().to_str().unwrap();
    let ran = sandbox.kiln(&["generate", "--from", "a.png", "-m", model, "-o", "b.png"]).ok();
    assert!(ran.err.contains("warning: the vae of"), "{}", ran.err);
    assert!(!ran.err.contains("warning: the transformer"), "{}", ran.err);
}

#[test]
fn an_image_without_a_recipe_is_an_error() {
    let sandbox = Sandbox::new();
    sandbox.write("plain.png", &png(&pattern(64, 64)));
    sandbox.kiln(&["generate", "--from", "plain.png"]).fails(1, &["no recipe in `plain.png`", "hint: "]);
    let odd = kiln_image::encode(&pattern(64, 64), kiln_image::Format::Png, Some("{\"seed\":1}")).unwrap();
    sandbox.write("odd.png", &odd);
    sandbox.kiln(&["generate", "--from", "odd.png"]).fails(1, &["invalid recipe", "odd.png"]);
    sandbox.kiln(&["generate", "--from", "none.png"]).fails(1, &["none.png"]);
}

#[test]
fn paths_in_a_recipe_are_relative_to_the_image_unless_asked_for() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("in")).unwrap();
    sandbox.write("in/r.png", &png(&pattern(64, 64)));
    let args = ["a fox", "-S", "4", "-s", "1", "-r", "in/r.png", "-o", "out/a.png"];
    fs::create_dir(sandbox.path("out")).unwrap();
    sandbox.generate(&args).ok();
    let recipe = |name: &str| sandbox.kiln(&["info", "--json", name]).ok().text().to_owned();
    let folder = sandbox.path("in").display().to_string();
    assert!(recipe("out/a.png").contains("../in/r.png"), "{}", recipe("out/a.png"));
    assert!(
        !recipe("out/a.png").contains(&folder)
            && !recipe("out/a.png").contains(sandbox.model().to_str().unwrap())
    );
    let again = |from: &str| {
        let ran = sandbox.kiln(&["generate", "--from", from, "-o", "out/again.png"]).ok();
        assert!(!ran.err.contains("warning"), "{}", ran.err);
        assert_eq!(
            fs::read(sandbox.path("out/again.png")).unwrap(),
            fs::read(sandbox.path("out/a.png")).unwrap()
        );
    };
    again("out/a.png");
    again(sandbox.path("out/a.png").to_str().unwrap());
    sandbox.generate(&[&args[..], &["--absolute-paths"]].concat()).ok();
    // As JSON has it.
    assert!(recipe("out/a.png").contains(&folder.replace('\\', r"\\")));
    fs::rename(sandbox.path("out/a.png"), sandbox.path("a.png")).unwrap();
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(sandbox.image("a.png"), sandbox.image("b.png"));
}
