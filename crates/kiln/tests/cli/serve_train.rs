//! Trainings of `kiln serve --train`, with a tiny model over a socket.

use std::fs;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_image::RgbImage;
use serde_json::{Value, json};

use crate::sandbox::{Sandbox, pattern, png};
use crate::serve::TestServer;

/// A sandbox with an undistilled model, and its name as the server lists it.
fn sandbox() -> (Sandbox, String) {
    let sandbox = Sandbox::with_model("klein-base");
    // Short texts make short steps.
    sandbox.edit_model("tokenizer/tokenizer_config.json", "model_max_length", 16.into());
    let name = sandbox.model().file_name().unwrap().to_str().unwrap().to_owned();
    (sandbox, name)
}

fn images() -> [(Vec<u8>, &'static str); 2] {
    [("a fox", 20), ("a hen", 90)].map(|(caption, level)| {
        let pixels = pattern(64, 64).pixels().iter().map(|value| value / 3 + level).collect();
        (png(&RgbImage::new(64, 64, pixels).unwrap()), caption)
    })
}

/// A training of the two images.
fn request(model: &str, more: Value) -> Value {
    let mut request = json!({
        "name": "me", "model": model, "trigger": "sks", "rank": 4, "resolution": [64], "learning_rate": 0.01,
        "sample_every": 0, "steps": 12, "save_every": 3,
    });
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let image = |(bytes, caption): (Vec<u8>, &str)| json!({ "image": BASE64_STANDARD.encode(bytes), "caption": caption });
    json!({ "request": request, "images": images().map(image) })
}

fn start(sandbox: &Sandbox) -> TestServer {
    let model = sandbox.model().to_str().unwrap();
    TestServer::start(sandbox, &["--train", "-m", model, "--loras", "loras"])
}

#[test]
fn a_lora_of_the_server_has_the_bytes_of_the_command_line_and_is_used_at_once() {
    let (sandbox, name) = sandbox();
    let server = start(&sandbox);
    let (_, options) = server.call("GET", "/v1/trainings/options", None);
    assert_eq!(options["models"][0]["name"], name, "{options}");
    let (status, check) = server.call("POST", "/v1/trainings/check", Some(request(&name, json!({}))));
    assert_eq!((status, &check["sizes"]), (200, &json!(["64x64 (2)"])), "{check}");
    assert!(check["cost"].as_str().unwrap().contains("of memory"), "{check}");
    let (status, view) = server.call(
        "POST",
        "/v1/trainings",
        Some(request(&name, json!({ "sample_every": 6, "sample_prompts": ["a fox"] }))),
    );
    assert_eq!(status, 201, "{view}");
    let path = format!("/v1/trainings/{}", view["id"].as_str().unwrap());
    // An image job goes first.
    let image = json!({ "prompt": "a fox", "width": 64, "height": 64, "steps": 2 });
    let (_, job) = server.call("POST", "/v1/jobs", Some(image));
    server.until(&format!("/v1/jobs/{}", job["id"].as_str().unwrap()), |_, job| job["status"] == "done");
    let view = server
        .until(&path, |_, view| !matches!(view["status"].as_str(), Some("queued" | "preparing" | "running")));
    assert_eq!(
        (&view["status"], &view["lora"], &view["step"]),
        (&json!("done"), &json!("me"), &json!(12)),
        "{view}"
    );
    assert_eq!(
        (view["losses"].as_array().unwrap().len(), view["samples"].as_array().unwrap().len()),
        (12, 2)
    );
    let (_, loras) = server.call("GET", "/v1/loras/details", None);
    let file = "/v1/loras/me/file";
    let expected =
        json!([{ "name": "me", "triggers": ["sks"], "preview": null, "file": file, "deletable": true }]);
    assert_eq!(loras["data"], expected);
    assert_eq!(server.bytes(file), fs::read(sandbox.path("loras/me.safetensors")).unwrap());
    let job = json!({ "prompt": "sks a fox", "width": 64, "height": 64, "steps": 2, "loras": [{ "name": "me", "weight": 1 }] });
    let (_, job) = server.call("POST", "/v1/jobs", Some(job));
    let done = server.until(&format!("/v1/jobs/{}", job["id"].as_str().unwrap()), |_, job| {
        !matches!(job["status"].as_str(), Some("queued" | "running"))
    });
    assert_eq!(done["status"], "done", "{done}");
    drop(server);

    fs::create_dir(sandbox.path("images")).unwrap();
    for (i, (bytes, caption)) in images().iter().enumerate() {
        sandbox.write(&format!("images/{i}.png"), bytes);
        sandbox.write(&format!("images/{i}.txt"), caption.as_bytes());
    }
    let model = sandbox.model().to_str().unwrap();
    sandbox
        .kiln(&[
            "train",
            "images",
            "-m",
            model,
            "-o",
            "me.safetensors",
            "--trigger",
            "sks",
            "--rank",
            "4",
            "--resolution",
            "64",
            "--lr",
            "0.01",
            "--steps",
            "12",
            "-q",
        ])
        .ok();
    assert!(
        fs::read(sandbox.path("me.safetensors")).unwrap()
            == fs::read(sandbox.path("loras/me.safetensors")).unwrap()
    );
}

#[test]
fn image_jobs_beside_a_training_unload_nothing_and_leave_no_trace() {
    let (sandbox, name) = sandbox();
    let server = start(&sandbox);
    let submit = |more: Value| {
        let mut job = json!({ "prompt": "a fox", "width": 64, "height": 64, "steps": 2, "seed": 7 });
        job.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, job) = server.call("POST", "/v1/jobs", Some(job));
        assert_eq!(status, 202, "{job}");
        format!("/v1/jobs/{}", job["id"].as_str().unwrap())
    };
    let ended = |path: &str| {
        server.until(path, |_, job| !matches!(job["status"].as_str(), Some("queued" | "running")))
    };
    let image = |path: &str| {
        let job = ended(path);
        assert_eq!(job["status"], "done", "{job}");
        server.bytes(job["images"][0]["url"].as_str().unwrap())
    };
    // Of one load: a model that is loaded again took another time.
    let load = || {
        let text = String::from_utf8(server.bytes("/metrics")).unwrap();
        text.lines().filter(|line| line.starts_with("kiln_model_load_seconds{")).collect::<String>()
    };
    let alone = image(&submit(json!({})));
    let first_load = load();
    assert!(first_load.contains(&name), "{first_load}");
    let train = |lora: &str, steps: u64| {
        let more = json!({ "name": lora, "steps": steps });
        let (status, view) = server.call("POST", "/v1/trainings", Some(request(&name, more)));
        assert_eq!(status, 201, "{view}");
        format!("/v1/trainings/{}", view["id"].as_str().unwrap())
    };
    let steps = 40;
    let quiet = train("quiet", steps);
    server.until(&quiet, |_, view| view["status"] == "done");
    let path = train("busy", steps);
    let reaches = |step: u64| {
        let view =
            server.until(&path, |_, view| view["step"].as_u64() >= Some(step) || view["status"] == "failed");
        assert_eq!(view["status"], "running", "{view}");
    };
    reaches(2);
    // Two at once, and one that is cancelled.
    let jobs = [submit(json!({})), submit(json!({}))];
    let cancelled = submit(json!({ "steps": 40 }));
    server.call("DELETE", &cancelled, None);
    assert!(jobs.iter().all(|job| image(job) == alone));
    ended(&cancelled);
    assert_eq!(load(), first_load);
    reaches(4);
    // Another model in between, which takes the place of the first.
    image(&submit(json!({ "model": "ember", "width": 128, "height": 128 })));
    assert!(image(&submit(json!({}))) == alone);
    let view = server
        .until(&path, |_, view| !matches!(view["status"].as_str(), Some("queued" | "preparing" | "running")));
    assert_eq!((&view["status"], &view["step"]), (&json!("done"), &json!(steps)), "{view}");
    let lora = |name: &str| fs::read(sandbox.path(&format!("loras/{name}.safetensors"))).unwrap();
    assert!(lora("busy") == lora("quiet"));
}

