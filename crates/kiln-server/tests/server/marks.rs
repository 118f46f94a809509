//! Favourites, and the trash with undo.

use serde_json::{Value, json};

use crate::harness::TestServer;

async fn ids(server: &TestServer, query: &str) -> Vec<String> {
    let list = server.get(&format!("/v1/pictures{query}")).await.ok().json();
    let id = |image: &Value| image["id"].as_str().unwrap().to_owned();
    list["data"].as_array().unwrap().iter().map(id).collect()
}

#[tokio::test]
async fn images_go_to_the_trash_and_back_and_become_favourites() {
    let server = TestServer::new();
    let job = server.submit(json!({ "prompt": "a fox", "n": 3 })).await;
    server.wait(&job).await;
    let all = ids(&server, "").await;
    assert_eq!(all.len(), 3);
    let patch = async |body: Value| server.send_as("me", "PATCH", "/v1/pictures", body).await;

    let marked = patch(json!({ "ids": [all[0], all[2]], "trash": true })).await.ok().json();
    assert!(marked["data"][1]["trashed"].is_i64());
    assert_eq!(ids(&server, "").await, all[1..2]);
    assert_eq!(ids(&server, "?trash=true").await, [all[0].clone(), all[2].clone()]);
    server.get(&format!("/v1/pictures/{}/file", all[0])).await.ok();
    let restored = patch(json!({ "ids": [all[0], all[2]], "trash": false })).await.ok().json();
    assert!(restored["data"][0]["trashed"].is_null());
    assert_eq!(ids(&server, "").await, all, "in their old order");

    patch(json!({ "ids": [all[1]], "favourite": true })).await.ok();
    assert_eq!(ids(&server, "?favourite=true").await, all[1..2]);
    let list = server.get("/v1/pictures").await.ok().json();
    assert_eq!((&list["data"][0]["favourite"], &list["data"][1]["favourite"]), (&json!(false), &json!(true)));
    patch(json!({ "ids": ["none"], "favourite": true })).await.expect_error(404, "not_found");
    patch(json!({ "ids": [], "unknown": true })).await.expect_error(400, "invalid_request");
    server.delete(&format!("/v1/pictures/{}", all[1])).await.ok();
    assert!(ids(&server, "?favourite=true").await.is_empty());
}
