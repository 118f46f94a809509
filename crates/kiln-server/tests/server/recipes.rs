//! Recipes inside uploaded images.

use kiln_image::{Format, RgbImage};
use serde_json::{Value, json};

use crate::harness::{TestServer, png};
use axum::body::Body;
use axum::http::{Request, header};

async fn uploaded(server: &TestServer, bytes: Vec<u8>) -> Value {
    let request = Request::post("/v1/inputs")
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/octet-stream");
    server.send(request.body(Body::from(bytes)).unwrap()).await.ok().json()
}

async fn upload(server: &TestServer, bytes: Vec<u8>) -> String {
    uploaded(server, bytes).await["id"].as_str().unwrap().to_owned()
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
    let order = &found["request"];
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

#[tokio::test]
async fn hostile_recipes_are_refused_in_few_words() {
    let server = TestServer::new();
    let valid = json!({
        "kiln": "0.1.0", "prompt": "a fox", "seed": 1, "index": 0, "batch": 1, "width": 64, "height": 96,
        "model": { "path": "large", "variant": "klein", "transformer": "aa" }, "dtype": "f32", "backend": "cpu",
    });
    let long = "<script>alert(1)</script>".repeat(20_000);
    let lora = |weight: f64| json!({ "name": "<script>", "weight": weight });
    let nested = "[".repeat(100_000);
    let many = vec![json!({ "path": "/x/r.png", "sha256": "00" }); 1000];
    for (field, value, words) in [
        ("prompt", json!(long), "a prompt of 500000 bytes; the limit is 8000"),
        ("prompt", json!({ "a": 1 }), "invalid recipe"),
        ("width", json!(-5), "invalid recipe"),
        ("width", json!(1e300), "invalid recipe"),
        ("steps", json!("<img src=x onerror=alert(1)>"), "invalid recipe"),
        ("schedule", json!(long), "invalid recipe: unknown variant"),
        ("model", json!(nested), "invalid recipe"),
        ("loras", json!(vec![lora(1.0); 9]), "more images or LoRAs"),
        ("loras", json!([lora(1e300)]), "the number 1e300 is out of range"),
        ("references", json!(many), "more images or LoRAs"),
    ] {
        let mut recipe = valid.clone();
        recipe[field] = value;
        let image =
            kiln_image::encode(&RgbImage::black(16, 16), Format::Png, Some(&recipe.to_string())).unwrap();
        let input = uploaded(&server, image).await;
        assert_eq!((&input["recipe"], &input["recipe_error"]), (&json!(true), &Value::Null));
        let id = input["id"].as_str().unwrap();
        let answer = server.get(&format!("/v1/inputs/{id}/recipe")).await;
        let answer = answer.expect_error(400, "invalid_request").json();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words) && message.len() < 500, "{field}: {message}");
    }
    let mut recipe = valid.clone();
    recipe["loras"] = json!([{ "name": format!("/x/{long}"), "weight": 1 }]);
    let image = kiln_image::encode(&RgbImage::black(16, 16), Format::Png, Some(&recipe.to_string())).unwrap();
    let input = upload(&server, image).await;
    let found = server.get(&format!("/v1/inputs/{input}/recipe")).await.ok().json();
    assert!(found["missing"][0].as_str().unwrap().len() <= 400);

    let large =
        kiln_image::encode(&RgbImage::black(16, 16), Format::Png, Some(&"a".repeat(3 << 20))).unwrap();
    let input = uploaded(&server, large).await;
    let expected = "the recipe is damaged or longer than 1 MiB";
    assert_eq!((&input["recipe"], &input["recipe_error"]), (&json!(false), &json!(expected)));
    let id = input["id"].as_str().unwrap();
    server.get(&format!("/v1/inputs/{id}/recipe")).await.expect_error(400, "invalid_request");
}
