//! Accepts connections, within their limits, and shuts down gracefully.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, Version, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::Server;
use crate::http::api::error::{ApiError, BUSY_RETRY_SECONDS};
use crate::http::api::{Peer, router};
use crate::http::config::Config;
use crate::http::connections::{Connection, Connections};
use crate::http::stream::WriteTimeoutStream;
use crate::http::tls::Tls;
use crate::jobs::Jobs;
use crate::jobs::error::ErrorCode;
use crate::jobs::roles::Shutdown;

/// How long a request's headers may take to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum bytes of a request's headers.
const MAX_HEADERS: usize = 64 << 10;
/// Maximum number of HTTP/2 requests in progress on a connection.
const MAX_STREAMS: u32 = 32;
/// Bytes of an HTTP/2 response that are handed over at one time: the rest waits until the client has read them.
const HTTP2_PART: usize = 16 << 10;
/// How long a connection stays open without a request.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a connection that must close may take to do so by itself.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long open connections may take to receive their responses when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves requests until `stop` completes; then finishes running jobs, or returns them to the queue after
/// [`Config::grace`](crate::Config::grace). Until then connections are still accepted: clients fetch their results, and
/// probes see that the server is stopping.
pub async fn serve(server: Server, listener: TcpListener, stop: impl Future<Output = ()>) {
    let app = router(server.clone());
    serve_app(&server.config, server.jobs(), &server, app, listener, stop).await;
}

/// [`serve`] with these routes.
pub(crate) async fn serve_app(
    config: &Arc<Config>,
    jobs: &Jobs,
    shutdown: &impl Shutdown,
    app: Router,
    listener: TcpListener,
    stop: impl Future<Output = ()>,
) {
    let limits = &config.limits;
    let connections = Connections::new(limits.connections, limits.connections_per_address);
    let hang_up = watch::Sender::new(false);
    let acceptor = Acceptor { app, config: Arc::clone(config), hang_up, listener, connections };
    acceptor.accept_until(stop).await;
    tracing::info!("shutting down");
    shutdown.close();
    acceptor.accept_until(finish_jobs(jobs, shutdown)).await;
    let Acceptor { listener, connections, hang_up, .. } = acceptor;
    drop(listener);
    hang_up.send_replace(true);
    let _ = timeout(DRAIN_TIMEOUT, connections.wait_until_closed()).await;
    shutdown.record_ends();
}

/// Waits for the running jobs, at most for the grace period; then interrupts them.
pub(crate) async fn finish_jobs(jobs: &Jobs, shutdown: &impl Shutdown) {
    let generating = async {
        while shutdown.is_awaited(jobs) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    if timeout(jobs.config.grace, generating).await.is_err() {
        jobs.interrupt();
    }
}

/// Accepts connections, within their limits.
struct Acceptor {
    config: Arc<Config>,
    app: Router,
    /// Set once open connections must end.
    hang_up: watch::Sender<bool>,
    listener: TcpListener,
    connections: Arc<Connections>,
}

impl Acceptor {
    async fn accept_until(&self, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = &mut stop => return,
            };
            match accepted {
                Ok((stream, peer)) => self.begin(stream, peer),
                // Too many open files, or the client closed the connection at once.
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Serves a connection, unless there are too many.
    fn begin(&self, stream: TcpStream, peer: SocketAddr) {
        let proxies = &self.config.trusted_proxies;
        let proxy = proxies.iter().any(|proxy| proxy.contains(peer.ip()));
        let Some(connection) = self.connections.admit(peer.ip(), proxy) else {
            tracing::debug!(%peer, "too many connections");
            return;
        };
        let _ = stream.set_nodelay(true);
        let ending = Ending { hang_up: self.hang_up.subscribe(), io_timeout: self.config.io_timeout };
        let (tls, app) = (self.config.tls.clone(), self.app.clone());
        tokio::spawn(serve_connection(ending, tls, app, stream, peer, connection));
    }
}

/// What ends a connection.
struct Ending {
    hang_up: watch::Receiver<bool>,
    io_timeout: Duration,
}

async fn serve_connection(
    ending: Ending,
    tls: Option<Arc<Tls>>,
    app: Router,
    stream: TcpStream,
    address: SocketAddr,
    connection: Arc<Connection>,
) {
    let stream = WriteTimeoutStream::new(stream, Arc::clone(&connection), ending.io_timeout);
    let peer = Peer { address, encrypted: tls.is_some() };
    let app = TowerToHyperService::new(app.layer(axum::Extension(peer)));
    let ended = match tls {
        None => serve_http1(ending, app, stream, &connection).await,
        Some(tls) => {
            let accepted = tokio::select! {
                accepted = tls.accept(stream) => accepted,
                () = connection.must_close(IDLE_TIMEOUT, IDLE_TIMEOUT) => return,
            };
            match accepted {
                Ok((stream, true)) => serve_http2(ending, app, stream, &connection).await,
                Ok((stream, false)) => serve_http1(ending, app, stream, &connection).await,
                Err(error) => return tracing::debug!(%error, %address, "TLS handshake failed"),
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, %address, "connection ended early");
    }
}

async fn serve_http1(
    ending: Ending,
    app: TowerToHyperService<Router>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    connection: &Arc<Connection>,
) -> hyper::Result<()> {
    let service = service_fn(|request| answer(Arc::clone(connection), app.clone(), request));
    let http = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    drive(ending, connection, std::pin::pin!(http), |http| http.graceful_shutdown()).await
}

async fn serve_http2(
    ending: Ending,
    app: TowerToHyperService<Router>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    connection: &Arc<Connection>,
) -> hyper::Result<()> {
    let service = service_fn(|request| answer(Arc::clone(connection), app.clone(), request));
    let http = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(HEADER_TIMEOUT)
        .keep_alive_timeout(HEADER_TIMEOUT)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADERS as u32)
        .serve_connection(TokioIo::new(stream), service);
    drive(ending, connection, std::pin::pin!(http), |http| http.graceful_shutdown()).await
}

/// Drives a connection to its end: by itself, when the server stops, or when it must close.
async fn drive<C: Future<Output = hyper::Result<()>>>(
    mut ending: Ending,
    connection: &Connection,
    mut http: Pin<&mut C>,
    shut_down: impl Fn(Pin<&mut C>),
) -> hyper::Result<()> {
    tokio::select! {
        ended = http.as_mut() => ended,
        () = async { drop(ending.hang_up.wait_for(|hang_up| *hang_up).await) } => {
            shut_down(http.as_mut());
            http.await
        }
        () = connection.must_close(IDLE_TIMEOUT, ending.io_timeout) => {
            shut_down(http.as_mut());
            timeout(CLOSE_TIMEOUT, http).await.unwrap_or(Ok(()))
        }
    }
}

/// Answers a request; on a connection of the reserve, health checks alone.
async fn answer(
    connection: Arc<Connection>,
    app: TowerToHyperService<Router>,
    request: Request<Incoming>,
) -> Result<Response, std::convert::Infallible> {
    let guard = connection.begin_request();
    let http1 = request.version() < Version::HTTP_2;
    let is_health = matches!(request.uri().path(), "/healthz" | "/readyz");
    let response = if connection.is_reserve && !is_health {
        let message = "too many connections; try again later";
        let error = ApiError::new(ErrorCode::Busy, message);
        error.retry_after(BUSY_RETRY_SECONDS).into_response()
    } else {
        app.call(request.map(Body::new)).await?
    };
    let mut response = guard.until_sent(response, if http1 { usize::MAX } else { HTTP2_PART });
    if connection.is_reserve && http1 {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}
