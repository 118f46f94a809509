//! Connections: not too many, not too slow, and an orderly end.

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

/// How long a request's head may take to arrive.
const HEAD: Duration = Duration::from_secs(15);
/// Connections are given so long to take their answers when the server stops.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Answers requests until `stop` is done; then finishes the jobs that are generated, or puts them back.
pub async fn serve(server: Server, listener: TcpListener, stop: impl Future<Output = ()>) {
    let app = router(server.clone());
    let places = Arc::new(Semaphore::new(server.config.limits.connections));
    let mut stop = std::pin::pin!(stop);
    loop {
        let place = Arc::clone(&places).acquire_owned();
        let accepted = async {
            // Never closed.
            let place = place.await.ok();
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let _ = stream.set_nodelay(true);
                let connection = answer(server.clone(), app.clone(), stream, Peer(peer));
                tokio::spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            // Too many files are open, or the client was gone at once.
            Err(error) => {
                tracing::warn!(%error, "a connection could not be taken");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    tracing::info!("stopping");
    server.close();
    let generating = async {
        while !server.running().is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(server.config.grace, generating).await.is_err() {
        server.interrupt();
    }
    // Every connection holds a place.
    let all = u32::try_from(server.config.limits.connections).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(LAST_ANSWERS, places.acquire_many(all)).await;
}

async fn answer(server: Server, app: Router, stream: TcpStream, peer: Peer) {
    let app = app.layer(axum::Extension(peer));
    let io = TokioIo::new(Patient::new(stream, server.config.patience));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
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
        tracing::debug!(%error, peer = %peer.0, "a connection ended early");
    }
}

/// A stream whose other end has to take what is written, now and then.
struct Patient {
    stream: TcpStream,
    patience: Duration,
    blocked: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(stream: TcpStream, patience: Duration) -> Patient {
        Patient { stream, patience, blocked: None }
    }

    /// Starts, stops or looks at the clock, by how a write went.
    fn watch<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.blocked = None;
            return written;
        }
        let patience = self.patience;
        let clock = self.blocked.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(clock.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the answer was not taken in time")))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
