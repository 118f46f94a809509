//! `kiln serve`: runs the `kiln-server` HTTP server on the engine.

pub mod catalogue;
mod downloads;
mod files;
pub mod generator;

use std::io::{IsTerminal, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kiln_engine::{Session, TextCache};
use kiln_server::{Config, Limits, Server};
use tokio::net::TcpListener;
use tracing_subscriber::filter::LevelFilter;

use crate::args::ServeArgs;
use crate::error::CliError;
use catalogue::{ModelCatalogue, SharedCatalogue};
use generator::Worker;

/// Threads that answer HTTP requests; images are generated on other threads.
const THREADS: usize = 2;

pub fn run(mut args: ServeArgs) -> Result<(), CliError> {
    check(&args)?;
    args.machine.fill_missing(crate::settings::get());
    init_logging(&args);
    let models = Arc::new(ModelCatalogue::new(&args)?);
    let config = config(&args)?;
    let data = config.folder.clone();
    let server = Server::open(config, Box::new(SharedCatalogue(Arc::clone(&models)))).map_err(|error| {
        let message = format!("can't use the data folder `{}`: {error}", data.display());
        CliError::new(message).hint("choose another with --data")
    })?;
    let worker = worker(&args, models, &data)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| CliError::new(format!("can't start the server's threads: {error}")))?;
    let address = SocketAddr::new(args.host, args.port);
    let listener = runtime.block_on(TcpListener::bind(address)).map_err(|error| {
        CliError::new(format!("can't listen on {address}: {error}")).hint("choose another port with --port")
    })?;
    let address = listener.local_addr().unwrap_or(address);
    let generating = server.generate_with(worker);
    let generating =
        generating.map_err(|error| CliError::new(format!("can't start the generating threads: {error}")))?;
    let stop = {
        let _runtime = runtime.enter();
        stop_signal()
    };
    let _ = writeln!(std::io::stderr(), "kiln {} at http://{address}", env!("CARGO_PKG_VERSION"));
    runtime.block_on(kiln_server::serve(server, listener, stop));
    // The running job is done, or stops within a step.
    let _ = generating.join();
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// Creates the engine behind the server.
fn worker(args: &ServeArgs, models: Arc<ModelCatalogue>, data: &Path) -> Result<Worker, CliError> {
    let mut settings = args.machine.settings()?;
    settings.text_cache = if args.no_cache {
        None
    } else {
        crate::cache::texts()?.or_else(|| Some(TextCache::new(data.join("texts"))))
    };
    settings.preview_vae = args.preview_vae.clone();
    let session = Session::new(settings, args.max_batch as usize);
    Ok(Worker::new(session, models, args.vae.clone()))
}

fn check(args: &ServeArgs) -> Result<(), CliError> {
    if args.api_key.as_ref().is_some_and(|key| key.is_empty()) {
        return Err(CliError::usage("the API key is empty")
            .hint("set KILN_API_KEY to a key, or unset it to serve this machine alone"));
    }
    if !args.host.is_loopback() && args.api_key.is_none() {
        return Err(CliError::usage(format!(
            "listening on {} opens the server to other machines and requires an API key",
            args.host
        ))
        .hint("set one with --api-key or the variable KILN_API_KEY, or leave --host out"));
    }
    Ok(())
}

/// Returns a folder next to the user's models folder.
fn next_to_models(name: &str) -> Option<PathBuf> {
    crate::models::folders().last()?.parent().map(|kiln| kiln.join(name))
}

fn config(args: &ServeArgs) -> Result<Config, CliError> {
    let folder = args.data.clone().or_else(|| next_to_models("server")).ok_or_else(|| {
        CliError::usage("there is no folder for the queue and the images").hint("set one with --data")
    })?;
    let mut hosts = args.hosts.clone();
    hosts.push(match args.host {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    });
    // On all interfaces the address in the Host header is unknown; the API key protects the server.
    if args.host.is_unspecified() {
        hosts.push("*".into());
    }
    let limits = Limits {
        queue: args.queue as usize,
        side: args.max_side,
        pixels: args.max_pixels,
        steps: args.max_steps,
        ..Limits::default()
    };
    Ok(Config {
        api_key: args.api_key.clone(),
        hosts,
        limits,
        keep_images: args.keep,
        grace: Duration::from_secs(args.grace),
        job_timeout: Duration::from_secs(args.timeout),
        ..Config::new(folder)
    })
}

fn init_logging(args: &ServeArgs) {
    let level = if args.verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false);
    let log = log.with_ansi(std::io::stderr().is_terminal());
    // Fails only if a logger is installed already.
    let _ = if args.json { log.json().flatten_event(true).try_init() } else { log.compact().try_init() };
}

/// A future that ends with Ctrl-C or SIGTERM. The second one ends the process at once.
///
/// Must be called in the context of a runtime; from then on the signals don't kill the process.
#[cfg(unix)]
fn stop_signal() -> impl Future<Output = ()> {
    use tokio::signal::unix::{SignalKind, signal};

    let signals = signal(SignalKind::interrupt()).and_then(|i| Ok((i, signal(SignalKind::terminate())?)));
    async move {
        let Ok((mut interrupt, mut terminate)) = signals else { return std::future::pending().await };
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            std::process::exit(130);
        });
    }
}

/// A future that ends with Ctrl-C. The second one ends the process at once.
#[cfg(not(unix))]
async fn stop_signal() {
    let _ = tokio::signal::ctrl_c().await;
    tokio::spawn(async {
        let _ = tokio::signal::ctrl_c().await;
        std::process::exit(130);
    });
}
