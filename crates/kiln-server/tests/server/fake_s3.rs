//! A small S3 service for the tests: one bucket, `images`, in memory, for one access key. Lists have two objects a page.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

/// The access key that is known.
pub const KEY: &str = "test-key";

const PAGE: usize = 2;

#[derive(Clone)]
struct Object {
    bytes: Vec<u8>,
    is_old: bool,
}

#[derive(Default)]
struct Contents {
    objects: BTreeMap<String, Object>,
    refusing_until: Option<Instant>,
}

/// The running service.
pub struct FakeS3 {
    port: u16,
    contents: Arc<Mutex<Contents>>,
}

impl FakeS3 {
    pub async fn start() -> FakeS3 {
        let contents = Arc::new(Mutex::new(Contents::default()));
        let app = Router::new().fallback(answer).with_state(Arc::clone(&contents));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let service = hyper_util::service::TowerToHyperService::new(app.clone());
                let io = hyper_util::rt::TokioIo::new(stream);
                tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, service));
            }
        });
        FakeS3 { port, contents }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn names(&self) -> Vec<String> {
        self.contents.lock().unwrap().objects.keys().cloned().collect()
    }

    /// Adds an object of long ago.
    pub fn insert_old(&self, name: &str) {
        let object = Object { bytes: b"old".to_vec(), is_old: true };
        self.contents.lock().unwrap().objects.insert(name.to_owned(), object);
    }

    pub fn replace(&self, name: &str, bytes: &[u8]) {
        self.contents.lock().unwrap().objects.get_mut(name).unwrap().bytes = bytes.to_vec();
    }

    /// Answers every request with an error for a while.
    pub fn refuse_for(&self, time: Duration) {
        self.contents.lock().unwrap().refusing_until = Some(Instant::now() + time);
    }
}

fn error(status: StatusCode, code: &str) -> Response {
    (status, format!("<Error><Code>{code}</Code><Message>on purpose</Message></Error>")).into_response()
}

async fn answer(
    State(contents): State<Arc<Mutex<Contents>>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut contents = contents.lock().unwrap();
    if contents.refusing_until.is_some_and(|until| Instant::now() < until) {
        return error(StatusCode::SERVICE_UNAVAILABLE, "SlowDown");
    }
    let signed = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !signed.starts_with(&format!("AWS4-HMAC-SHA256 Credential={KEY}/")) {
        return error(StatusCode::FORBIDDEN, "InvalidAccessKeyId");
    }
    let path = uri.path().trim_start_matches('/');
    let (bucket, name) = path.split_once('/').unwrap_or((path, ""));
    if bucket != "images" {
        return error(StatusCode::NOT_FOUND, "NoSuchBucket");
    }
    let objects = &mut contents.objects;
    match method {
        Method::GET if name.is_empty() => list(objects, uri.query().unwrap_or_default()),
        Method::POST if uri.query() == Some("delete") => {
            let text = String::from_utf8_lossy(&body);
            let keys = text.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next());
            let deleted = keys.map(|key| {
                objects.remove(key);
                format!("<Deleted><Key>{key}</Key></Deleted>")
            });
            format!("<DeleteResult>{}</DeleteResult>", deleted.collect::<String>()).into_response()
        }
        Method::POST => error(StatusCode::NOT_IMPLEMENTED, "NotImplemented"),
        Method::PUT => {
            objects.insert(name.to_owned(), Object { bytes: body.to_vec(), is_old: false });
            [(header::ETAG, "\"1\"")].into_response()
        }
        Method::DELETE => {
            objects.remove(name);
            StatusCode::NO_CONTENT.into_response()
        }
        _ => match objects.get(name) {
            None => error(StatusCode::NOT_FOUND, "NoSuchKey"),
            Some(object) => {
                let head =
                    [(header::ETAG, "\"1\""), (header::LAST_MODIFIED, "Wed, 21 Oct 2015 07:28:00 GMT")];
                (head, object.bytes.clone()).into_response()
            }
        },
    }
}

fn list(objects: &BTreeMap<String, Object>, query: &str) -> Response {
    let value = |name: &str| {
        let found = query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
        found.map_or(String::new(), |(_, value)| value.replace("%2F", "/"))
    };
    let (prefix, after) = (value("prefix"), value("continuation-token"));
    let mut found = objects.iter().filter(|(name, _)| name.starts_with(&prefix) && **name > after).peekable();
    let mut text = String::from("<ListBucketResult>");
    let mut last = "";
    for (name, object) in found.by_ref().take(PAGE) {
        // The far future is younger than now.
        let modified = if object.is_old { "2015-10-21T07:28:00.000Z" } else { "2199-01-01T00:00:00.000Z" };
        text += &format!(
            "<Contents><Key>{name}</Key><LastModified>{modified}</LastModified><ETag>\"1\"</ETag><Size>{}</Size></Contents>",
            object.bytes.len()
        );
        last = name;
    }
    let more = found.peek().is_some();
    if more {
        text += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
    }
    text += &format!("<IsTruncated>{more}</IsTruncated></ListBucketResult>");
    text.into_response()
}
