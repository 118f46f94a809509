//! `kiln upscale`: with Ember the result is the image, only larger and without seams.

use std::fs;

use kiln_image::{Filter, RgbImage, TileGrid};

use crate::sandbox::{Sandbox, pattern, png};

/// Soft shapes: a disc on a gradient, as smooth as a photograph out of focus.
fn soft(side: u32) -> RgbImage {
    let pixel = |i: u32| {
        let (x, y) = (f64::from(i % side) / f64::from(side), f64::from(i / side) / f64::from(side));
        let distance = (x - 0.45).hypot(y - 0.55);
        let disc = 1.0 / (1.0 + ((distance - 0.28) * 40.0).exp());
        let mix = |ground: f64, object: f64| (ground * (1.0 - disc) + object * disc) as u8;
        [mix(60.0 + 80.0 * x, 210.0), mix(90.0 + 60.0 * y, 60.0), mix(170.0, 50.0 + 60.0 * y)]
    };
    RgbImage::new(side, side, (0..side * side).flat_map(pixel).collect()).unwrap()
}

fn mean_difference(a: &RgbImage, b: &RgbImage) -> f64 {
    let sum: u64 = a.pixels().iter().zip(b.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
    sum as f64 / a.pixels().len() as f64
}

/// The mean step from column `x - 1` to `x` of what an image adds to another.
fn step(image: &RgbImage, source: &RgbImage, x: u32) -> f64 {
    let added = |x: u32, y: u32, c: usize| {
        let at = 3 * x as usize + c;
        f64::from(image.row(y)[at]) - f64::from(source.row(y)[at])
    };
    let steps =
        (0..image.height()).flat_map(|y| (0..3).map(move |c| (added(x, y, c) - added(x - 1, y, c)).abs()));
    steps.sum::<f64>() / f64::from(3 * image.height())
}

#[cfg(feature = "ember")]
#[test]
fn the_result_is_the_image_enlarged_and_has_no_seams() {
    let sandbox = Sandbox::new();
    let source = soft(128);
    sandbox.write("disc.png", &png(&source));
    let args = ["upscale", "disc.png", "-p", "a red ball", "-S", "1", "--tile-size", "160", "-m", "ember"];
    sandbox.kiln(&[&args[..], &["--strength", "0.1", "-q"]].concat()).ok();
    let (result, enlarged) =
        (sandbox.image("disc-2x.png"), kiln_image::resize(&source, 256, 256, Filter::Bicubic));
    let difference = mean_difference(&result, &enlarged);
    assert!(difference < 4.0, "{difference:.2} levels from the enlarged image");

    let tiles = TileGrid::new([256, 256], 160, 64, 16);
    assert_eq!(tiles.count(), 4);
    let tile = tiles.tiles().nth(1).unwrap();
    let seam = tile.left..tile.left + tile.overlap_left;
    let at_seam = seam.clone().map(|x| step(&result, &enlarged, x)).fold(0.0, f64::max);
    let inside = (1..256).filter(|x| !seam.contains(x)).map(|x| step(&result, &enlarged, x));
    let largest = inside.fold(0.0, f64::max);
    assert!(at_seam <= largest, "{at_seam:.3} at the seam, {largest:.3} inside");

    // The same again, from its recipe.
    sandbox.kiln(&["generate", "--from", "disc-2x.png", "-o", "again.png", "-q"]).ok();
    assert_eq!(sandbox.image("again.png"), result);
}

/// As `kiln upscale` with the sandbox's model, which is random: its images are noise, but quick.
fn upscale(sandbox: &Sandbox, args: &[&str]) -> crate::sandbox::RunOutput {
    let model = sandbox.model().to_str().unwrap().to_owned();
    let quick = ["upscale", "-m", &model, "--tile-size", "64", "-s", "1"];
    sandbox.kiln(&[&quick, args].concat())
}

#[test]
fn the_result_has_the_size_the_name_and_the_events() {
    let sandbox = Sandbox::new();
    sandbox.write("a.png", &png(&pattern(40, 33)));
    let ran = upscale(&sandbox, &["a.png", "--json", "-S", "2"]).ok();
    let image = sandbox.image("a-2x.png");
    assert_eq!((image.width(), image.height()), (80, 66));
    let tiles: Vec<_> = ran.events().into_iter().filter(|event| event["event"] == "tile").collect();
    assert_eq!(
        (tiles.len() as u64, tiles[0]["tile"].as_u64()),
        (tiles[0]["tiles"].as_u64().unwrap(), Some(1))
    );
    // A second run overwrites nothing, and says what it does.
    let ran = upscale(&sandbox, &["a.png", "--scale", "4"]).ok();
    assert!(ran.err.contains("upscaling to 160x132 in ") && ran.err.contains("tile 1/"), "{}", ran.err);
    upscale(&sandbox, &["a.png", "-q"]).ok();
    assert_eq!(sandbox.names(), ["a-2x-2.png", "a-2x.png", "a-4x.png", "a.png"]);
}

#[test]
fn prompt_and_model_come_from_the_recipe() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["a red fox", "-s", "1", "-q", "-o", "fox.png"]).ok();
    let args = ["upscale", "fox.png", "--tile-size", "64", "-s", "1", "-q", "-o", "large.png"];
    sandbox.kiln(&args).ok();
    let info = sandbox.kiln(&["info", "large.png", "--json"]).ok();
    let recipe: serde_json::Value = serde_json::from_str(info.text()).unwrap();
    let text = recipe.to_string();
    assert!(text.contains("a red fox") && text.contains("\"upscale\":2"), "{text}");
    assert_eq!(sandbox.image("large.png").width(), 128);
}

#[test]
fn what_cannot_be_upscaled_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("a.png", &png(&pattern(40, 33)));
    upscale(&sandbox, &["a.png", "--scale", "3"]).fails(2, &["2, 4"]);
    upscale(&sandbox, &["a.png", "--strength", "0"]).fails(2, &["strength must be above 0"]);
    upscale(&sandbox, &["none.png"]).fails(1, &["none.png", "image to upscale"]);
    sandbox.generate(&["fox", "--upscale", "2"]).fails(2, &["--upscale needs --init"]);
    fs::remove_file(sandbox.path("a.png")).unwrap();
    assert!(sandbox.names().is_empty());
}
