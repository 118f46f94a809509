//! Over a real socket: clients that disconnect, send half a request, or don't read.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{TestServer, decode};

pub async fn start(server: &TestServer) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(kiln_server::serve(server.inner.clone(), listener, std::future::pending()));
    address
}

pub fn request(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

pub async fn answer(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_generated_over_a_socket() {
    let server = TestServer::new();
    let mut stream = TcpStream::connect(start(&server).await).await.unwrap();
    let body = json!({ "prompt": "a fox", "size": "256x256" }).to_string();
    stream.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
    let answer = answer(&mut stream).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(decode(&body["data"][0]["b64_json"]).width(), 256);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_cancels_its_job() {
    let server = TestServer::new();
    let address = start(&server).await;
    for stream in [false, true] {
        let mut connection = TcpStream::connect(address).await.unwrap();
        let body = json!({ "prompt": "slow", "steps": 200, "stream": stream }).to_string();
        connection.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
        while !server.get("/metrics").await.text().contains("kiln_running 1\n") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(connection);
        let disconnected = Instant::now();
        while server.get("/metrics").await.text().contains("kiln_running 1\n") {
            assert!(
                disconnected.elapsed() < Duration::from_secs(3),
                "two hundred steps would take ten seconds"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let jobs = server.get("/v1/jobs").await.json();
    assert!(jobs["data"].as_array().unwrap().iter().all(|job| job["status"] == "cancelled"), "{jobs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_smuggled_behind_two_lengths_of_a_body() {
    let server = TestServer::new();
    let address = start(&server).await;
    let lengths = ["Content-Length: 6", "Transfer-Encoding: chunked"];
    for [first, second] in [lengths, [lengths[1], lengths[0]]] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("GET /healthz HTTP/1.1\r\nHost: localhost\r\n{first}\r\n{second}\r\n\r\n");
        let smuggled = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(format!("{head}0\r\n\r\n{smuggled}").as_bytes()).await.unwrap();
        // Where a proxy would see another request, the connection ends.
        let answer = answer(&mut stream).await;
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_request_times_out() {
    let server = TestServer::new();
    let mut stream = TcpStream::connect(start(&server).await).await.unwrap();
    let whole = request("/v1/jobs", &json!({ "prompt": "a fox" }).to_string());
    stream.write_all(&whole.as_bytes()[..whole.len() - 4]).await.unwrap();
    let answer = answer(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    let mut cut = TcpStream::connect(start(&server).await).await.unwrap();
    cut.write_all(&whole.as_bytes()[..whole.len() - 4]).await.unwrap();
    drop(cut);
    server.get("/healthz").await.ok();
    assert!(server.received.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_is_not_read_times_out() {
    let server = TestServer::with(|config| config.limits.connections = 1);
    let address = start(&server).await;
    let generated = server
        .post("/v1/images/generations", json!({ "prompt": "a", "size": "2048x2048" }))
        .await
        .ok()
        .json();
    let id = generated["data"][0]["id"].as_str().unwrap();
    // Images of one colour are small files: request many on one connection, and read none.
    let mut lazy = TcpStream::connect(address).await.unwrap();
    let ask = format!("GET /v1/images/{id}/file HTTP/1.1\r\nHost: localhost\r\n\r\n").repeat(2000);
    let asking = tokio::time::timeout(Duration::from_secs(20), async {
        let sent = lazy.write_all(ask.as_bytes()).await;
        // The only place is free again when the lazy client is disconnected.
        loop {
            let mut other = TcpStream::connect(address).await.unwrap();
            let head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
            other.write_all(head).await.unwrap();
            let answer = answer(&mut other).await;
            if !answer.starts_with("HTTP/1.1 503 ") {
                return (sent.is_err(), answer);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let (_, answer) = asking.await.expect("the lazy client keeps its slot");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_finishes_the_job_of_an_attached_client() {
    let server = TestServer::with(|config| config.grace = Duration::from_secs(10));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(kiln_server::serve(server.inner.clone(), listener, async {
        let _ = stopped.await;
    }));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = json!({ "prompt": "slow", "steps": 8 }).to_string();
    stream.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
    while !server.get("/metrics").await.text().contains("kiln_running 1\n") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.send(()).unwrap();
    let answer = answer(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    serving.await.unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "the server no longer listens");
}
