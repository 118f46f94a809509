//! The built-in model: it is found, and its images show what the prompt says.

use std::fs;

use kiln_image::RgbImage;

use crate::colours::{background, hue_of, object, red, shrink, unchanged_share};
use crate::sandbox::{Sandbox, max_difference};

/// `kiln generate` without a model, quietly.
fn generate(sandbox: &Sandbox, args: &[&str]) {
    sandbox.kiln(&[&["generate", "-q"], args].concat()).ok();
}

/// Thumbnails of forty objects on white, with their names, from `tools/ember/thumbnails.py`.
fn thumbnails() -> Vec<(&'static str, RgbImage)> {
    let sheet = kiln_image::from_bytes("emoji.webp", include_bytes!("../data/emoji.webp")).unwrap();
    let side = sheet.width() / 8;
    let names = include_str!("../data/emoji.txt").lines().enumerate();
    names
        .map(|(i, name)| {
            let (x0, y0) = (i as u32 % 8 * side, i as u32 / 8 * side);
            let pixel = |i: u32| {
                let at = 3 * ((y0 + i / side) * sheet.width() + x0 + i % side) as usize;
                sheet.pixels()[at..at + 3].to_vec()
            };
            (name, RgbImage::new(side, side, (0..side * side).flat_map(pixel).collect()).unwrap())
        })
        .collect()
}

