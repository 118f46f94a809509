//! The files of the page.

use std::path::Path;

use axum::http::header;

use crate::harness::TestServer;

#[tokio::test]
async fn every_file_of_the_page_is_served_and_may_load_only_its_own() {
    let server = TestServer::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("page");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let file = server.get(&format!("/page/{name}")).await.ok();
        let policy = file.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        let media_type = file.headers[header::CONTENT_TYPE].to_str().unwrap();
        let expected = match name.rsplit('.').next().unwrap() {
            "js" => "text/javascript",
            "webmanifest" => "application/manifest+json",
            "png" => "image/png",
            _ => media_type,
        };
        assert!(media_type.starts_with(expected), "{name}: {media_type}");
        files += 1;
    }
    assert!(files > 20);
    let page = server.get("/").await.ok();
    assert_eq!(page.bytes, server.get("/page/index.html").await.ok().bytes);
}
