//! LoRAs that trainings have written are downloaded and deleted through the API; those of the operator stay.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, header};
use kiln_server::{ApiKey, Catalogue, ModelInfo, Server, StoreError};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fake_trainer::FakeTrainer;
use crate::harness::{TestCatalogue, TestResponse, TestServer, base64, config, png};

const KEYS: &str = "ada key-ada admin\nbob key-bob train\neve key-eve train\ntim key-tim";

/// The LoRAs of a folder.
struct FolderCatalogue(PathBuf);

impl Catalogue for FolderCatalogue {
    fn models(&self) -> Vec<ModelInfo> {
        TestCatalogue.models()
    }

    fn loras(&self) -> Vec<String> {
        let files =
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> =
            files.map(|name| name.replace(".safetensors", "").replace('+', "/")).collect();
        names.sort();
        names
    }

    fn lora_file(&self, name: &str) -> Option<PathBuf> {
        Some(self.0.join(format!("{}.safetensors", name.replace('/', "+"))))
    }
}

fn open(folder: &Path) -> TestServer {
    let loras = folder.join("loras");
    fs::create_dir_all(&loras).unwrap();
    let mut config = config(&folder.join("data"));
    config.api_keys = ApiKey::parse_file(KEYS).unwrap();
    let server = loop {
        match Server::open(config.clone(), Arc::new(FolderCatalogue(loras.clone()))) {
            // The threads of an earlier server still hold the folder.
            Err(StoreError::InUse) => std::thread::sleep(Duration::from_millis(5)),
            opened => break opened.unwrap(),
        }
    };
    server.train_with(FakeTrainer { loras: Some(loras), ..FakeTrainer::default() }).unwrap();
    let server = TestServer::of(server);
    server.generate(1);
    server
}

async fn call(server: &TestServer, key: &str, method: &str, path: &str) -> TestResponse {
    server.send_as(key, method, path, Value::Null).await
}

