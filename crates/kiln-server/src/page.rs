//! The web page: static files built into the program, packed by its build script.

use axum::Router;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;

use crate::Server;
use crate::api::response;

/// Content security policy: the page loads only its own files and can't be framed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; \
                      connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The media type of a file, by its extension.
fn media_type(name: &str) -> &'static str {
    match name.rsplit('.').next().unwrap_or_default() {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" => "text/javascript; charset=utf-8",
        "webmanifest" => "application/manifest+json",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        _ => "application/octet-stream",
    }
}

pub(crate) fn routes() -> Router<Server> {
    let mut router = Router::new();
    for (name, bytes) in kiln_pack::unpack(include_bytes!(concat!(env!("OUT_DIR"), "/page.packed"))) {
        let (media_type, bytes) = (media_type(&name), Bytes::from(bytes));
        let show = async move || file(media_type, bytes);
        router = router.route(&format!("/page/{name}"), get(show.clone()));
        match name.as_str() {
            "index.html" => router = router.route("/", get(show)),
            "icon.svg" => router = router.route("/favicon.ico", get(show)),
            _ => {}
        }
    }
    router
}

fn file(media_type: &'static str, bytes: Bytes) -> Response {
    let mut response = response(StatusCode::OK, media_type, bytes);
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
