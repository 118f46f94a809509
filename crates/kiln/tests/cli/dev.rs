//! dev from words through the command line: equal to diffusers, and everything that klein can do.

use kiln_golden::testdata;
use serde_json::Value;

use crate::sandbox::{Sandbox, max_difference};

fn reference(name: &str) -> String {
    testdata().join("dev/reference").join(name).display().to_string()
}

fn info(sandbox: &Sandbox) -> Value {
    let ran = sandbox.kiln(&["info", "--json", sandbox.model().to_str().unwrap()]).ok();
    serde_json::from_slice(&ran.out).unwrap()
}

#[test]
fn images_from_words_match_diffusers() {
    let sandbox = Sandbox::with_dev();
    let model = sandbox.model().to_str().unwrap();
    let exact = ["-m", model, "--dtype", "f32", "--device", "cpu", "-o", "out.png"];
    let prompt = "A cat holding a sign that says \"Gifu AI Study Group\"";
    let text = ["generate", prompt, "-W", "64", "-H", "64", "-s", "4", "-S", "42", "-g", "4"];
    sandbox.kiln(&[&text[..], &exact].concat()).ok();
    let expected = kiln_image::open(reference("t2i_guidance4.0.png").as_ref()).unwrap();
    assert!(max_difference(&sandbox.image("out.png"), &expected) <= 1);

    // The recipe gives it again, with nothing else named.
    sandbox.kiln(&["generate", "--from", "out.png", "-o", "again.png", "--device", "cpu"]).ok();
    assert_eq!(sandbox.image("again.png").pixels(), sandbox.image("out.png").pixels());
}

#[test]
fn text_layers_change_the_image_and_stay_in_the_recipe() {
    let sandbox = Sandbox::with_dev();
    let image = |name: &str, more: &[&str]| {
        sandbox.generate(&[&["a fox", "-S", "1", "--device", "cpu", "-o", name], more].concat()).ok();
        sandbox.image(name).pixels().to_vec()
    };
    let usual = image("a.png", &[]);
    assert_eq!(usual, image("b.png", &["--text-layers", "10,20,30"]));
    let other = image("c.png", &["--text-layers", "8,16,33"]);
    assert_ne!(usual, other);
    sandbox.kiln(&["generate", "--from", "c.png", "-o", "d.png", "--device", "cpu"]).ok();
    assert_eq!(sandbox.image("d.png").pixels(), other);
    sandbox.generate(&["a fox", "--text-layers", "10,20"]).fails(2, &["takes 3 text layers, found 2"]);
    sandbox
        .generate(&["a fox", "--text-layers", "10,20,99"])
        .fails(2, &["has 33 layers, found text layer 99"]);
    sandbox.generate(&["a fox", "--text-layers", "x"]).fails(2, &["expected a whole number"]);
}

#[test]
fn dev_edits_inpaints_and_starts_from_an_image() {
    let sandbox = Sandbox::with_dev();
    let (a, b) = (reference("ref_a_80x70.png"), reference("ref_b_64x112.png"));
    let inputs = testdata().join("reference/inputs");
    let input = |name: &str| inputs.join(name).display().to_string();
    let (init, mask) = (input("inpaint_100x72.png"), input("mask_100x72.png"));
    let ten: Vec<&str> =
        [a.as_str(), b.as_str()].iter().cycle().take(10).flat_map(|file| ["-r", file]).collect();
    for (name, options) in [
        ("edit.png", ten),
        ("init.png", vec!["--init", &init, "--strength", "0.5"]),
        ("mask.png", vec!["--init", &init, "--mask", &mask]),
    ] {
        sandbox
            .generate(
                &[&["a snowy mountain", "-S", "3", "--device", "cpu", "-o", name], &options[..]].concat(),
            )
            .ok();
        assert!(sandbox.path(name).is_file());
    }
}

#[test]
fn info_tells_the_family_and_the_states() {
    let info = info(&Sandbox::with_dev());
    assert!(!info.to_string().contains("problem"), "{info}");
    assert_eq!((&info["variant"], &info["default_steps"]), (&"dev".into(), &50.into()));
    assert_eq!(info["text_encoder"]["text_layers"], serde_json::json!([10, 20, 30]));
    assert_eq!(info["tokenizer"], "built into Kiln");
}

#[test]
fn a_text_encoder_of_klein_is_refused() {
    let (dev, klein) = (Sandbox::with_dev(), Sandbox::new());
    for (sandbox, other) in [(&dev, &klein), (&klein, &dev)] {
        let encoder = other.model().join("text_encoder");
        sandbox
            .generate(&["a fox", "--text-encoder", encoder.to_str().unwrap()])
            .fails(1, &["don't fit", "Mistral", "Qwen3", "hint: "]);
    }
}
