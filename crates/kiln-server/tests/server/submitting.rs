//! Submitting jobs: idempotency keys, locations, webhooks; and streams that are resumed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_server::WebhookConfig;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{TestResponse, TestServer, events, png, post};

async fn submit_with_key(server: &TestServer, key: &str, body: Value) -> TestResponse {
    let mut request = post("/v1/jobs", body);
    request.headers_mut().insert("idempotency-key", key.parse().unwrap());
    server.send(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_the_same_key_returns_the_same_job() {
    let folder = Arc::new(TempDir::new().unwrap());
    let server = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let body = json!({ "prompt": "a fox", "n": 2 });
    let all = (0..8).map(|_| submit_with_key(&server, "k1", body.clone()));
    let all = futures_util::future::join_all(all).await;
    let replayed = all.iter().filter(|r| r.headers.contains_key("idempotency-replayed")).count();
    assert_eq!(replayed, 7, "one of them made the job");
    let ids: Vec<Value> = all.into_iter().map(|r| r.ok().json()["id"].clone()).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    submit_with_key(&server, "k1", json!({ "prompt": "other" })).await.expect_error(422, "idempotency_key");
    assert_ne!(submit_with_key(&server, "k2", body.clone()).await.ok().json()["id"], ids[0]);
    submit_with_key(&server, "", body.clone()).await.expect_error(400, "invalid_request");
    drop(server);
    let server = TestServer::open(folder, |_| {}, false);
    let again = submit_with_key(&server, "k1", body).await.ok();
    assert_eq!(again.json()["id"], ids[0], "the key survives a restart");
    assert_eq!(server.get("/v1/jobs").await.json()["data"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_different_requests_with_one_key_at_one_time_the_first_counts() {
    let server = TestServer::open(Arc::new(TempDir::new().unwrap()), |_| {}, false);
    for round in 0..8 {
        let key = format!("k{round}");
        let all = (0..8).map(|n| submit_with_key(&server, &key, json!({ "prompt": "a fox", "seed": n })));
        let all = futures_util::future::join_all(all).await;
        let accepted = all.iter().filter(|response| response.status.is_success()).count();
        assert_eq!(accepted, 1, "the others asked for something else");
        assert!(all.iter().all(|response| matches!(response.status.as_u16(), 202 | 422)));
        server.delete("/v1/queue").await.ok();
    }
}

#[tokio::test]
async fn what_is_created_has_a_location() {
    let server = TestServer::new();
    let job = server.post("/v1/jobs", json!({ "prompt": "a fox" })).await.ok();
    let found = server.get(job.headers[header::LOCATION].to_str().unwrap()).await.ok();
    assert_eq!(found.json()["id"], job.json()["id"]);
    let upload = Request::post("/v1/inputs").header(header::HOST, "localhost");
    let input = server.send(upload.body(Body::from(png(32, 32))).unwrap()).await.ok();
    assert_eq!(server.get(input.headers[header::LOCATION].to_str().unwrap()).await.ok().bytes, png(32, 32));
}

async fn stream(server: &TestServer, id: &str, last: Option<&str>) -> TestResponse {
    let mut request = Request::get(format!("/v1/jobs/{id}/events")).header(header::HOST, "localhost");
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    server.send(request.body(Body::empty()).unwrap()).await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_continues_after_the_last_event_that_a_client_saw() {
    let server = TestServer::new();
    let id = server.submit(json!({ "prompt": "a fox", "n": 3 })).await;
    let whole = stream(&server, &id, None).await;
    assert!(whole.text().starts_with("retry: "), "{}", whole.text());
    let ids: Vec<&str> = whole.text().lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(*ids.last().unwrap(), "3-end");
    let unique: std::collections::HashSet<_> = ids.iter().collect();
    assert_eq!(unique.len(), ids.len());
    let names = |response: &TestResponse| {
        events(response.text())
            .into_iter()
            .map(|(name, _)| name)
            .filter(|n| n != "progress")
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&whole), ["image", "image", "image", "end"]);
    // The connection broke after the first image.
    let seen = ids.iter().find(|id| id.starts_with("1-")).unwrap();
    let rest = stream(&server, &id, Some(seen)).await;
    assert_eq!(names(&rest), ["image", "image", "end"]);
    assert_eq!(events(rest.text())[0].1["number"], 1);
    assert_eq!(stream(&server, &id, Some("3-end")).await.status.as_u16(), 204, "nothing more comes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_a_stopping_server_ends_goes_on_at_the_next_start() {
    let folder = Arc::new(TempDir::new().unwrap());
    let server = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let id = server.submit(json!({ "prompt": "a fox" })).await;
    let stop = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        server.inner.close();
    };
    let (stopped, ()) = tokio::join!(stream(&server, &id, None), stop);
    let last =
        stopped.text().lines().filter_map(|line| line.strip_prefix("id: ")).next_back().unwrap().to_owned();
    drop(server);
    let server = TestServer::open(folder, |_| {}, true);
    let resumed = stream(&server, &id, Some(&last)).await;
    let last = events(resumed.text()).pop().expect("the job goes on, so must its events");
    assert_eq!((last.0.as_str(), &last.1["status"]), ("end", &json!("done")));
}

/// Receives one call of a webhook and answers with `status`; returns its headers and body.
pub fn receive(listener: &TcpListener, status: &str) -> (Vec<(String, String)>, String) {
    let (mut stream, _) = listener.accept().unwrap();
    let (head, body) = read_call(&mut stream);
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
    let headers = head.lines().skip(1).filter_map(|line| line.split_once(": "));
    (headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect(), body)
}

fn read_call(stream: &mut TcpStream) -> (String, String) {
    let mut bytes = Vec::new();
    loop {
        let mut part = [0; 4096];
        let count = stream.read(&mut part).unwrap();
        bytes.extend(&part[..count]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
            if body.len() >= length.unwrap_or(0) {
                return (head.to_owned(), body.to_owned());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_called_and_signed_and_called_again_if_it_fails() {
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let server = TestServer::with(|config| config.webhooks = Some(WebhookConfig::new(SECRET, true).unwrap()));
    let calls =
        std::thread::spawn(move || [receive(&listener, "503 Busy"), receive(&listener, "204 No Content")]);
    let id = server.submit(json!({ "prompt": "a fox", "webhook": url })).await;
    let calls = calls.join().unwrap();
    for (headers, body) in &calls {
        let header = |name: &str| &headers.iter().find(|(known, _)| known == name).unwrap().1;
        assert_eq!(*header("webhook-id"), format!("msg_{id}"), "the same for every try");
        let call: Value = serde_json::from_str(body).unwrap();
        assert_eq!((&call["type"], &call["data"]["status"]), (&json!("job.ended"), &json!("done")));
        assert_eq!(call["data"]["id"], *id);
        let signed = header("webhook-signature").strip_prefix("v1,").unwrap();
        assert_eq!(BASE64_STANDARD.decode(signed).unwrap().len(), 32);
    }
    let pending = || {
        let db = rusqlite::Connection::open(server.folder().path().join("queue.sqlite")).unwrap();
        db.query_row("SELECT count(*) FROM webhooks", [], |row| row.get::<_, u32>(0)).unwrap()
    };
    while pending() > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn webhooks_need_a_secret_and_a_public_address() {
    let job = |url: &str| json!({ "prompt": "a fox", "webhook": url });
    let server = TestServer::new();
    server.post("/v1/jobs", job("https://example.org/")).await.expect_error(400, "not_supported");
    let secret = "0123456789abcdef";
    let server =
        TestServer::with(|config| config.webhooks = Some(WebhookConfig::new(secret, false).unwrap()));
    for url in
        ["http://127.0.0.1:1/", "http://169.254.169.254/", "http://localhost/", "gopher://example.org/"]
    {
        let response = server.post("/v1/jobs", job(url)).await.expect_error(400, "invalid_value");
        assert_eq!(response.json()["error"]["param"], "webhook");
    }
    assert!(WebhookConfig::new("short", false).is_err());
}
