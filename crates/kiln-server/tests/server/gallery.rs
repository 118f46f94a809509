//! The gallery of generated images.

use serde_json::{Value, json};

use crate::harness::TestServer;

async fn prompts(server: &TestServer, query: &str) -> Vec<String> {
    let list = server.get(&format!("/v1/images{query}")).await.ok().json();
    let prompt = |image: &Value| image["request"]["prompt"].as_str().unwrap().to_owned();
    list["data"].as_array().unwrap().iter().map(prompt).collect()
}

#[tokio::test]
async fn images_are_listed_searched_and_deleted() {
    let server = TestServer::new();
    let mut ids = Vec::new();
    for prompt in ["a red fox", "a blue hen", "100% fox_trot"] {
        let generated = server
            .post("/v1/images/generations", json!({ "prompt": prompt, "size": "640x320" }))
            .await
            .ok()
            .json();
        ids.push(generated["data"][0]["id"].as_str().unwrap().to_owned());
    }
    assert_eq!(prompts(&server, "").await, ["100% fox_trot", "a blue hen", "a red fox"]);
    assert_eq!(prompts(&server, "?search=FOX").await, ["100% fox_trot", "a red fox"]);
    assert_eq!(prompts(&server, "?search=fox%20red").await, ["a red fox"]);
    assert_eq!(prompts(&server, "?search=0%25").await, ["100% fox_trot"]);
    assert_eq!(prompts(&server, "?search=x_t").await, ["100% fox_trot"], "no wildcards");
    assert_eq!(prompts(&server, &format!("?limit=1&before={}", ids[2])).await, ["a blue hen"]);
    assert!(prompts(&server, "?search=%27;DROP%20TABLE%20images").await.is_empty());

    let thumbnail = server.get(&format!("/v1/images/{}/thumbnail", ids[0])).await.ok();
    let thumbnail = kiln_image::from_bytes("thumbnail", &thumbnail.bytes).unwrap();
    assert_eq!((thumbnail.width(), thumbnail.height()), (320, 160));
    assert_eq!(server.get(&format!("/v1/images/{}/recipe", ids[0])).await.ok().json()["prompt"], "a red fox");
    assert_eq!(server.get(&format!("/v1/images/{}", ids[0])).await.ok().json()["width"], 640);

    let files = || std::fs::read_dir(server.folder().path().join("pictures")).unwrap().count();
    assert_eq!(files(), 4);
    server.delete(&format!("/v1/images/{}", ids[0])).await.ok();
    assert_eq!(files(), 2, "the image and its thumbnail are deleted");
    server.get(&format!("/v1/images/{}/file", ids[0])).await.expect_error(404, "not_found");
    server.delete(&format!("/v1/images/{}", ids[0])).await.expect_error(404, "not_found");
    assert_eq!(prompts(&server, "").await.len(), 2);
    server.get(&format!("/v1/images?before={}", ids[0])).await.expect_error(404, "not_found");
}

#[tokio::test]
async fn the_oldest_images_are_deleted() {
    let folder = std::sync::Arc::new(tempfile::TempDir::new().unwrap());
    let server = TestServer::open(folder.clone(), |_| {}, true);
    for prompt in ["a", "b", "c"] {
        server.post("/v1/images/generations", json!({ "prompt": prompt })).await.ok();
    }
    server.inner.close();
    drop(server);
    let server = TestServer::open(folder.clone(), |config| config.gallery.images = 2, true);
    assert_eq!(prompts(&server, "").await, ["c", "b"]);
    // By bytes, when the next job starts: room for two images.
    let id = server.get("/v1/images").await.json()["data"][0]["id"].as_str().unwrap().to_owned();
    let bytes = server.get(&format!("/v1/images/{id}")).await.json()["bytes"].as_u64().unwrap();
    server.inner.close();
    drop(server);
    let server = TestServer::open(folder, |config| config.gallery.bytes = Some(2 * bytes + bytes / 2), true);
    for prompt in ["d", "e", "f"] {
        server.post("/v1/images/generations", json!({ "prompt": prompt })).await.ok();
    }
    let left = prompts(&server, "").await;
    assert!(left.len() < 4 && left.starts_with(&["f".into(), "e".into()]), "{left:?}");
}

#[tokio::test]
async fn earlier_names_are_still_read() {
    let server = TestServer::new();
    let generated = server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok().json();
    let id = generated["data"][0]["id"].as_str().unwrap();
    let [earlier, now] = ["pictures", "images"].map(|name| format!("/v1/{name}/{id}"));
    assert_eq!(server.get(&earlier).await.ok().json(), server.get(&now).await.ok().json());
    assert_eq!(server.get("/v1/pictures").await.ok().json()["data"].as_array().unwrap().len(), 1);
    for prefix in ["picture", "image"] {
        server.submit(json!({ "prompt": "a hen", "references": [format!("{prefix}:{id}")] })).await;
    }
    let x = json!({ "field": "steps", "values": [1] });
    server.post("/v1/plots", json!({ "order": { "prompt": "a" }, "x": x })).await.ok();
}
