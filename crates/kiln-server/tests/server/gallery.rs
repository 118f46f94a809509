//! Pictures that were made.

use serde_json::{Value, json};

use crate::kit::Kit;

async fn names(kit: &Kit, query: &str) -> Vec<String> {
    let list = kit.get(&format!("/v1/pictures{query}")).await.ok().json();
    let name = |picture: &Value| picture["order"]["prompt"].as_str().unwrap().to_owned();
    list["data"].as_array().unwrap().iter().map(name).collect()
}

#[tokio::test]
async fn pictures_are_listed_searched_and_deleted() {
    let kit = Kit::new();
    let mut ids = Vec::new();
    for prompt in ["a red fox", "a blue hen", "100% fox_trot"] {
        let made = kit
            .post("/v1/images/generations", json!({ "prompt": prompt, "size": "640x320" }))
            .await
            .ok()
            .json();
        ids.push(made["data"][0]["picture"].as_str().unwrap().to_owned());
    }
    assert_eq!(names(&kit, "").await, ["100% fox_trot", "a blue hen", "a red fox"]);
    assert_eq!(names(&kit, "?search=FOX").await, ["100% fox_trot", "a red fox"]);
    assert_eq!(names(&kit, "?search=fox%20red").await, ["a red fox"]);
    assert_eq!(names(&kit, "?search=0%25").await, ["100% fox_trot"]);
    assert_eq!(names(&kit, "?search=x_t").await, ["100% fox_trot"], "no wildcards");
    assert_eq!(names(&kit, &format!("?limit=1&before={}", ids[2])).await, ["a blue hen"]);
    assert!(names(&kit, "?search=%27;DROP%20TABLE%20pictures").await.is_empty());

    let small = kit.get(&format!("/v1/pictures/{}/thumbnail", ids[0])).await.ok();
    let small = kiln_image::from_bytes("small", &small.bytes).unwrap();
    assert_eq!((small.width(), small.height()), (320, 160));
    assert_eq!(kit.get(&format!("/v1/pictures/{}/recipe", ids[0])).await.ok().json()["prompt"], "a red fox");
    assert_eq!(kit.get(&format!("/v1/pictures/{}", ids[0])).await.ok().json()["width"], 640);

    let files = || std::fs::read_dir(kit.folder().path().join("pictures")).unwrap().count();
    assert_eq!(files(), 4);
    kit.delete(&format!("/v1/pictures/{}", ids[0])).await.ok();
    assert_eq!(files(), 2, "the picture and its small form are gone");
    kit.get(&format!("/v1/pictures/{}/file", ids[0])).await.refused(404, "not_found");
    kit.delete(&format!("/v1/pictures/{}", ids[0])).await.refused(404, "not_found");
    assert_eq!(names(&kit, "").await.len(), 2);
}

#[tokio::test]
async fn the_oldest_pictures_make_room() {
    let folder = std::sync::Arc::new(tempfile::TempDir::new().unwrap());
    let kit = Kit::open(folder.clone(), |_| {}, true);
    for prompt in ["a", "b", "c"] {
        kit.post("/v1/images/generations", json!({ "prompt": prompt })).await.ok();
    }
    drop(kit);
    let kit = Kit::open(folder, |config| config.keep = 2, true);
    assert_eq!(names(&kit, "").await, ["c", "b"]);
}
