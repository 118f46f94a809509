//! The web page: static files built into the program, packed by its build script.

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;

use crate::Server;
use crate::http::api::bytes_response;

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
    for (name, packed) in kiln_pack::split(include_bytes!(concat!(env!("OUT_DIR"), "/page.packed"))) {
        let file = Packed::new(packed, media_type(&name));
        let show = async move |headers: HeaderMap| page_file(file.respond(&headers));
        router = router.route(&format!("/page/{name}"), get(show.clone()));
        match name.as_str() {
            "index.html" => router = router.route("/", get(show)),
            "icon.svg" => router = router.route("/favicon.ico", get(show)),
            _ => {}
        }
    }
    router
}

fn page_file(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// A file of the program, compressed and not.
#[derive(Clone)]
pub(crate) struct Packed {
    media_type: &'static str,
    plain: Bytes,
    /// `None` if that saves little.
    gzip: Option<Bytes>,
}

impl Packed {
    pub(crate) fn new(packed: &'static [u8], media_type: &'static str) -> Packed {
        let plain = Bytes::from(kiln_pack::gunzip(packed));
        let gzip = (packed.len() < plain.len() / 8 * 7).then(|| Bytes::from_static(packed));
        Packed { media_type, plain, gzip }
    }

    /// The file, compressed for clients that accept it.
    pub(crate) fn respond(&self, headers: &HeaderMap) -> Response {
        let gzip = self.gzip.as_ref().filter(|_| accepts_gzip(headers));
        let mut response = bytes_response(gzip.unwrap_or(&self.plain).clone(), self.media_type, headers);
        if gzip.is_some() && response.status() != StatusCode::NOT_MODIFIED {
            response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept-encoding"));
        response
    }
}

/// Whether a client accepts gzip: named, or by `*`, and not with a weight of zero.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let codings = values.flat_map(|value| value.split(',')).map(|coding| {
        let (name, parameters) = coding.split_once(';').unwrap_or((coding, ""));
        let weight = parameters.trim().strip_prefix("q=").map_or(Ok(1.0), str::parse::<f32>);
        (name.trim().to_ascii_lowercase(), weight.is_ok_and(|weight| weight > 0.0))
    });
    let codings: Vec<(String, bool)> = codings.collect();
    let find = |name: &str| codings.iter().find(|(coding, _)| coding == name).map(|(_, accepted)| *accepted);
    find("gzip").or_else(|| find("*")).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_to_those_who_accept_it() {
        let accepts = |value: &str| {
            accepts_gzip(&HeaderMap::from_iter([(header::ACCEPT_ENCODING, value.parse().unwrap())]))
        };
        for yes in ["gzip", "deflate, GZIP;q=0.5, br", "*", "br, *;q=0.1", "gzip, *;q=0"] {
            assert!(accepts(yes), "{yes}");
        }
        for no in ["", "br", "identity", "gzip;q=0", "gzip;q=0, *", "*;q=0", "x-gzip2", "gzip;q=x"] {
            assert!(!accepts(no), "{no}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
