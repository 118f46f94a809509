//! The model inside the program: that it is found, and that its pictures show what was asked for.

use std::fs;

use kiln_image::Picture;

use crate::colours::{background, hue_of, object, red, same, shrink};
use crate::kit::{Kit, levels};

/// `kiln generate` without a model, quietly.
fn paint(kit: &Kit, args: &[&str]) {
    kit.kiln(&[&["generate", "-q"], args].concat()).ok();
}

/// Thumbnails of forty things on white, with their names; `tools/ember/thumbnails.py` made them.
fn thumbnails() -> Vec<(&'static str, Picture)> {
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
            (name, Picture::new(side, side, (0..side * side).flat_map(pixel).collect()).unwrap())
        })
        .collect()
}

/// The name of the thumbnail that `picture` is nearest to.
fn nearest(picture: &Picture, thumbnails: &[(&'static str, Picture)]) -> &'static str {
    let small = shrink(picture, thumbnails[0].1.width());
    let apart = |other: &Picture| -> u64 {
        small.pixels().iter().zip(other.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2)).sum()
    };
    thumbnails.iter().min_by_key(|(_, thumbnail)| apart(thumbnail)).unwrap().0
}

#[test]
fn the_first_command_paints_a_red_apple_on_blue_and_says_with_what() {
    let kit = Kit::new();
    let ran = kit.kiln(&["generate", "a red apple on a blue background", "-S", "1", "-o", "a.png"]).ok();
    assert_eq!(ran.err.lines().filter(|line| line.contains("Ember")).count(), 1, "{}", ran.err);
    let apple = kit.picture("a.png");
    assert_eq!((apple.width(), apple.height()), (256, 256));
    let ground = background(&apple);
    assert!((190.0..260.0).contains(&hue_of(ground).unwrap()), "the background is {ground:?}");
    let object = object(&apple);
    let share = object.iter().filter(|pixel| red(**pixel)).count() as f64 / object.len() as f64;
    let size = object.len() as f64 / (256.0 * 256.0);
    assert!((0.05..0.8).contains(&size), "the object covers {size:.2} of the picture");
    assert!(share > 0.6, "{share:.2} of the object is red");
}

#[test]
fn pictures_are_nearest_to_what_they_should_show() {
    let kit = Kit::new();
    let asked = ["red apple", "rocket", "cat face", "sunflower", "soccer ball", "house"];
    let prompts = asked.map(|name| format!("a 3d {name} on a white background"));
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    paint(&kit, &[&prompts[..], &["-S", "5", "-o", "p.png"]].concat());
    let thumbnails = thumbnails();
    let seen = [1, 2, 3, 4, 5, 6].map(|i| nearest(&kit.picture(&format!("p-{i}.png")), &thumbnails));
    assert_eq!(seen, asked);
}

/// Pairs of colour and thing that no training picture had.
#[test]
fn colours_reach_things_they_were_never_seen_on() {
    let kit = Kit::new();
    let pairs =
        [("purple apple", 270.0), ("blue banana", 217.0), ("pink car", 325.0), ("green rocket", 128.0)];
    let prompts = pairs.map(|(thing, _)| format!("a 3d {thing} on a white background"));
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    paint(&kit, &[&prompts[..], &["-S", "100", "-o", "p.png"]].concat());
    let found: Vec<(&str, Option<f64>)> = (1..)
        .zip(pairs)
        .map(|(i, (thing, _))| (thing, crate::colours::dominant_hue(&kit.picture(&format!("p-{i}.png")))))
        .collect();
    let near = |wanted: f64, hue: f64| ((hue - wanted + 180.0).rem_euclid(360.0) - 180.0).abs() <= 30.0;
    let right =
        found.iter().zip(pairs).filter(|((_, hue), (_, wanted))| hue.is_some_and(|h| near(*wanted, h)));
    assert!(right.count() >= 3, "{found:?}");
}

#[test]
fn an_edit_changes_the_background_and_keeps_the_object() {
    let kit = Kit::new();
    paint(&kit, &["a 3d red apple on a white background", "-S", "5", "-o", "apple.png"]);
    paint(&kit, &["make the background green", "-r", "apple.png", "-S", "1", "-o", "green.png"]);
    let (before, after) = (kit.picture("apple.png"), kit.picture("green.png"));
    assert_eq!((after.width(), after.height()), (256, 256));
    let ground = background(&after);
    assert!((80.0..170.0).contains(&hue_of(ground).unwrap()), "the background is {ground:?}");
    let kept = same(&before, &after);
    assert!(kept > 0.8, "{kept:.2} of the object is as it was");
}

#[test]
fn a_large_reference_is_brought_to_the_size_the_model_knows() {
    let kit = Kit::new();
    let photo = kiln_image::Picture::black(1600, 800);
    fs::write(kit.path("photo.png"), kiln_image::encode(&photo, kiln_image::Format::Png, None).unwrap())
        .unwrap();
    paint(&kit, &["make it blue", "-r", "photo.png", "-S", "1", "-s", "1", "-o", "blue.png"]);
    let picture = kit.picture("blue.png");
    assert_eq!((picture.width(), picture.height()), (352, 176));
}

#[test]
fn a_seed_stands_for_the_same_bytes_whatever_the_threads() {
    let kit = Kit::new();
    let small = |seed: &str, threads: &str, name: &str| {
        let size = ["-W", "128", "-H", "128", "--threads", threads];
        // A recipe names the threads.
        paint(&kit, &[&["a cat", "-S", seed, "-o", name, "--no-recipe"], &size[..]].concat());
        fs::read(kit.path(name)).unwrap()
    };
    assert!(small("7", "1", "a.png") == small("7", "2", "b.png"), "another file for the same seed");
    small("8", "2", "c.png");
    assert!(levels(&kit.picture("a.png"), &kit.picture("c.png")) > 30);
}

#[test]
fn recipes_name_the_model_and_bring_it_back() {
    let kit = Kit::new();
    paint(&kit, &["a cat", "-W", "128", "-H", "128", "-s", "1", "-S", "7", "-o", "a.png"]);
    // A folder of that name is not what the recipe means.
    fs::create_dir(kit.path("ember")).unwrap();
    let ran = kit.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert!(!ran.err.contains("warning") && !ran.err.contains("no model was named"), "{}", ran.err);
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), fs::read(kit.path("b.png")).unwrap());
    let recipe: serde_json::Value =
        serde_json::from_str(kit.kiln(&["info", "--json", "a.png"]).ok().text()).unwrap();
    assert_eq!(recipe["recipe"]["model"]["path"], "ember");
}

