//! Trainings over HTTP, with a trainer that only counts.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, header};
use kiln_server::ApiKey;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fake_trainer::FakeTrainer;
use crate::harness::{TestServer, base64, events, png};

fn server() -> (TestServer, FakeTrainer) {
    let server = TestServer::new();
    let trainer = FakeTrainer::default();
    server.inner.train_with(trainer.clone()).unwrap();
    (server, trainer)
}

/// A training of two images.
fn request(name: &str, steps: u64) -> Value {
    let image = |side, caption: &str| json!({ "image": base64(&png(side, side)), "caption": caption, "name": "a/b.png" });
    json!({ "request": { "name": name, "steps": steps }, "images": [image(16, "a fox"), image(24, "a hen")] })
}

async fn start(server: &TestServer, name: &str, steps: u64) -> String {
    let view = server.post("/v1/trainings", request(name, steps)).await.ok().json();
    view["id"].as_str().unwrap().to_owned()
}

/// Polls a training until it fits.
async fn until(server: &TestServer, id: &str, fits: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    for _ in 0..1000 {
        last = server.get(&format!("/v1/trainings/{id}")).await.ok().json();
        if fits(&last) {
            return last;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the training does not get there: {last}");
}

async fn until_status(server: &TestServer, id: &str, status: &str) -> Value {
    until(server, id, |view| view["status"] == status).await
}

async fn act(server: &TestServer, id: &str, action: &str) -> crate::harness::TestResponse {
    server.post(&format!("/v1/trainings/{id}/{action}"), json!({})).await
}

#[tokio::test]
async fn without_the_option_training_is_refused_with_the_reason() {
    let server = TestServer::new();
    for path in ["/v1/trainings", "/v1/trainings/options", "/v1/trainings/0"] {
        let refused = server.get(path).await.expect_error(403, "training_off");
        assert!(refused.text().contains("kiln serve --train"));
    }
    server.post("/v1/trainings", request("me", 1)).await.expect_error(403, "training_off");
    assert_eq!(server.get("/v1/about").await.ok().json()["train"], false);
}

#[tokio::test]
async fn a_training_runs_to_its_lora_with_losses_samples_and_events() {
    let (server, _) = server();
    assert_eq!(server.get("/v1/about").await.ok().json()["train"], true);
    let options = server.get("/v1/trainings/options").await.ok().json();
    assert_eq!(options["models"][0]["presets"][1]["rank"], 16);
    let check = server.post("/v1/trainings/check", request("me", 20)).await.ok().json();
    assert_eq!(
        (&check["examples"], &check["warnings"][0], &check["cost"]),
        (&json!(2), &json!("a duplicate"), &json!("rank 16"))
    );
    assert_eq!(server.get("/v1/trainings").await.ok().json()["data"], json!([]));

    let response = server.post("/v1/trainings", request("me", 20)).await.ok();
    let view = response.json();
    let id = view["id"].as_str().unwrap();
    assert_eq!(response.headers[header::LOCATION], format!("/v1/trainings/{id}"));
    // What the request left out is filled in.
    assert_eq!((&view["request"]["model"], &view["request"]["rank"]), (&json!("small-base"), &json!(16)));
    let stream = server.get(&format!("/v1/trainings/{id}/events")).await.ok();
    let stream = events(stream.text());
    assert_eq!(stream.first().unwrap().0, "state");
    let (name, end) = stream.last().unwrap();
    assert_eq!(
        (name.as_str(), &end["status"], &end["step"], &end["lora"]),
        ("end", &json!("done"), &json!(20), &json!("me-lora"))
    );
    assert_eq!(end["notes"], json!(["it went well"]));
    // Every step was told once.
    let steps = stream
        .iter()
        .filter(|(name, _)| name == "progress")
        .flat_map(|(_, view)| view["losses"].as_array().unwrap().clone());
    let mut steps: Vec<u64> = steps.map(|point| point[0].as_u64().unwrap()).collect();
    let told = steps.len();
    steps.dedup();
    assert_eq!(told, steps.len());

    let view = server.get(&format!("/v1/trainings/{id}")).await.ok().json();
    assert_eq!((view["losses"].as_array().unwrap().len(), &view["losses"][1]), (20, &json!([2, 0.5, 0.5])));
    assert_eq!(view["samples"].as_array().unwrap().len(), 2);
    let sample = server.get(view["samples"][1]["url"].as_str().unwrap()).await.ok();
    assert_eq!(sample.headers[header::CONTENT_TYPE], "image/png");
    server.get(&format!("/v1/trainings/{id}/samples/7")).await.expect_error(404, "not_found");
    act(&server, id, "cancel").await.expect_error(409, "wrong_state");
    act(&server, id, "resume").await.expect_error(409, "wrong_state");
    let folder = server.folder().path().join("trainings").join(id);
    assert!(folder.join("pictures/0001-b.png").is_file() && folder.join("pictures/0002-b.txt").is_file());
    server.delete(&format!("/v1/trainings/{id}")).await.ok();
    assert!(!folder.exists());
    server.get(&format!("/v1/trainings/{id}")).await.expect_error(404, "not_found");
}

#[tokio::test]
async fn trainings_run_one_after_the_other_and_are_cancelled_at_every_stage() {
    let (server, trainer) = server();
    let (first, second) = (start(&server, "slow", 500).await, start(&server, "two", 10).await);
    until(&server, &first, |view| view["status"] == "preparing" && view["preparing"]["total"] == 2).await;
    let queued = server.get(&format!("/v1/trainings/{second}")).await.ok().json();
    assert_eq!((&queued["status"], &queued["position"]), (&json!("queued"), &json!(1)));
    // While it prepares.
    act(&server, &first, "cancel").await.ok();
    until_status(&server, &first, "cancelled").await;
    until_status(&server, &second, "done").await;
    // While it runs: the step is saved, and it goes on from there.
    act(&server, &first, "resume").await.ok();
    until(&server, &first, |view| view["step"].as_u64() > Some(12)).await;
    server.delete(&format!("/v1/trainings/{first}")).await.expect_error(409, "wrong_state");
    act(&server, &first, "cancel").await.ok();
    let cancelled = until_status(&server, &first, "cancelled").await;
    let step = cancelled["step"].as_u64().unwrap();
    assert!(step > 12 && cancelled["losses"].as_array().unwrap().len() as u64 == step);
    act(&server, &first, "resume").await.ok();
    until(&server, &first, |view| view["step"].as_u64() > Some(step)).await;
    assert_eq!(trainer.events().last().unwrap(), &format!("train slow from {step}"));
    // While it is queued.
    let third = start(&server, "three", 10).await;
    act(&server, &third, "cancel").await.ok();
    assert_eq!(server.get(&format!("/v1/trainings/{third}")).await.ok().json()["status"], "cancelled");
    act(&server, &first, "cancel").await.ok();
    until_status(&server, &first, "cancelled").await;
    assert!(!trainer.events().iter().any(|event| event.contains("three")));
}

#[tokio::test]
async fn image_jobs_go_first_and_a_training_waits_or_releases_the_device() {
    for name in ["wait", "release"] {
        let (server, trainer) = server();
        let id = start(&server, name, 400).await;
        until(&server, &id, |view| view["step"].as_u64() > Some(3)).await;
        let job = server.submit(json!({ "prompt": "slow" })).await;
        let paused = until(&server, &id, |view| view["paused"] == true).await;
        let status = server.get(&format!("/v1/jobs/{job}")).await.ok().json()["status"].clone();
        assert!(status == "queued" || status == "running", "{status}: {paused}");
        assert_eq!(server.wait(&job).await["status"], "done");
        let step = paused["step"].as_u64().unwrap();
        let after = until(&server, &id, |view| view["step"].as_u64() > Some(step + 1)).await;
        assert_eq!(after["paused"], false);
        let last = if name == "wait" { "wait".into() } else { format!("train release from {step}") };
        assert_eq!(trainer.events().last(), Some(&last), "{:?}", trainer.events());
        act(&server, &id, "cancel").await.ok();
        until_status(&server, &id, "cancelled").await;
    }
}

#[tokio::test]
async fn a_failed_training_can_be_resumed_and_a_panic_ends_only_its_own() {
    let (server, _) = server();
    let (failing, panicking) = (start(&server, "fail", 10).await, start(&server, "panic", 10).await);
    let failed = until_status(&server, &failing, "failed").await;
    assert_eq!(
        failed["error"],
        json!({ "code": "training_failed", "message": "the loss of step 5 is not a number" })
    );
    assert_eq!(until_status(&server, &panicking, "failed").await["error"]["code"], "panicked");
    act(&server, &failing, "resume").await.ok();
    until_status(&server, &failing, "failed").await;
    let id = start(&server, "good", 3).await;
    until_status(&server, &id, "done").await;
}

#[tokio::test]
async fn a_stopped_server_continues_a_training_and_a_killed_one_offers_it() {
    let folder = Arc::new(TempDir::new().unwrap());
    let open = || TestServer::open(Arc::clone(&folder), |_| {}, true);
    let first = open();
    let thread = first.inner.train_with(FakeTrainer::default()).unwrap();
    let id = start(&first, "slow", 60).await;
    let other = start(&first, "other", 3).await;
    until(&first, &id, |view| view["step"].as_u64() > Some(3)).await;
    first.inner.close();
    thread.join().unwrap();
    let record = folder.path().join("trainings").join(&id).join("training.json");
    let stored: Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    assert_eq!(stored["state"], "queued");
    drop(first);
    let second = open();
    let trainer = FakeTrainer::default();
    let thread = second.inner.train_with(trainer.clone()).unwrap();
    until(&second, &id, |view| view["step"].as_u64() > stored["step"].as_u64()).await;
    assert_eq!(trainer.events()[0], format!("train slow from {}", stored["step"]));
    until_status(&second, &other, "done").await;
    second.inner.close();
    thread.join().unwrap();
    drop(second);
    // As a killed process leaves it: a running training, one whose deletion was interrupted, and a broken one.
    let text =
        std::fs::read_to_string(&record).unwrap().replace("\"state\": \"done\"", "\"state\": \"running\"");
    std::fs::write(&record, text).unwrap();
    let half = folder.path().join("trainings").join("0".repeat(24));
    std::fs::create_dir(&half).unwrap();
    let broken = folder.path().join("trainings").join("1".repeat(24));
    std::fs::create_dir(&broken).unwrap();
    std::fs::write(broken.join("training.json"), "{").unwrap();
    let third = open();
    let thread = third.inner.train_with(FakeTrainer::default()).unwrap();
    assert!(!half.exists() && broken.exists());
    let list = third.get("/v1/trainings").await.ok().json();
    let statuses: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|view| &view["status"]).collect();
    assert_eq!(statuses, [&json!("done"), &json!("interrupted")]);
    act(&third, &id, "resume").await.ok();
    until_status(&third, &id, "done").await;
    third.inner.close();
    thread.join().unwrap();
}

#[tokio::test]
async fn a_killed_training_tells_its_last_step() {
    let folder = Arc::new(TempDir::new().unwrap());
    let open = || TestServer::open(Arc::clone(&folder), |_| {}, true);
    let first = open();
    let thread = first.inner.train_with(FakeTrainer::default()).unwrap();
    let id = start(&first, "me", 40).await;
    until_status(&first, &id, "done").await;
    first.inner.close();
    thread.join().unwrap();
    drop(first);
    // As a process leaves it that was killed after step 37: the record is of the start, the checkpoint of step 30.
    let training = folder.path().join("trainings").join(&id);
    let record = std::fs::read_to_string(training.join("training.json")).unwrap();
    let record = record.replace("\"state\": \"done\"", "\"state\": \"running\"");
    std::fs::write(training.join("training.json"), record.replace("\"step\": 40", "\"step\": 0")).unwrap();
    std::fs::write(training.join("run/state"), "30").unwrap();
    let log: String = (1..=37).map(|step| format!("{step}\n")).collect();
    std::fs::write(training.join("run/log"), log).unwrap();
    let second = open();
    let trainer = FakeTrainer::default();
    let thread = second.inner.train_with(trainer.clone()).unwrap();
    for path in ["/v1/trainings".to_owned(), format!("/v1/trainings/{id}")] {
        let answer = second.get(&path).await.ok().json();
        let view = if answer["data"].is_null() { &answer } else { &answer["data"][0] };
        assert_eq!((&view["status"], &view["step"]), (&json!("interrupted"), &json!(37)), "{path}");
    }
    act(&second, &id, "resume").await.ok();
    until_status(&second, &id, "done").await;
    assert_eq!(trainer.events(), ["train me from 30"]);
    second.inner.close();
    thread.join().unwrap();
}

/// The records are those of a server whose `request` was not a `TrainRequest` yet: one that was killed while it trained, and
/// one with every kind of value that is written differently now.
#[tokio::test]
async fn records_of_an_earlier_version_are_read_and_resumed() {
    let records =
        [include_str!("../data/training_running.json"), include_str!("../data/training_queued.json")];
    let folder = Arc::new(TempDir::new().unwrap());
    let ids = records.map(|record| {
        let id = serde_json::from_str::<Value>(record).unwrap()["id"].as_str().unwrap().to_owned();
        let training = folder.path().join("trainings").join(&id);
        std::fs::create_dir_all(training.join("pictures")).unwrap();
        std::fs::write(training.join("training.json"), record).unwrap();
        id
    });
    let server = TestServer::open(Arc::clone(&folder), |_| {}, true);
    let trainer = FakeTrainer::default();
    let thread = server.inner.train_with(trainer.clone()).unwrap();
    let view = server.get(&format!("/v1/trainings/{}", ids[0])).await.ok().json();
    assert_eq!((&view["status"], &view["steps"]), (&json!("interrupted"), &json!(40)));
    let request = json!({
        "name": "me", "model": "ember-base", "trigger": "sks", "preset": "subject", "steps": 40, "rank": 4, "targets": "full",
        "resolution": [64], "learning_rate": 0.002, "save_every": 4, "sample_every": 0
    });
    assert_eq!(view["request"], request);
    let view = until_status(&server, &ids[1], "done").await;
    let request = json!({
        "name": "plain", "model": "ember-base", "preset": "full", "steps": 12, "rank": 4, "targets": "attn.to_q,attn.to_k",
        "resolution": [64], "learning_rate": 0.003, "schedule": "constant", "optimizer": "adamw8bit",
        "sigmas": [0.5, 0.9], "flip": true, "save_every": 10, "sample_every": 0
    });
    assert_eq!(view["request"], request);
    act(&server, &ids[0], "resume").await.ok();
    until_status(&server, &ids[0], "done").await;
    assert_eq!(trainer.events(), ["train plain from 0", "train me from 0"]);
    server.inner.close();
    thread.join().unwrap();
}

#[tokio::test]
async fn wrong_orders_and_images_are_refused_and_leave_nothing() {
    let server = TestServer::with(|config| config.limits.input_pixels = 10_000);
    server.inner.train_with(FakeTrainer::default()).unwrap();
    let with = |field: &str, value: Value| {
        let mut request = request("me", 10);
        request["request"][field] = value;
        request
    };
    let refused = async |body: Value, status: u16, code: &str| {
        let response = server.post("/v1/trainings", body).await.expect_error(status, code);
        response.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    for name in ["", "..", "../x", "a/b", "a\\b", ".hidden", "x\u{0}", &"x".repeat(65)] {
        refused(with("name", json!(name)), 400, "invalid_value").await;
    }
    for (field, value) in [
        ("steps", json!(0)),
        ("steps", json!(100_001)),
        ("rank", json!(257)),
        ("resolution", json!([32])),
        ("resolution", json!([4096])),
        ("resolution", json!([64, 64, 64, 64, 64])),
        ("learning_rate", json!(0)),
        ("learning_rate", json!(-1)),
        ("batch", json!(33)),
        ("targets", json!("a b")),
        ("trigger", json!("a\nb")),
        ("trigger", json!("x".repeat(201))),
        ("sigmas", json!([2])),
        ("sample_prompts", json!(["a", "a", "a", "a", "a", "a", "a", "a", "a"])),
        ("sample_prompts", json!(["x".repeat(8001)])),
        ("save_every", json!(0)),
        ("accumulate", json!(65)),
        ("ranks", json!([1, 2])),
        ("cache_dir", json!("/etc")),
        ("data", json!("/etc")),
        ("overwrite", json!(true)),
        ("preset", json!("style")),
    ] {
        refused(with(field, value), 400, "invalid_value").await;
    }
    refused(with("unknown", json!(1)), 400, "invalid_request").await;
    let message = refused(with("optimizer", json!("sgd")), 400, "invalid_request").await;
    assert!(message.contains("optimizer: unknown variant `sgd`"), "{message}");
    let message = refused(with("model", json!("small")), 404, "model_not_found").await;
    assert!(message.contains("available: small-base"), "{message}");

    let images = |list: Value| json!({ "request": { "name": "me" }, "images": list });
    refused(images(json!([])), 400, "invalid_value").await;
    let message =
        refused(images(json!(vec![json!({ "image": "input:0" }); 10_000])), 400, "invalid_value").await;
    assert!(message.contains("at most 1000 images, found 10000"), "{message}");
    refused(images(json!([{ "image": "not an image" }])), 400, "invalid_image").await;
    refused(images(json!([{ "image": base64(b"GIF89a broken") }])), 400, "invalid_image").await;
    refused(images(json!([{ "image": "https://example.org/a.png" }])), 400, "invalid_image").await;
    refused(images(json!([{ "image": "input:../../etc/passwd" }])), 404, "input_not_found").await;
    refused(images(json!([{ "image": base64(&png(101, 100)) }])), 400, "image_too_large").await;
    let image = base64(&png(16, 16));
    let message = refused(images(json!([{ "image": image }])), 400, "unusable").await;
    assert_eq!(message, "1 images have no caption");
    refused(images(json!([{ "image": image, "caption": "x".repeat(8001) }])), 400, "invalid_value").await;
    let left = std::fs::read_dir(server.folder().path().join("trainings")).unwrap().count();
    assert_eq!((left, &server.get("/v1/trainings").await.ok().json()["data"]), (0, &json!([])));
}

#[tokio::test]
async fn keys_see_their_own_trainings_within_their_quotas() {
    const KEYS: &str =
        "ada key-ada admin\nbob key-bob train inputs=2K\neve key-eve\nmia key-mia train jobs=1";
    let server = TestServer::with(|config| config.api_keys = ApiKey::parse_file(KEYS).unwrap());
    server.inner.train_with(FakeTrainer::default()).unwrap();
    let call = async |name: &str, method: &str, path: &str, body: Value| {
        server.send_as(name, method, path, body).await
    };
    let get = async |name: &str, path: &str| call(name, "GET", path, json!({})).await;
    get("eve", "/v1/trainings").await.expect_error(403, "training_not_allowed");
    call("eve", "POST", "/v1/trainings", request("me", 5)).await.expect_error(403, "training_not_allowed");
    for (name, may) in [("ada", true), ("bob", true), ("eve", false)] {
        assert_eq!(get(name, "/v1/about").await.ok().json()["train"], may);
    }
    let view = call("bob", "POST", "/v1/trainings", request("slow", 500)).await.ok().json();
    let path = format!("/v1/trainings/{}", view["id"].as_str().unwrap());
    for (method, action) in [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("POST", "/resume"),
        ("GET", "/events"),
        ("GET", "/samples/10"),
    ] {
        call("mia", method, &format!("{path}{action}"), json!({})).await.expect_error(404, "not_found");
    }
    assert_eq!(get("mia", "/v1/trainings").await.ok().json()["data"], json!([]));
    assert_eq!(get("ada", "/v1/trainings").await.ok().json()["data"].as_array().unwrap().len(), 1);
    // Another client's upload is not an image to train on.
    let upload = Request::post("/v1/inputs").header(header::HOST, "localhost");
    let upload =
        upload.header(header::AUTHORIZATION, "Bearer key-bob").body(Body::from(png(32, 32))).unwrap();
    let input = server.send(upload).await.ok().json()["id"].clone();
    let stolen = json!({ "request": { "name": "me", "trigger": "x" }, "images": [{ "image": input }] });
    call("mia", "POST", "/v1/trainings", stolen.clone()).await.expect_error(404, "input_not_found");
    call("mia", "POST", "/v1/trainings", request("one", 500)).await.ok();
    call("mia", "POST", "/v1/trainings", request("two", 5)).await.expect_error(429, "trainings_full");
    let own = get("mia", "/v1/trainings").await.ok().json()["data"][0]["id"].as_str().unwrap().to_owned();
    call("mia", "POST", &format!("/v1/trainings/{own}/cancel"), json!({})).await.ok();
    call("mia", "POST", "/v1/trainings", request("two", 500)).await.ok();
    let resumed = call("mia", "POST", &format!("/v1/trainings/{own}/resume"), json!({})).await;
    resumed.expect_error(429, "trainings_full");
    // The images of trainings count.
    let mut state = 1_u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let noise: Vec<u8> = (0..3 * 32 * 32).map(|_| random()).collect();
    let noise =
        kiln_image::encode(&kiln_image::RgbImage::new(32, 32, noise).unwrap(), kiln_image::Format::Png, None)
            .unwrap();
    assert!(noise.len() > 2048);
    let large =
        json!({ "request": { "name": "me", "trigger": "x" }, "images": [{ "image": base64(&noise) }] });
    call("bob", "POST", "/v1/trainings", large).await.expect_error(413, "inputs_full");
    call("ada", "POST", &format!("{path}/cancel"), json!({})).await.ok();
}

#[cfg(unix)]
#[tokio::test]
async fn the_folder_of_trainings_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let (server, _) = server();
    let id = start(&server, "me", 1).await;
    until_status(&server, &id, "done").await;
    let folder = server.folder().path().join("trainings");
    for path in [folder.clone(), folder.join(&id).join("training.json")] {
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0, "{}", path.display());
    }
}

#[tokio::test]
async fn samples_are_not_shown_where_images_are_checked() {
    let allows = if cfg!(windows) { "cmd.exe /c exit" } else { "true" };
    let server = TestServer::with(|config| {
        config.check = Some(kiln_filters::ImageCheck::new(allows, Duration::from_secs(2)).unwrap())
    });
    server.inner.train_with(FakeTrainer::default()).unwrap();
    let view = server.post("/v1/trainings", request("me", 5)).await.ok().json();
    assert_eq!(view["request"]["sample_every"], 0);
    assert!(view["check"]["warnings"][1].as_str().unwrap().contains("no samples"), "{view}");
}
