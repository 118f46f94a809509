//! The web page: static files built into the program.

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

macro_rules! assets {
    ($($name:literal: $media_type:literal),* $(,)?) => {
        [$(($name, $media_type, include_bytes!(concat!("../page/", $name)) as &[u8])),*]
    };
}

const ASSETS: &[(&str, &str, &[u8])] = &assets![
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "advanced.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "compare.js": "text/javascript; charset=utf-8",
    "connection.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "form.js": "text/javascript; charset=utf-8",
    "gallery.js": "text/javascript; charset=utf-8",
    "inputs.js": "text/javascript; charset=utf-8",
    "jobs.js": "text/javascript; charset=utf-8",
    "keys.js": "text/javascript; charset=utf-8",
    "loras.js": "text/javascript; charset=utf-8",
    "mask.js": "text/javascript; charset=utf-8",
    "models.js": "text/javascript; charset=utf-8",
    "notices.js": "text/javascript; charset=utf-8",
    "plot.js": "text/javascript; charset=utf-8",
    "prompts.js": "text/javascript; charset=utf-8",
    "queue.js": "text/javascript; charset=utf-8",
    "rewrite.js": "text/javascript; charset=utf-8",
    "seed.js": "text/javascript; charset=utf-8",
    "size.js": "text/javascript; charset=utf-8",
    "stage.js": "text/javascript; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "zoom.js": "text/javascript; charset=utf-8",
    "manifest.webmanifest": "application/manifest+json",
    "icon.svg": "image/svg+xml",
    "icon-192.png": "image/png",
    "icon-512.png": "image/png",
];

pub(crate) fn routes() -> Router<Server> {
    let mut router = Router::new();
    for (name, media_type, bytes) in ASSETS {
        let show = async move || file(media_type, bytes);
        router = router.route(&format!("/page/{name}"), get(show));
        match *name {
            "index.html" => router = router.route("/", get(show)),
            "icon.svg" => router = router.route("/favicon.ico", get(show)),
            _ => {}
        }
    }
    router
}

fn file(media_type: &'static str, bytes: &'static [u8]) -> Response {
    let mut response = response(StatusCode::OK, media_type, Bytes::from_static(bytes));
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
