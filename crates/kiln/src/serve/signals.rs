//! What the server does on signals: SIGTERM and Ctrl-C stop it, SIGHUP makes it read its models again. Windows has events of
//! the console instead.
//!
//! The functions must be called in the context of a runtime; from then on the signals don't kill the process.

use std::sync::Arc;
use std::time::Duration;

use kiln_server::Server;

use super::catalogue::ModelCatalogue;
use crate::args::ServeArgs;

/// A future that ends at Ctrl-C, or `linger` after SIGTERM: meanwhile the server answers, but takes no jobs after `close`. A
/// second signal ends the process at once. Nothing calls for an `interrupt` of running jobs.
#[cfg(unix)]
pub fn stop(close: impl FnOnce(), _: impl FnOnce(), linger: Duration) -> impl Future<Output = ()> {
    use tokio::signal::unix::{SignalKind, signal};

    let signals = signal(SignalKind::interrupt()).and_then(|i| Ok((i, signal(SignalKind::terminate())?)));
    async move {
        let Ok((mut interrupt, mut terminate)) = signals else { return std::future::pending().await };
        let wait = tokio::select! {
            _ = interrupt.recv() => Duration::ZERO,
            _ = terminate.recv() => linger,
        };
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            std::process::exit(130);
        });
        close();
        tokio::time::sleep(wait).await;
    }
}

/// A future that ends at Ctrl-C, Ctrl-Break, or when the console's window is closed; a second Ctrl-C ends the process at once.
/// After `close` the server takes no jobs. If the window is closed, Windows leaves a few seconds: running jobs are
/// interrupted.
#[cfg(windows)]
pub fn stop(close: impl FnOnce(), interrupt: impl FnOnce(), _: Duration) -> impl Future<Output = ()> {
    use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};

    let events = (ctrl_c(), ctrl_break(), ctrl_close(), ctrl_shutdown());
    async move {
        let (Ok(mut c), Ok(mut pause), Ok(mut window), Ok(mut shutdown)) = events else {
            return std::future::pending().await;
        };
        let can_wait = tokio::select! {
            _ = c.recv() => true,
            _ = pause.recv() => true,
            _ = window.recv() => false,
            _ = shutdown.recv() => false,
        };
        tokio::spawn(async move {
            tokio::select! {
                _ = c.recv() => {}
                _ = pause.recv() => {}
            }
            std::process::exit(130);
        });
        close();
        if !can_wait {
            interrupt();
        }
    }
}

/// Reads the list of models again at every SIGHUP, and the API keys of a server with an API; each model's files are
/// opened again when it is next used.
#[cfg(unix)]
pub fn reload_on_hangup(models: Arc<ModelCatalogue>, server: Option<(Server, ServeArgs)>) {
    use tokio::signal::unix::{SignalKind, signal};

    let Ok(mut hangups) = signal(SignalKind::hangup()) else { return };
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            if let Some((server, args)) = &server {
                match super::access::keys(args) {
                    Ok(keys) => server.set_api_keys(&keys),
                    Err(error) => tracing::error!("keeping the API keys as they are: {}", error.message),
                }
            }
            models.reload();
            tracing::info!("reloaded: models are read again when they are next used");
        }
    });
}

/// There is no SIGHUP on Windows.
#[cfg(windows)]
pub fn reload_on_hangup(_: Arc<ModelCatalogue>, _: Option<(Server, ServeArgs)>) {}