#[test]
fn a_training_of_a_killed_server_is_resumed_and_unusable_images_are_named() {
    let (sandbox, name) = sandbox();
    let mut server = start(&sandbox);
    let mut broken = request(&name, json!({ "name": "tiny" }));
    broken["images"][1]["image"] = BASE64_STANDARD.encode(png(&RgbImage::black(16, 16))).into();
    broken["images"][1]["name"] = "../hen.png".into();
    let (status, error) = server.call("POST", "/v1/trainings", Some(broken));
    let message = error["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("`0002-hen.png`: it has 16x16 pixels"), "{message}");
    assert!(message.contains("\"skip_bad\"") && !message.contains("trainings/"), "{message}");

    let (_, view) = server.call("POST", "/v1/trainings", Some(request(&name, json!({ "steps": 300 }))));
    let path = format!("/v1/trainings/{}", view["id"].as_str().unwrap());
    server.until(&path, |_, view| view["step"].as_u64() > Some(4));
    server.child.kill().unwrap();
    drop(server);
    let server = start(&sandbox);
    let (_, view) = server.call("GET", &path, None);
    assert_eq!(view["status"], "interrupted", "{view}");
    server.call("POST", &format!("{path}/resume"), Some(json!({})));
    let view = server.until(&path, |_, view| view["status"] == "running" && view["step"].as_u64() > Some(6));
    let losses = view["losses"].as_array().unwrap();
    assert!(losses.len() > 4 && losses[0][0] == 1, "{view}");
    server.call("POST", &format!("{path}/cancel"), Some(json!({})));
    server.until(&path, |_, view| view["status"] == "cancelled");
    assert!(!sandbox.path("loras/me.safetensors").exists());
}
