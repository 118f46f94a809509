//! `--from`: the same picture again.

use std::fs;

use kiln_golden::in_tree;

use crate::kit::{Kit, golden, pattern, png};

/// Makes a picture, makes it again from itself, and expects the very same file.
#[track_caller]
fn round_trip(kit: &Kit, args: &[&str], pictures: &[&str]) {
    kit.generate(&[args, &["-o", "a.png"]].concat()).ok();
    for name in pictures {
        let ran = kit.kiln(&["generate", "--from", name, "-o", "again.png"]).ok();
        assert!(!ran.err.contains("warning"), "{}", ran.err);
        let (first, again) = (fs::read(kit.path(name)).unwrap(), fs::read(kit.path("again.png")).unwrap());
        assert!(first == again, "{name} is not the same again");
    }
}

#[test]
fn a_picture_is_made_again_to_the_byte() {
    round_trip(&Kit::new(), &["a \"red\" fox", "-S", "18446744073709551615"], &["a.png"]);
}

#[test]
fn one_picture_of_a_batch_is_made_again_alone() {
    for rng in ["cpu", "cpu-bf16"] {
        let args = ["a fox", "a hen", "-b", "2", "-S", "4", "--rng", rng];
        round_trip(&Kit::new(), &args, &["a-1.png", "a-3.png", "a-4.png"]);
    }
}

#[test]
fn pictures_of_a_list_of_seeds_are_made_again() {
    for rng in ["cuda", "cpu-f16"] {
        round_trip(&Kit::new(), &["a fox", "-S", "4,5", "--rng", rng], &["a-1.png", "a-2.png"]);
    }
}

#[test]
fn guidance_and_the_negative_prompt_are_remembered() {
    let args = ["a fox", "-S", "4", "-g", "2.5", "-n", "blurry", "--sigmas", "1,0.6,0.2", "-s", "5"];
    round_trip(&Kit::with_model("klein-base"), &args, &["a.png"]);
}

#[test]
fn references_loras_and_types_are_remembered() {
    let lora = in_tree().join("tiny/lora/lora_diffusers.safetensors");
    let lora = format!("{}:-0.5", lora.display());
    let (a, b) = (golden("inputs/ref_a_80x70.png"), golden("inputs/ref_b_64x112.png"));
    let args =
        ["fox", "-S", "4", "-r", &a, "-r", &b, "--lora", &lora, "--dtype", "bf16", "--schedule", "power"];
    round_trip(&Kit::new(), &args, &["a.png"]);
}

#[test]
fn the_model_of_a_recipe_comes_before_the_one_of_the_environment() {
    let kit = Kit::new();
    kit.generate(&["fox", "-S", "4", "-o", "a.png"]).ok();
    let again = |args: &[&str]| {
        let mut command = kit.command(&[&["generate", "--from", "a.png", "-o", "again.png"], args].concat());
        command.env("KILN_MODEL", "no/such/model").output().unwrap()
    };
    let ran = again(&[]);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert!(fs::read(kit.path("a.png")).unwrap() == fs::read(kit.path("again.png")).unwrap());
    assert!(!again(&["-m", "none/either"]).status.success(), "an option comes before the recipe");
    // Without a recipe the variable counts.
    let ran = kit.command(&["generate", "fox"]).env("KILN_MODEL", "no/such/model").output().unwrap();
    assert!(String::from_utf8_lossy(&ran.stderr).contains("no/such/model"));
}

#[test]
fn what_was_left_out_of_a_lora_is_remembered() {
    let kit = Kit::new();
    let source = kiln_weights::WeightSource::open(in_tree().join("tiny/lora/lora_bfl.safetensors")).unwrap();
    let mut tensors: Vec<_> = source.names().map(|name| (name, source.tensor(name).unwrap())).collect();
    tensors.push(("text_encoder.q_proj.lora_A.weight", kiln_tensor::HostTensor::zeros([1, 1])));
    kiln_weights::save::save(kit.path("ink.safetensors"), &tensors, &Default::default()).unwrap();
    let args = ["fox", "-S", "4", "--lora", "ink.safetensors:0.5"];
    kit.generate(&args).refused(1, &["text encoder", "hint: --lora-partial"]);
    let ran = kit.generate(&[&args[..], &["--lora-partial", "-o", "b.png"]].concat()).ok();
    assert!(ran.err.contains("modules, rank 4, weight 0.5; left out: `text_encoder"), "{}", ran.err);
    round_trip(&kit, &[&args[..], &["--lora-partial"]].concat(), &["a.png"]);
}

#[test]
fn another_autoencoder_is_remembered() {
    let other = Kit::with_model("klein-small-decoder");
    let vae = other.model().join("vae").display().to_string();
    round_trip(&Kit::new(), &["fox", "-S", "4", "--vae", &vae], &["a.png"]);
}