#[test]
fn sizes_it_was_not_trained_for_get_a_hint() {
    let kit = Kit::new();
    let ran = |side: &str| {
        kit.kiln(&["generate", "a cat", "-m", "ember", "-W", side, "-H", "128", "-s", "1", "-o", "a.png"])
            .ok()
            .err
    };
    assert!(ran("64").contains("note: this model knows sides from 128 to 512, and 64x128"), "{}", ran("64"));
    assert!(!ran("128").contains("note: "), "{}", ran("128"));
}

#[test]
fn info_describes_it() {
    let kit = Kit::new();
    let ran = kit.kiln(&["info", "ember"]).ok();
    for line in [
        "kind           model inside the program",
        "variant        klein (distilled)",
        "default_size   256x256",
        "trained_sides  128 to 512",
        "default_steps  4",
        "hidden_size      128",
    ] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let info: serde_json::Value =
        serde_json::from_str(kit.kiln(&["info", "--json", "ember"]).ok().text()).unwrap();
    assert!(info["card"].as_str().unwrap().contains("Fluent"), "{info}");
    let parameters = |part: &str| info[part]["parameters"].as_u64().unwrap();
    let all = parameters("transformer") + parameters("text_encoder") + parameters("vae");
    assert!((20_000_000..30_000_000).contains(&all), "{all}");
}
