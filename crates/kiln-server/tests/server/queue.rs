//! A client's part of the queue.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::harness::TestServer;

async fn submit(server: &TestServer, client: &str, prompt: &str) -> String {
    // Sizes differ, so that no two jobs share a batch or a loaded model.
    let size = 64 + 16 * u32::from(prompt.as_bytes()[1] - b'0');
    let job = json!({ "prompt": prompt, "width": size });
    server.send_as(client, "POST", "/v1/jobs", job).await.ok().json()["id"].as_str().unwrap().to_owned()
}

fn open(folder: Arc<tempfile::TempDir>) -> TestServer {
    let keys = kiln_server::ApiKey::parse_file("a key-a\nb key-b").unwrap();
    TestServer::open(folder, |config| config.api_keys = keys, false)
}

fn prompts(queue: &Value) -> Vec<&str> {
    queue["data"].as_array().unwrap().iter().map(|job| job["request"]["prompt"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_client_reorders_and_cancels_its_own_jobs_only_and_the_order_survives_a_restart() {
    let folder = Arc::new(tempfile::TempDir::new().unwrap());
    let server = open(folder.clone());
    let mut mine = Vec::new();
    for prompt in ["a1", "a2", "a3"] {
        mine.push(submit(&server, "a", prompt).await);
    }
    let other = submit(&server, "b", "b1").await;
    let queue = server.send_as("a", "GET", "/v1/queue", json!(null)).await.ok().json();
    assert_eq!((prompts(&queue), &queue["others"]), (vec!["a1", "a2", "a3"], &json!(1)));

    let order = json!({ "order": [mine[2], other, mine[0], "none"] });
    let queue = server.send_as("a", "PUT", "/v1/queue", order).await.ok().json();
    assert_eq!(prompts(&queue), ["a3", "a2", "a1"], "a2 keeps its place");
    let queue = server.send_as("b", "GET", "/v1/queue", json!(null)).await.ok().json();
    assert_eq!((prompts(&queue), &queue["data"][0]["position"]), (vec!["b1"], &json!(1)));
    drop(server);

    let server = open(folder);
    let queue = server.send_as("a", "GET", "/v1/queue", json!(null)).await.ok().json();
    assert_eq!(prompts(&queue), ["a3", "a2", "a1"]);
    let cancelled = server.send_as("a", "DELETE", "/v1/queue", json!(null)).await.ok().json();
    assert_eq!(cancelled["cancelled"], 3);
    let status = async |client: &str, id: &str| {
        let job = server.send_as(client, "GET", &format!("/v1/jobs/{id}"), json!(null)).await.ok().json();
        job["status"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        (status("a", &mine[1]).await, status("b", &other).await),
        ("cancelled".into(), "queued".into())
    );
    server.generate(1);
    while status("b", &other).await != "done" {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(server.received.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn wildcards_give_each_image_a_prompt_of_its_own_if_the_client_asks() {
    let server = TestServer::new();
    let request = json!({ "prompt": "a {red|blue|green|black|white} fox", "n": 4, "seed": 7 });
    let plain = server.submit(request.clone()).await;
    assert_eq!(server.wait(&plain).await["request"]["prompt"], request["prompt"]);
    let job = server.post("/v1/jobs?wildcards=true", request.clone()).await.ok().json();
    let again = server.post("/v1/jobs?wildcards=true", request).await.ok().json();
    assert_eq!(job["request"]["prompt"], again["request"]["prompt"], "the seed chooses");
    let done = server.wait(job["id"].as_str().unwrap()).await;
    let images = done["images"].as_array().unwrap();
    for (i, image) in images.iter().enumerate() {
        assert_eq!(image["prompt"], done["request"]["prompt"][i]);
        assert_eq!(image["seed"], (7 + i).to_string());
        assert!(!image["prompt"].as_str().unwrap().contains('{'));
    }
    assert!(images.len() == 4 && images.iter().any(|image| image["prompt"] != images[0]["prompt"]));
    let random = json!({ "prompt": "{a|b}" });
    let job = server.post("/v1/jobs?wildcards=true", random).await.ok().json();
    assert!(job["request"]["seed"].is_u64());
}

#[tokio::test]
async fn priorities_decide_before_turns_survive_a_restart_and_need_a_key_that_allows_them() {
    let keys = "a key-a\nb key-b priority=high\nc key-c priority=low";
    let open = |folder: &Arc<tempfile::TempDir>| {
        let keys = kiln_server::ApiKey::parse_file(keys).unwrap();
        TestServer::open(folder.clone(), |config| config.api_keys = keys, false)
    };
    let folder = Arc::new(tempfile::TempDir::new().unwrap());
    let server = open(&folder);
    let ask = async |client: &str, prompt: &str, priority: Value| {
        let job = json!({ "prompt": prompt, "priority": priority });
        server.send_as(client, "POST", "/v1/jobs", job).await
    };
    let low = ask("c", "c1", json!(null)).await.ok().json();
    assert_eq!(low["priority"], "low", "a key's own priority is the default");
    ask("a", "a1", json!("low")).await.ok();
    let normal = ask("a", "a2", json!(null)).await.ok().json();
    let high = ask("b", "b1", json!("high")).await.ok().json();
    assert_eq!((&normal["priority"], &high["priority"]), (&json!("normal"), &json!("high")));
    assert_eq!((&normal["position"], &high["position"]), (&json!(0), &json!(0)));
    for (client, priority, words) in [
        ("a", json!("high"), "at most the priority `normal`"),
        ("b", json!("urgent"), "`low`, `normal` or `high`"),
        ("b", json!(1), "`low`, `normal` or `high`"),
    ] {
        let refused = ask(client, "x1", priority).await.json();
        assert!(refused["error"]["message"].as_str().unwrap().contains(words), "{refused}");
        assert_eq!(refused["error"]["param"], "priority");
    }
    drop(server);

    let server = open(&folder);
    let position = async |client: &str, job: &Value| {
        let path = format!("/v1/jobs/{}", job["id"].as_str().unwrap());
        server.send_as(client, "GET", &path, json!(null)).await.ok().json()["position"].clone()
    };
    let positions = [position("b", &high).await, position("a", &normal).await, position("c", &low).await];
    assert_eq!(positions, [json!(0), json!(1), json!(2)]);
}
