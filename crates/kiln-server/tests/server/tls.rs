//! HTTPS, HTTP/2 and proxies. The certificate in `tls/` is for `localhost` and these tests alone:
//! `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=localhost
//! -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE`

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Version, header};
use http_body_util::BodyExt;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kiln_server::{ApiKey, Tls};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

use crate::harness::TestServer;
use crate::socket::{answer, start};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/server/tls").join(name)
}

fn server() -> TestServer {
    TestServer::with(|config| {
        config.tls = Some(Arc::new(Tls::new(&file("certificate.pem"), &file("key.pem")).unwrap()));
        config.api_keys = vec![ApiKey::single("s3cret")];
    })
}

async fn connect(address: SocketAddr, protocol: &str) -> TlsStream<TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("certificate.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.into()];
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn browsers_log_in_over_http2_with_a_secure_cookie() {
    let server = server();
    let address = start(&server).await;
    let io = TokioIo::new(connect(address, "h2").await);
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let url = format!("https://localhost:{}", address.port());
    let login = Request::post(format!("{url}/v1/session")).header(header::ORIGIN, &url);
    let login = login.header(header::AUTHORIZATION, "Bearer s3cret").body(Body::empty()).unwrap();
    let response = client.send_request(login).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2));
    let cookie = response.headers()[header::SET_COOKIE].to_str().unwrap();
    assert!(cookie.starts_with("__Host-kiln_session=") && cookie.ends_with("; Secure"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap().to_owned();
    let get =
        |url: String, cookie: &str| Request::get(url).header(header::COOKIE, cookie).body(Body::empty());
    let models = get(format!("{url}/v1/models"), &cookie).unwrap();
    let response = client.send_request(models).await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    assert!(!response.into_body().collect().await.unwrap().to_bytes().is_empty());
    // The host is in the URI here: a foreign one is refused all the same.
    let foreign = get("https://evil.example/v1/models".into(), &cookie).unwrap();
    assert_eq!(client.send_request(foreign).await.unwrap().status().as_u16(), 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn older_clients_use_http1_and_plain_text_is_refused() {
    let server = server();
    let address = start(&server).await;
    let mut stream = connect(address, "http/1.1").await;
    let head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(head).await.unwrap();
    let mut text = Vec::new();
    // The server closes the connection without TLS's farewell, or with it.
    let _ = stream.read_to_end(&mut text).await;
    assert!(text.starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&text));
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(head).await.unwrap();
    let mut text = Vec::new();
    let _ = plain.read_to_end(&mut text).await;
    assert!(!text.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&text));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_client_that_does_not_read_is_disconnected() {
    let server = server();
    let address = start(&server).await;
    let io = TokioIo::new(connect(address, "h2").await);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    let (mut client, connection) = builder.initial_stream_window_size(1024).handshake(io).await.unwrap();
    let ended = tokio::spawn(connection);
    let url = format!("https://localhost:{}/openapi.json", address.port());
    let response = client.send_request(Request::get(url).body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    // `response` holds the stream open and takes nothing more of it.
    let ended = tokio::time::timeout(Duration::from_secs(5), ended).await;
    assert!(ended.is_ok(), "the connection stays open");
    drop(response);
}

#[test]
fn files_that_are_no_certificate_are_errors_that_name_them() {
    let error =
        |certificate: &str, key: &str| Tls::new(&file(certificate), &file(key)).unwrap_err().to_string();
    assert!(error("none.pem", "key.pem").contains("none.pem`"));
    assert!(error("key.pem", "key.pem").contains("certificate in `"));
    assert!(error("certificate.pem", "certificate.pem").contains("private key in `"));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_trusted_proxy_says_who_the_client_is() {
    for trusted in [true, false] {
        let server = TestServer::with(|config| {
            config.api_keys = vec![ApiKey::single("s3cret")];
            config.hosts = vec!["kiln.example".into()];
            if trusted {
                config.trusted_proxies = vec!["127.0.0.1".parse().unwrap()];
            }
        });
        let address = start(&server).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = "POST /v1/session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\n\
                    Origin: https://kiln.example\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: kiln.example\r\n\
                    X-Forwarded-For: 203.0.113.5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = answer(&mut stream).await;
        let expected = if trusted { "HTTP/1.1 200 " } else { "HTTP/1.1 403 " };
        assert!(answer.starts_with(expected), "{answer}");
        assert_eq!(answer.contains("__Host-kiln_session="), trusted, "{answer}");
    }
}