/// The name of the thumbnail most similar to `image`.
fn nearest(image: &RgbImage, thumbnails: &[(&'static str, RgbImage)]) -> &'static str {
    let small = shrink(image, thumbnails[0].1.width());
    let distance = |other: &RgbImage| -> u64 {
        small.pixels().iter().zip(other.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2)).sum()
    };
    thumbnails.iter().min_by_key(|(_, thumbnail)| distance(thumbnail)).unwrap().0
}

#[test]
fn the_first_command_generates_a_red_apple_on_blue_and_names_its_model() {
    let sandbox = Sandbox::new();
    let ran = sandbox.kiln(&["generate", "a red apple on a blue background", "-S", "1", "-o", "a.png"]).ok();
    assert_eq!(ran.err.lines().filter(|line| line.contains("Ember")).count(), 1, "{}", ran.err);
    let apple = sandbox.image("a.png");
    assert_eq!((apple.width(), apple.height()), (256, 256));
    let ground = background(&apple);
    assert!((190.0..260.0).contains(&hue_of(ground).unwrap()), "the background is {ground:?}");
    let object = object(&apple);
    let share = object.iter().filter(|pixel| red(**pixel)).count() as f64 / object.len() as f64;
    let size = object.len() as f64 / (256.0 * 256.0);
    assert!((0.05..0.8).contains(&size), "the object covers {size:.2} of the image");
    assert!(share > 0.6, "{share:.2} of the object is red");
}

#[test]
fn images_are_most_similar_to_the_object_of_their_prompt() {
    let sandbox = Sandbox::new();
    let asked = ["red apple", "rocket", "cat face", "sunflower"];
    let prompts = asked.map(|name| format!("a 3d {name} on a white background"));
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    generate(&sandbox, &[&prompts[..], &["-S", "5", "-o", "p.png"]].concat());
    let thumbnails = thumbnails();
    let seen = [1, 2, 3, 4].map(|i| nearest(&sandbox.image(&format!("p-{i}.png")), &thumbnails));
    assert_eq!(seen, asked);
}

/// Pairs of colour and object that are in no training image.
#[test]
fn colours_generalize_to_unseen_objects() {
    let sandbox = Sandbox::new();
    let pairs =
        [("purple apple", 270.0), ("blue banana", 217.0), ("pink car", 325.0), ("green rocket", 128.0)];
    let prompts = pairs.map(|(thing, _)| format!("a 3d {thing} on a white background"));
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    generate(&sandbox, &[&prompts[..], &["-S", "100", "-o", "p.png"]].concat());
    let found: Vec<(&str, Option<f64>)> = (1..)
        .zip(pairs)
        .map(|(i, (thing, _))| (thing, crate::colours::dominant_hue(&sandbox.image(&format!("p-{i}.png")))))
        .collect();
    let near = |wanted: f64, hue: f64| ((hue - wanted + 180.0).rem_euclid(360.0) - 180.0).abs() <= 30.0;
    let right =
        found.iter().zip(pairs).filter(|((_, hue), (_, wanted))| hue.is_some_and(|h| near(*wanted, h)));
    assert!(right.count() >= 3, "{found:?}");
}

#[test]
fn an_edit_changes_the_background_and_keeps_the_object() {
    let sandbox = Sandbox::new();
    generate(&sandbox, &["a 3d red apple on a white background", "-S", "5", "-o", "apple.png"]);
    generate(&sandbox, &["make the background green", "-r", "apple.png", "-S", "1", "-o", "green.png"]);
    let (before, after) = (sandbox.image("apple.png"), sandbox.image("green.png"));
    assert_eq!((after.width(), after.height()), (256, 256));
    let ground = background(&after);
    assert!((80.0..170.0).contains(&hue_of(ground).unwrap()), "the background is {ground:?}");
    let unchanged = unchanged_share(&before, &after);
    assert!(unchanged > 0.8, "{unchanged:.2} of the object is unchanged");
}

#[test]
fn a_large_reference_is_scaled_to_the_models_size() {
    let sandbox = Sandbox::new();
    let photo = kiln_image::RgbImage::black(1600, 800);
    fs::write(sandbox.path("photo.png"), kiln_image::encode(&photo, kiln_image::Format::Png, None).unwrap())
        .unwrap();
    generate(&sandbox, &["make it blue", "-r", "photo.png", "-S", "1", "-s", "1", "-o", "blue.png"]);
    let image = sandbox.image("blue.png");
    assert_eq!((image.width(), image.height()), (352, 176));
}

#[test]
fn a_seed_gives_the_same_bytes_with_any_number_of_threads() {
    let sandbox = Sandbox::new();
    let small = |seed: &str, threads: &str, name: &str| {
        let size = ["-W", "128", "-H", "128", "--threads", threads];
        // A recipe holds the number of threads.
        generate(&sandbox, &[&["a cat", "-S", seed, "-o", name, "--no-recipe"], &size[..]].concat());
        fs::read(sandbox.path(name)).unwrap()
    };
    assert!(small("7", "1", "a.png") == small("7", "2", "b.png"), "the files differ");
    small("8", "2", "c.png");
    assert!(max_difference(&sandbox.image("a.png"), &sandbox.image("c.png")) > 30);
}

#[test]
fn a_recipe_names_the_built_in_model() {
    let sandbox = Sandbox::new();
    generate(&sandbox, &["a cat", "-W", "128", "-H", "128", "-s", "1", "-S", "7", "-o", "a.png"]);
    // A folder of that name must not take precedence.
    fs::create_dir(sandbox.path("ember")).unwrap();
    let ran = sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert!(!ran.err.contains("warning") && !ran.err.contains("no model given"), "{}", ran.err);
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("b.png")).unwrap());
    let recipe: serde_json::Value =
        serde_json::from_str(sandbox.kiln(&["info", "--json", "a.png"]).ok().text()).unwrap();
    assert_eq!(recipe["recipe"]["model"]["path"], "ember");
}

#[test]
fn every_size_but_the_default_gets_a_note() {
    let sandbox = Sandbox::new();
    let ran = |width: &str, height: &str| {
        let args = ["generate", "a cat", "-m", "ember", "-W", width, "-H", height, "-s", "1", "-o", "a.png"];
        sandbox.kiln(&args).ok().err
    };
    let outside = ran("64", "128");
    assert!(
        outside.contains(
            "note: this model was trained on sides from 128 to 512 and is best at 256x256; 64x128 may"
        ),
        "{outside}"
    );
    let weak = ran("128", "192");
    assert!(weak.contains("note: this model is best at 256x256; at 128x192 it is less exact"), "{weak}");
    let best = ran("256", "256");
    assert!(!best.contains("note: "), "{best}");
}

