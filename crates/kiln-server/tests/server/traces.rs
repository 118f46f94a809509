//! Traces, received by a collector of the test's own.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kiln_server::TraceConfig;
use kiln_server::fleet::open_gateway;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fleet::node::SleepingGenerator;
use crate::harness::{TestServer, post};
use crate::nats::{Nats, TestWorker, fleet};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Answers every request, and passes the spans on, each with its service.
fn collector() -> (String, Receiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, spans) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let mut stream = BufReader::new(stream.unwrap());
                loop {
                    let (mut line, mut length) = (String::new(), 0);
                    while stream.read_line(&mut line).unwrap_or(0) > 2 {
                        let lower = line.to_lowercase();
                        let value = lower.strip_prefix("content-length:");
                        length = value.map_or(length, |value| value.trim().parse().unwrap());
                        line.clear();
                    }
                    if length == 0 {
                        return;
                    }
                    let mut body = vec![0; length];
                    stream.read_exact(&mut body).unwrap();
                    stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap();
                    let message: Value = serde_json::from_slice(&body).unwrap();
                    let resource = &message["resourceSpans"][0];
                    let service = &resource["resource"]["attributes"][0]["value"]["stringValue"];
                    for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
                        let _ = sender.send((service.as_str().unwrap().to_owned(), span.clone()));
                    }
                }
            });
        }
    });
    (address, spans)
}

fn traced_job() -> axum::http::Request<axum::body::Body> {
    let mut request = post("/v1/jobs", json!({ "prompt": "a" }));
    request.headers_mut().insert("traceparent", PARENT.parse().unwrap());
    request
}

fn traces(endpoint: &str, service: &str) -> Option<TraceConfig> {
    Some(TraceConfig { endpoint: endpoint.to_owned(), service: service.to_owned() })
}

/// Receives spans until the one that ends a job.
fn until_generated(spans: &Receiver<(String, Value)>) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    while !(found.iter().any(|(_, span): &(String, Value)| span["name"] == "generate")
        && found.iter().any(|(_, span)| span["name"] == "submit"))
    {
        found.push(spans.recv_timeout(Duration::from_secs(20)).unwrap());
    }
    found
}

fn check(spans: &[(String, Value)], services: [&str; 2]) {
    let named = |name: &str| &spans.iter().find(|(_, span)| span["name"] == name).unwrap().1;
    assert!(spans.iter().all(|(_, span)| span["traceId"] == "0af7651916cd43dd8448eb211c80319c"), "{spans:?}");
    let (submit, queue, generate, steps) =
        (named("submit"), named("queue"), named("generate"), named("steps"));
    assert_eq!(submit["parentSpanId"], "b7ad6b7169203331");
    assert_eq!((&queue["parentSpanId"], &generate["parentSpanId"]), (&submit["spanId"], &submit["spanId"]));
    assert_eq!(steps["parentSpanId"], generate["spanId"]);
    let time = |span: &Value, key: &str| span[key].as_str().unwrap().parse::<u128>().unwrap();
    assert!(time(generate, "startTimeUnixNano") < time(generate, "endTimeUnixNano"));
    assert!(time(steps, "startTimeUnixNano") >= time(generate, "startTimeUnixNano"));
    for (name, service) in ["submit", "generate"].into_iter().zip(services) {
        assert!(spans.iter().any(|(of, span)| span["name"] == name && of == service), "{spans:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_one_trace_from_request_to_image() {
    let (endpoint, spans) = collector();
    let server = TestServer::with(|config| config.traces = traces(&endpoint, "one"));
    server.send(traced_job()).await.ok();
    let spans = tokio::task::spawn_blocking(move || until_generated(&spans)).await.unwrap();
    check(&spans, ["one", "one"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_goes_on_in_a_worker() {
    let Some(nats) = Nats::start() else { return };
    let (endpoint, spans) = collector();
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::with_config(config.clone(), folder.path(), |config| {
        config.traces = traces(&endpoint, "worker");
    });
    worker.generate(SleepingGenerator(Duration::from_millis(20)));
    let mut of_gateway = kiln_server::Config::new(folder.path().join("gateway"));
    of_gateway.traces = traces(&endpoint, "gateway");
    let server = TestServer::of(open_gateway(of_gateway, config).unwrap());
    server.send(traced_job()).await.ok();
    let spans = tokio::task::spawn_blocking(move || until_generated(&spans)).await.unwrap();
    check(&spans, ["gateway", "worker"]);
}
