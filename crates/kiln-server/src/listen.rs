//! Accepts connections, within their limits, and shuts down gracefully.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::Server;
use crate::api::error::{ApiError, BUSY_RETRY_SECONDS};
use crate::api::{Peer, router};
use crate::connections::{Connection, Connections};
use crate::stream::WriteTimeoutStream;

/// How long a request's headers may take to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(15);
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
    let limits = &server.config.limits;
    let connections = Connections::new(limits.connections, limits.connections_per_address);
    let acceptor = Acceptor { app: router(server.clone()), server: server.clone(), listener, connections };
    acceptor.accept_until(stop).await;
    tracing::info!("shutting down");
    server.close();
    acceptor.accept_until(finish_jobs(&server)).await;
    let Acceptor { listener, connections, .. } = acceptor;
    drop(listener);
    server.hang_up.send_replace(true);
    let _ = timeout(DRAIN_TIMEOUT, connections.wait_until_closed()).await;
    server.record_ends();
}

/// Waits for the running jobs, at most for the grace period; then interrupts them.
async fn finish_jobs(server: &Server) {
    let generating = async {
        while !server.active().is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    if timeout(server.config.grace, generating).await.is_err() {
        server.interrupt();
    }
}

/// Accepts connections, within their limits.
struct Acceptor {
    server: Server,
    app: Router,
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
                Ok((stream, peer)) => {
                    let Some(connection) = self.connections.admit(peer.ip(), false) else {
                        tracing::debug!(%peer, "too many connections");
                        continue;
                    };
                    let _ = stream.set_nodelay(true);
                    let (server, app) = (self.server.clone(), self.app.clone());
                    tokio::spawn(serve_connection(server, app, stream, peer, connection));
                }
                // Too many open files, or the client closed the connection at once.
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

async fn serve_connection(
    server: Server,
    app: Router,
    stream: TcpStream,
    peer: SocketAddr,
    connection: Arc<Connection>,
) {
    let io_timeout = server.config.io_timeout;
    let stream = WriteTimeoutStream::new(stream, Arc::clone(&connection), io_timeout);
    let app = TowerToHyperService::new(app.layer(axum::Extension(Peer(peer))));
    let service = service_fn(|request| answer(Arc::clone(&connection), app.clone(), request));
    let http = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), service);
    let mut http = std::pin::pin!(http);
    let mut hang_up = server.hang_up.subscribe();
    let ended = tokio::select! {
        ended = http.as_mut() => ended,
        () = async { drop(hang_up.wait_for(|hang_up| *hang_up).await) } => {
            http.as_mut().graceful_shutdown();
            http.await
        }
        () = connection.must_close(IDLE_TIMEOUT, io_timeout) => {
            http.as_mut().graceful_shutdown();
            timeout(CLOSE_TIMEOUT, http).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, %peer, "connection ended early");
    }
}

/// Answers a request; on a connection of the reserve, health checks alone.
async fn answer(
    connection: Arc<Connection>,
    app: TowerToHyperService<Router>,
    request: Request<Incoming>,
) -> Result<Response, std::convert::Infallible> {
    let guard = connection.begin_request();
    let is_health = matches!(request.uri().path(), "/healthz" | "/readyz");
    let response = if connection.is_reserve && !is_health {
        let message = "too many connections; try again later";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message);
        error.retry_after(BUSY_RETRY_SECONDS).into_response()
    } else {
        app.call(request.map(Body::new)).await?
    };
    let mut response = guard.until_sent(response);
    if connection.is_reserve {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}