/// Trains a LoRA called `NAME-lora`, and returns the training's id.
async fn train(server: &TestServer, key: &str, name: &str) -> String {
    let image = json!({ "image": base64(&png(16, 16)), "caption": "a fox" });
    let request = json!({ "request": { "name": name, "steps": 2 }, "images": [image] });
    let view = server.send_as(key, "POST", "/v1/trainings", request).await.ok().json();
    let id = view["id"].as_str().unwrap().to_owned();
    for _ in 0..1000 {
        let view = call(server, key, "GET", &format!("/v1/trainings/{id}")).await.ok().json();
        if view["status"] == "done" {
            return id;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the training does not end");
}

async fn details(server: &TestServer, key: &str, name: &str) -> Value {
    let list = call(server, key, "GET", "/v1/loras/details").await.ok().json();
    list["data"].as_array().unwrap().iter().find(|lora| lora["name"] == name).unwrap().clone()
}

#[tokio::test]
async fn a_trained_lora_is_downloaded_by_its_owner_whole_or_in_parts() {
    let folder = TempDir::new().unwrap();
    let server = open(folder.path());
    train(&server, "bob", "me").await;
    let lora = details(&server, "bob", "me-lora").await;
    assert_eq!((&lora["file"], &lora["deletable"]), (&json!("/v1/loras/me-lora/file"), &json!(true)));
    let file = call(&server, "bob", "GET", "/v1/loras/me-lora/file").await.ok();
    assert_eq!(file.text(), "weights of me");
    let disposition = file.headers[header::CONTENT_DISPOSITION].to_str().unwrap();
    assert!(disposition.starts_with("attachment; filename=\"me-lora.safetensors\""), "{disposition}");
    assert_eq!(file.headers[header::ACCEPT_RANGES], "bytes");
    let etag = file.headers[header::ETAG].to_str().unwrap();

    let ask = |name: header::HeaderName, value: &str| {
        let request = Request::get("/v1/loras/me-lora/file").header(header::HOST, "localhost");
        let request = request.header(header::AUTHORIZATION, "Bearer key-bob").header(name, value);
        server.send(request.body(Body::empty()).unwrap())
    };
    let part = ask(header::RANGE, "bytes=8-9").await;
    assert_eq!((part.status.as_u16(), part.text()), (206, "of"));
    assert_eq!(part.headers[header::CONTENT_RANGE], "bytes 8-9/13");
    let outside = ask(header::RANGE, "bytes=99-").await.expect_error(416, "range");
    assert_eq!(outside.headers[header::CONTENT_RANGE], "bytes */13");
    let known = ask(header::IF_NONE_MATCH, etag).await;
    assert_eq!((known.status.as_u16(), known.bytes.len()), (304, 0));
    assert_eq!(known.headers[header::ETAG], etag);

    // Others use the LoRA, but do not get its file.
    for (key, code) in [("eve", "not_yours"), ("tim", "training_not_allowed")] {
        let lora = details(&server, key, "me-lora").await;
        assert_eq!((&lora["file"], &lora["deletable"]), (&Value::Null, &json!(false)));
        call(&server, key, "GET", "/v1/loras/me-lora/file").await.expect_error(403, code);
        call(&server, key, "DELETE", "/v1/loras/me-lora").await.expect_error(403, code);
    }
    assert_eq!(call(&server, "ada", "GET", "/v1/loras/me-lora/file").await.ok().text(), "weights of me");
    call(&server, "ada", "GET", "/v1/loras/none/file").await.expect_error(404, "not_found");
}

#[tokio::test]
async fn a_trained_lora_is_deleted_also_after_its_training_and_a_restart() {
    let folder = TempDir::new().unwrap();
    let server = open(folder.path());
    let first = train(&server, "bob", "first").await;
    let second = train(&server, "bob", "second").await;
    call(&server, "bob", "DELETE", &format!("/v1/trainings/{first}")).await.ok();
    server.inner.close();
    drop(server);
    let server = open(folder.path());
    for name in ["first-lora", "second-lora"] {
        let path = format!("/v1/loras/{name}");
        call(&server, "eve", "DELETE", &path).await.expect_error(403, "not_yours");
        assert_eq!(call(&server, "bob", "DELETE", &path).await.status.as_u16(), 204);
        assert!(!folder.path().join(format!("loras/{name}.safetensors")).exists());
        call(&server, "bob", "DELETE", &path).await.expect_error(404, "not_found");
    }
    // Its training no longer names a LoRA, so the next one of this name is not taken for it.
    let view = call(&server, "bob", "GET", &format!("/v1/trainings/{second}")).await.ok().json();
    assert_eq!(view["lora"], Value::Null);
    fs::write(folder.path().join("loras/second-lora.safetensors"), "the operator's").unwrap();
    call(&server, "bob", "DELETE", "/v1/loras/second-lora").await.expect_error(403, "not_trained_here");
}

#[tokio::test]
async fn loras_of_the_operator_are_never_deleted_and_only_admins_get_their_files() {
    let folder = TempDir::new().unwrap();
    let server = open(folder.path());
    fs::write(folder.path().join("loras/styles+wax.safetensors"), "wax").unwrap();
    for key in ["ada", "bob"] {
        let refused = call(&server, key, "DELETE", "/v1/loras/styles%2Fwax").await;
        refused.expect_error(403, "not_trained_here");
    }
    call(&server, "bob", "GET", "/v1/loras/styles%2Fwax/file").await.expect_error(403, "not_yours");
    let lora = details(&server, "ada", "styles/wax").await;
    assert_eq!((&lora["file"], &lora["deletable"]), (&json!("/v1/loras/styles%2Fwax/file"), &json!(false)));
    let file = call(&server, "ada", "GET", lora["file"].as_str().unwrap()).await.ok();
    assert_eq!(file.text(), "wax");
    assert!(file.headers[header::CONTENT_DISPOSITION].to_str().unwrap().contains("\"wax.safetensors\""));
    // Its path would be that of the list.
    let image = json!({ "image": base64(&png(16, 16)), "caption": "a fox" });
    let request = json!({ "request": { "name": "details", "steps": 2 }, "images": [image] });
    server.send_as("bob", "POST", "/v1/trainings", request).await.expect_error(400, "invalid_value");
}
