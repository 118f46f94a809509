//! Accepts connections, with limits on their number and on slow clients, and shuts down gracefully.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};

use crate::Server;
use crate::api::{Peer, router};

/// How long a request's headers may take to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(15);
/// How long open connections may take to receive their responses when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves requests until `stop` completes; then finishes running jobs, or returns them to the queue after
/// [`Config::grace`](crate::Config::grace).
pub async fn serve(server: Server, listener: TcpListener, stop: impl Future<Output = ()>) {
    let app = router(server.clone());
    let slots = Arc::new(Semaphore::new(server.config.limits.connections));
    let mut stop = std::pin::pin!(stop);
    loop {
        let slot = Arc::clone(&slots).acquire_owned();
        let accepted = async {
            // The semaphore is never closed.
            let slot = slot.await.ok();
            (listener.accept().await, slot)
        };
        let (accepted, slot) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let _ = stream.set_nodelay(true);
                let connection = serve_connection(server.clone(), app.clone(), stream, Peer(peer));
                tokio::spawn(async move {
                    connection.await;
                    drop(slot);
                });
            }
            // Too many open files, or the client closed the connection at once.
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    tracing::info!("shutting down");
    server.close();
    let generating = async {
        while !server.active().is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(server.config.grace, generating).await.is_err() {
        server.interrupt();
    }
    // Every connection holds a slot: wait until all are free.
    let all = u32::try_from(server.config.limits.connections).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, slots.acquire_many(all)).await;
}

async fn serve_connection(server: Server, app: Router, stream: TcpStream, peer: Peer) {
    let app = app.layer(axum::Extension(peer));
    let io = TokioIo::new(WriteTimeoutStream::new(stream, server.config.io_timeout));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(64 << 10)
        .serve_connection(io, TowerToHyperService::new(app));
    let mut connection = std::pin::pin!(connection);
    let mut closing = server.closing.subscribe();
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = async { drop(closing.wait_for(|closing| *closing).await) } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, peer = %peer.0, "connection ended early");
    }
}

/// A TCP stream that fails when a write makes no progress for `timeout`.
struct WriteTimeoutStream {
    stream: TcpStream,
    timeout: Duration,
    blocked: Option<Pin<Box<Sleep>>>,
}

impl WriteTimeoutStream {
    fn new(stream: TcpStream, timeout: Duration) -> WriteTimeoutStream {
        WriteTimeoutStream { stream, timeout, blocked: None }
    }

    /// Starts the timer when a write blocks, clears it when one succeeds, and fails when it has expired.
    fn check_timeout<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.blocked = None;
            return written;
        }
        let timeout = self.timeout;
        let timer = self.blocked.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read the response")))
    }
}

impl AsyncRead for WriteTimeoutStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for WriteTimeoutStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.check_timeout(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.check_timeout(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.check_timeout(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
