//! Grids of jobs that differ in one or two settings.

use serde_json::{Value, json};

use crate::harness::TestServer;

fn plot(x: Value, y: Value) -> Value {
    json!({ "request": { "prompt": "a fox", "n": 4 }, "x": x, "y": y })
}

#[tokio::test]
async fn a_plot_is_one_order_for_all_combinations() {
    let server = TestServer::new();
    let request = plot(
        json!({ "field": "steps", "values": [1, 2, 3] }),
        json!({ "field": "seed", "values": [7, u64::MAX] }),
    );
    let submitted = server.post("/v1/plots", request).await.ok().json();
    let id = submitted["id"].as_str().unwrap();
    for row in submitted["rows"].as_array().unwrap() {
        for job in row.as_array().unwrap() {
            assert_eq!(server.wait(job["id"].as_str().unwrap()).await["status"], "done");
        }
    }
    let done = server.get(&format!("/v1/plots/{id}")).await.ok().json();
    let cell = |y: usize, x: usize| &done["rows"][y][x];
    assert_eq!(done["rows"].as_array().unwrap().len(), 2);
    assert_eq!((&cell(0, 2)["request"]["steps"], &cell(0, 2)["request"]["seed"]), (&json!(3), &json!(7)));
    assert_eq!(cell(1, 0)["images"][0]["seed"], "18446744073709551615");
    assert_eq!(cell(1, 0)["images"].as_array().unwrap().len(), 1, "a cell is one image");
    assert_eq!(server.get("/v1/plots").await.ok().json()["data"][0]["x"]["values"], json!([1, 2, 3]));
    server.get("/v1/plots/none").await.expect_error(404, "not_found");

    let one_axis = plot(json!({ "field": "steps", "values": [1, 2] }), Value::Null);
    let rows = server.post("/v1/plots", one_axis).await.ok().json()["rows"].clone();
    assert_eq!(rows[0][0]["request"]["seed"], rows[0][1]["request"]["seed"], "one seed for all cells");
}

#[tokio::test]
async fn a_plot_is_accepted_whole_or_not_at_all() {
    let server = TestServer::open(
        std::sync::Arc::new(tempfile::TempDir::new().unwrap()),
        |config| {
            config.limits.queue = 8;
            config.api_keys = kiln_server::ApiKey::parse_file("me key-me\nother key-other").unwrap();
        },
        false,
    );
    let axis = |field: &str, values: Value| json!({ "field": field, "values": values });
    let wrong = [
        (plot(axis("steps", json!([1, 9999])), Value::Null), "\\\"steps\\\" must be between"),
        (plot(axis("steps", json!([])), Value::Null), "no values"),
        (plot(axis("references", json!(["a"])), Value::Null), "can't vary `references`"),
        (plot(axis("steps", json!([1])), axis("steps", json!([2]))), "both axes"),
        (plot(axis("steps", json!([1, 2, 3])), axis("seed", json!([1, 2]))), "6 cells, the limit is 4"),
        (plot(axis("seed", json!([[1, 2]])), Value::Null), "one image"),
    ];
    for (request, message) in wrong {
        let answer = server.send_as("me", "POST", "/v1/plots", request).await;
        assert_eq!(answer.status.as_u16(), 400);
        assert!(answer.text().contains(message), "{}", answer.text());
    }
    // Five jobs of another client leave room for three cells of four.
    for _ in 0..5 {
        server.send_as("other", "POST", "/v1/jobs", json!({ "prompt": "a hen" })).await.ok();
    }
    let four = plot(axis("steps", json!([1, 2, 3, 4])), Value::Null);
    server.send_as("me", "POST", "/v1/plots", four).await.expect_error(429, "queue_full");
    let queue = server.send_as("me", "GET", "/v1/queue", Value::Null).await.ok().json();
    assert_eq!(queue["data"], json!([]), "the accepted cells are cancelled");
}
