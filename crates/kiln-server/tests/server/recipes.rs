//! Recipes inside uploaded images.

use kiln_image::{Format, RgbImage};
use serde_json::json;

use crate::harness::{TestServer, png};
use axum::body::Body;
use axum::http::{Request, header};

async fn upload(server: &TestServer, bytes: Vec<u8>) -> String {
    let request = Request::post("/v1/inputs")
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/octet-stream");
    let input = server.send(request.body(Body::from(bytes)).unwrap()).await.ok().json();
    input["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_uploaded_image_gives_its_settings_back_in_this_servers_names() {
    let server = TestServer::new();
    let reference = upload(&server, png(64, 64)).await;
    let hash = reference.strip_prefix("input:").unwrap();
    let recipe = json!({
        "kiln": "0.1.0", "prompt": "a fox", "seed": u64::MAX, "index": 0, "batch": 1, "width": 64, "height": 96,
        "model": { "path": "/home/me/models/large.safetensors", "variant": "klein", "transformer": "aa" },
        "loras": [{ "name": "/home/me/ink.safetensors", "weight": 0.5 }, { "name": "/home/me/wax.safetensors", "weight": 1 }],
        "references": [{ "path": "/x/r.png", "sha256": hash }, { "path": "/x/gone.png", "sha256": "00" }],
        "dtype": "f32", "backend": "cpu",
    });
    let image = RgbImage::black(16, 16);
    let bytes = kiln_image::encode(&image, Format::Png, Some(&recipe.to_string())).unwrap();
    let input = upload(&server, bytes).await;
    let found = server.get(&format!("/v1/inputs/{input}/recipe")).await.ok().json();
    let order = &found["order"];
    assert_eq!(
        (&order["model"], &order["prompt"], &order["height"]),
        (&json!("large"), &json!("a fox"), &json!(96))
    );
    assert_eq!(order["loras"], json!([{ "name": "ink", "weight": 0.5 }]));
    assert_eq!(order["references"], json!([reference]));
    assert_eq!(found["seed"], "18446744073709551615");
    assert_eq!(found["missing"], json!(["wax.safetensors", "gone.png"]));

    server.get(&format!("/v1/inputs/{reference}/recipe")).await.expect_error(404, "no_recipe");
    server.get("/v1/inputs/input:00/recipe").await.expect_error(404, "not_found");
}