#[test]
fn words_that_ember_has_not_learned_are_named_on_one_line() {
    let sandbox = Sandbox::new();
    let small = ["-S", "1", "-s", "1", "-o", "a.png"];
    let ran = |args: &[&str]| sandbox.kiln(&[&["generate"], args, &small].concat()).ok();
    let noted = ran(&["an astronaut riding a horse", "-m", "ember"]).err;
    let lines: Vec<&str> = noted.lines().filter(|line| line.contains("not learned")).collect();
    assert_eq!(lines.len(), 1, "{noted}");
    assert!(
        lines[0].starts_with("note: Ember has not learned \"riding\"; it draws emoji (a cat, "),
        "{noted}"
    );
    for kind in ["colours (red, ", "styles (3d, flat, ", "backgrounds (on a blue background, "] {
        assert!(lines[0].contains(kind), "`{kind}` is missing in {noted}");
    }
    let events = ran(&["an astronaut riding a horse", "--json"]);
    let note = events.text().lines().find(|line| line.contains("not learned")).unwrap();
    let note: serde_json::Value = serde_json::from_str(note).unwrap();
    assert_eq!(note["event"], "note", "{note}");
    for known in ["a cute penguin in the snow", "Three cats and the king's crowns"] {
        let quiet = ran(&[known]).err;
        assert!(!quiet.contains("not learned"), "{quiet}");
    }
    // Another model has no such list.
    assert!(
        !sandbox.generate(&["an astronaut riding a horse", "-o", "b.png"]).ok().err.contains("not learned")
    );
}

#[test]
fn info_describes_the_built_in_model() {
    let sandbox = Sandbox::new();
    let ran = sandbox.kiln(&["info", "ember"]).ok();
    for line in [
        "kind           built-in model",
        "variant        klein (distilled)",
        "default size   256x256",
        "trained sides  128 to 512",
        "default steps  4",
        "hidden size      128",
        "styles       3d, flat, pixel art, silhouette",
    ] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let info: serde_json::Value =
        serde_json::from_str(sandbox.kiln(&["info", "--json", "ember"]).ok().text()).unwrap();
    assert!(info["card"].as_str().unwrap().contains("Fluent"), "{info}");
    let parameters = |component: &str| info[component]["parameters"].as_u64().unwrap();
    let all = parameters("transformer") + parameters("text_encoder") + parameters("vae");
    assert!((20_000_000..30_000_000).contains(&all), "{all}");
}

#[test]
fn an_autoencoder_of_another_model_is_refused() {
    let sandbox = Sandbox::new();
    let vae = sandbox.model().join("vae").display().to_string();
    let args = ["generate", "a cat", "-m", "ember", "-W", "128", "-H", "128", "-s", "1", "-o", "a.png"];
    sandbox
        .kiln(&[&args[..], &["--vae", &vae]].concat())
        .fails(1, &[&vae, "latents of its own", "leave out --vae"]);
    assert!(sandbox.names().is_empty());
    // Its own fits.
    sandbox.kiln(&["convert", "ember", "ae.safetensors", "--part", "vae", "--dtype", "bf16", "-q"]).ok();
    sandbox.kiln(&[&args[..], &["--vae", "ae.safetensors"]].concat()).ok();
}

#[test]
fn a_reference_of_eight_to_one_is_accepted() {
    let sandbox = Sandbox::new();
    let strip = kiln_image::RgbImage::black(2008, 251);
    sandbox.write("strip.png", &kiln_image::encode(&strip, kiln_image::Format::Png, None).unwrap());
    generate(
        &sandbox,
        &["make it blue", "-r", "strip.png", "-W", "128", "-H", "128", "-s", "1", "-o", "a.png"],
    );
}

#[test]
fn a_benchmark_counts_the_models_own_tokens_and_bytes() {
    let sandbox = Sandbox::new();
    let args = ["bench", "-m", "ember", "--json", "--size", "64x64", "--repeat", "1", "--phase", "text"];
    let report: serde_json::Value = serde_json::from_str(sandbox.kiln(&args).ok().text()).unwrap();
    assert_eq!(report["text_tokens"], 64);
    assert!(report["load"][0]["weight_bytes"].as_u64().unwrap() > 100_000, "{report}");
}

#[test]
fn ember_base_is_put_together_from_its_difference() {
    let sandbox = Sandbox::new();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/ember/ember-base.safetensors");
    let ran = sandbox.kiln(&["info", file]).ok();
    for line in ["klein base", "default steps     24", "default guidance  2.5", "int8 layers    28"] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let mut bytes = fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    sandbox.write("ember-base.safetensors", &bytes);
    let generate = ["generate", "a cat", "-m", "ember-base.safetensors", "-o", "a.png"];
    sandbox.kiln(&generate).fails(1, &["ember-base.safetensors", "damaged", "same version"]);
}
