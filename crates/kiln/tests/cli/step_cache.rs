//! `--cache`: the step cache from the command line.

use crate::sandbox::Sandbox;

#[test]
fn a_base_model_takes_a_threshold_and_reports_its_steps() {
    let sandbox = Sandbox::with_model("klein-base");
    let fox = ["fox", "-S", "1", "-s", "6"];
    sandbox.generate(&[&fox[..], &["-o", "full.png"]].concat()).ok();
    // The random weights of this model change too much for any threshold: nothing is reused.
    let ran = sandbox.generate(&[&fox[..], &["-o", "cached.png", "--cache"]].concat()).ok();
    assert!(ran.err.contains("guidance 4, cache 0.1"), "{}", ran.err);
    assert!(ran.err.contains("6 of 6 steps computed"), "{}", ran.err);
    assert_eq!(sandbox.image("full.png"), sandbox.image("cached.png"));
    let ran = sandbox.generate(&[&fox[..], &["-o", "b.png", "--json", "--cache", "0.25"]].concat()).ok();
    let events = ran.events();
    let event = |name: &str| events.iter().find(|event| event["event"] == name).unwrap();
    assert_eq!(event("resolved")["cache"], 0.25);
    assert_eq!((&event("image")["computed_steps"], &event("image")["reused_steps"]), (&6.into(), &0.into()));
    // The recipe has the threshold and what it gave; the image is generated again with it.
    let recipe = kiln_image::read_recipe(&std::fs::read(sandbox.path("b.png")).unwrap()).unwrap().unwrap();
    assert!(recipe.contains("\"cache\":0.25") && recipe.contains("\"reused_steps\":0"), "{recipe}");
    let ran = sandbox.kiln(&["generate", "--from", "b.png", "-o", "c.png"]).ok();
    assert!(ran.err.contains("cache 0.25"), "{}", ran.err);
    // 0 is off.
    let ran = sandbox.kiln(&["generate", "--from", "b.png", "-o", "d.png", "--cache", "0"]).ok();
    assert!(!ran.err.contains("cache"), "{}", ran.err);
}

#[test]
fn a_setting_is_the_default_and_an_option_comes_before_it() {
    let sandbox = Sandbox::with_model("klein-base");
    sandbox.kiln(&["config", "set", "cache", "0.2"]).ok();
    let ran = sandbox.generate(&["fox", "-S", "1", "-o", "a.png"]).ok();
    assert!(ran.err.contains("cache 0.2"), "{}", ran.err);
    let ran = sandbox.generate(&["fox", "-S", "1", "-o", "b.png", "--cache=0"]).ok();
    assert!(!ran.err.contains("cache"), "{}", ran.err);
    sandbox.kiln(&["config", "set", "cache", "2"]).fails(2, &["from 0 (off) to 1"]);
}

#[test]
fn invalid_thresholds_are_errors_and_distilled_models_ignore_it() {
    let sandbox = Sandbox::new();
    for wrong in ["-0.1", "1.5", "nan", "inf", "fast", ""] {
        let cache = format!("--cache={wrong}");
        sandbox.generate(&["fox", &cache]).fails(2, &["--cache", "from 0 (off) to 1"]);
    }
    // A prompt behind the option is taken for its value, which the error says.
    sandbox.generate(&["--cache", "a red fox"]).fails(2, &["'a red fox'", "from 0 (off) to 1"]);
    let ran = sandbox.generate(&["fox", "-S", "1", "-o", "a.png", "--cache"]).ok();
    assert!(ran.err.contains("note: the step cache has no effect"), "{}", ran.err);
    assert_eq!(sandbox.names(), ["a.png"]);
}
