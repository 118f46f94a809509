//! Favourites, and the trash with undo.

use serde_json::{Value, json};

use crate::harness::TestServer;

async fn ids(server: &TestServer, query: &str) -> Vec<String> {
    let list = server.get(&format!("/v1/images{query}")).await.ok().json();
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
    let patch = async |body: Value| server.send_as("me", "PATCH", "/v1/images", body).await;

    let marked = patch(json!({ "ids": [all[0], all[2]], "trash": true })).await.ok().json();
    assert!(marked["data"][1]["trashed"].is_i64());
    assert_eq!(ids(&server, "").await, all[1..2]);
    assert_eq!(ids(&server, "?trash=true").await, [all[0].clone(), all[2].clone()]);
    server.get(&format!("/v1/images/{}/file", all[0])).await.ok();
    let restored = patch(json!({ "ids": [all[0], all[2]], "trash": false })).await.ok().json();
    assert!(restored["data"][0]["trashed"].is_null());
    assert_eq!(ids(&server, "").await, all, "in their old order");

    patch(json!({ "ids": [all[1]], "favourite": true })).await.ok();
    assert_eq!(ids(&server, "?favourite=true").await, all[1..2]);
    let list = server.get("/v1/images").await.ok().json();
    assert_eq!((&list["data"][0]["favourite"], &list["data"][1]["favourite"]), (&json!(false), &json!(true)));
    patch(json!({ "ids": ["none"], "favourite": true })).await.expect_error(404, "not_found");
    patch(json!({ "ids": [], "unknown": true })).await.expect_error(400, "invalid_request");
    server.delete(&format!("/v1/images/{}", all[1])).await.ok();
    assert!(ids(&server, "?favourite=true").await.is_empty());
}

#[tokio::test]
async fn a_thousand_images_are_marked_at_once_and_no_more() {
    let server = TestServer::new();
    let job = server.submit(json!({ "prompt": "a fox" })).await;
    server.wait(&job).await;
    let db = rusqlite::Connection::open(server.folder().path().join("queue.sqlite")).unwrap();
    // Copies of the image, with ids of their own.
    db.execute_batch(
        "CREATE TEMP TABLE copies AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)
             SELECT * FROM pictures, n;
         UPDATE copies SET id = id || '-' || i, seq = seq + i;
         ALTER TABLE copies DROP COLUMN i;
         INSERT INTO pictures SELECT * FROM copies;",
    )
    .unwrap();
    let mut rows = db.prepare("SELECT id FROM pictures").unwrap();
    let all: Vec<String> = rows.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    assert_eq!(all.len(), 1001);
    let star = async |ids: &[String]| {
        server.send_as("me", "PATCH", "/v1/images", json!({ "ids": ids, "favourite": true })).await
    };
    let favourites =
        || db.query_row("SELECT count(*) FROM marks WHERE favourite", [], |row| row.get::<_, u32>(0));
    star(&all).await.expect_error(400, "invalid_request");
    assert_eq!(favourites().unwrap(), 0, "all or none");
    let marked = star(&all[..1000]).await.ok().json();
    assert!(marked["data"].as_array().unwrap().iter().all(|image| image["favourite"] == true));
    assert_eq!(favourites().unwrap(), 1000);
    star(&all[1000..]).await.ok();
    assert_eq!(favourites().unwrap(), 1001);
}
