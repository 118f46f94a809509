//! Over a real socket: clients that go away, send half of it, or don't read.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::kit::{Kit, decode};

async fn start(kit: &Kit) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(kiln_server::serve(kit.server.clone(), listener, std::future::pending()));
    address
}

fn request(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

async fn answer(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_picture_goes_over_the_wire() {
    let kit = Kit::new();
    let mut stream = TcpStream::connect(start(&kit).await).await.unwrap();
    let body = json!({ "prompt": "a fox", "size": "256x256" }).to_string();
    stream.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
    let answer = answer(&mut stream).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(decode(&body["data"][0]["b64_json"]).width(), 256);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_cancels_its_work() {
    let kit = Kit::new();
    let address = start(&kit).await;
    for stream in [false, true] {
        let mut connection = TcpStream::connect(address).await.unwrap();
        let body = json!({ "prompt": "slow", "steps": 200, "stream": stream }).to_string();
        connection.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
        while !kit.get("/metrics").await.text().contains("kiln_running 1\n") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(connection);
        let gone = Instant::now();
        while kit.get("/metrics").await.text().contains("kiln_running 1\n") {
            assert!(gone.elapsed() < Duration::from_secs(3), "two hundred steps would take ten seconds");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let jobs = kit.get("/v1/jobs").await.json();
    assert!(jobs["data"].as_array().unwrap().iter().all(|job| job["status"] == "cancelled"), "{jobs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_request_is_given_up() {
    let kit = Kit::new();
    let mut stream = TcpStream::connect(start(&kit).await).await.unwrap();
    let whole = request("/v1/jobs", &json!({ "prompt": "a fox" }).to_string());
    stream.write_all(&whole.as_bytes()[..whole.len() - 4]).await.unwrap();
    let answer = answer(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    let mut cut = TcpStream::connect(start(&kit).await).await.unwrap();
    cut.write_all(&whole.as_bytes()[..whole.len() - 4]).await.unwrap();
    drop(cut);
    kit.get("/healthz").await.ok();
    assert!(kit.seen.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_not_taken_is_given_up() {
    let kit = Kit::with(|config| config.limits.connections = 1);
    let address = start(&kit).await;
    let made =
        kit.post("/v1/images/generations", json!({ "prompt": "a", "size": "2048x2048" })).await.ok().json();
    let picture = made["data"][0]["picture"].as_str().unwrap();
    // Plain pictures are small files: ask for many on one connection, and read none.
    let mut lazy = TcpStream::connect(address).await.unwrap();
    let ask = format!("GET /v1/pictures/{picture}/file HTTP/1.1\r\nHost: localhost\r\n\r\n").repeat(2000);
    let asking = tokio::time::timeout(Duration::from_secs(20), async {
        let sent = lazy.write_all(ask.as_bytes()).await;
        // The only place is free again when the lazy one is thrown out.
        let mut other = TcpStream::connect(address).await.unwrap();
        other
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        (sent.is_err(), answer(&mut other).await)
    });
    let (_, answer) = asking.await.expect("the lazy reader keeps its place");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_finishes_the_picture_that_somebody_waits_for() {
    let kit = Kit::with(|config| config.grace = Duration::from_secs(10));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(kiln_server::serve(kit.server.clone(), listener, async {
        let _ = stopped.await;
    }));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = json!({ "prompt": "slow", "steps": 8 }).to_string();
    stream.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
    while !kit.get("/metrics").await.text().contains("kiln_running 1\n") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.send(()).unwrap();
    let answer = answer(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    serving.await.unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}