#[test]
fn inpainting_is_remembered() {
    let (init, mask) = (golden("inputs/inpaint_100x72.png"), golden("inputs/mask_small_100x72.png"));
    let kit = Kit::new();
    let model = kit.model().to_str().unwrap();
    let args = ["generate", "-m", model, "fox", "-s", "4", "-S", "1", "--init", &init, "--mask", &mask];
    kit.kiln(&[&args[..], &["--mask-padding", "8", "--strength", "0.7", "-o", "a.png"]].concat()).ok();
    kit.kiln(&["generate", "--from", "a.png", "-o", "again.png"]).ok();
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), fs::read(kit.path("again.png")).unwrap());
}

#[test]
fn a_picture_to_start_from_is_remembered_with_its_size() {
    let kit = Kit::new();
    let model = kit.model().to_str().unwrap();
    kit.write("house.png", &png(&pattern(100, 70)));
    let args = ["generate", "-m", model, "fox", "-s", "2", "-S", "1", "--init", "house.png", "-o", "a.png"];
    kit.kiln(&args).ok();
    kit.kiln(&["generate", "--from", "a.png", "-o", "again.png"]).ok();
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), fs::read(kit.path("again.png")).unwrap());
    assert_eq!(kit.picture("a.png").width(), 96);
}

#[test]
fn given_noise_and_embeddings_are_remembered_with_their_place() {
    let kit = Kit::with_model("dev");
    let noise =
        kiln_tensor::HostTensor::from_f32([2, 128, 3, 3], kiln_tensor::rng::Generator::cpu(1).randn(2304));
    let dim = kiln_engine::Model::open(kit.model()).unwrap().transformer.config.joint_attention_dim;
    let texts = kiln_tensor::rng::Generator::cpu(2).randn(2 * 8 * dim);
    let texts = kiln_tensor::HostTensor::from_f32([2, 8, dim], texts).unwrap();
    let save = |name: &str, key, tensor| {
        kiln_weights::save::save(kit.path(name), &[(key, tensor)], &Default::default()).unwrap();
    };
    save("n.safetensors", "latents", noise.unwrap());
    save("e.safetensors", "prompt_embeds", texts);
    let args = ["--embeds", "e.safetensors", "--noise", "n.safetensors", "-W", "48", "-H", "48"];
    round_trip(&kit, &args, &["a-1.png", "a-2.png"]);
}

#[test]
fn options_beside_a_recipe_change_what_they_name() {
    let kit = Kit::new();
    kit.generate(&["a fox", "-S", "4", "-o", "a.png"]).ok();
    kit.kiln(&["generate", "--from", "a.png", "-S", "5", "-W", "96", "-o", "b.png"]).ok();
    kit.generate(&["a fox", "-S", "5", "-W", "96", "-o", "c.png"]).ok();
    assert_eq!(fs::read(kit.path("b.png")).unwrap(), fs::read(kit.path("c.png")).unwrap());
}

#[test]
fn a_prompt_of_one_dash_is_not_asked_for_again() {
    let kit = Kit::new();
    kit.generate_with_input(&["-", "-S", "1", "-o", "a.png"], b"-\n").ok();
    kit.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), fs::read(kit.path("b.png")).unwrap());
}

#[test]
fn changed_files_are_warned_of_and_missing_ones_refused() {
    let kit = Kit::new();
    kit.write("r.png", &png(&pattern(64, 64)));
    kit.generate(&["a fox", "-S", "4", "-r", "r.png", "-o", "a.png"]).ok();
    kit.write("r.png", &png(&pattern(80, 64)));
    let ran = kit.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert!(ran.err.contains("warning: `") && ran.err.contains("r.png` has changed"), "{}", ran.err);
    fs::remove_file(kit.path("r.png")).unwrap();
    kit.kiln(&["generate", "--from", "a.png", "-o", "c.png"]).refused(1, &["r.png", "reference image"]);
    assert_eq!(kit.names(), ["a.png", "b.png"]);
}

#[test]
fn another_model_is_warned_of() {
    let kit = Kit::new();
    let other = Kit::with_model("klein-small-decoder");
    kit.generate(&["a fox", "-S", "4", "-o", "a.png"]).ok();
    let model = other.model().to_str().unwrap();
    let ran = kit.kiln(&["generate", "--from", "a.png", "-m", model, "-o", "b.png"]).ok();
    assert!(ran.err.contains("warning: the vae of"), "{}", ran.err);
    assert!(!ran.err.contains("warning: the transformer"), "{}", ran.err);
}

#[test]
fn a_picture_without_a_recipe_is_refused() {
    let kit = Kit::new();
    kit.write("plain.png", &png(&pattern(64, 64)));
    kit.kiln(&["generate", "--from", "plain.png"]).refused(1, &["no recipe in `plain.png`", "hint: "]);
    let odd = kiln_image::encode(&pattern(64, 64), kiln_image::Format::Png, Some("{\"seed\":1}")).unwrap();
    kit.write("odd.png", &odd);
    kit.kiln(&["generate", "--from", "odd.png"]).refused(1, &["makes no sense", "odd.png"]);
    kit.kiln(&["generate", "--from", "none.png"]).refused(1, &["none.png"]);
}
