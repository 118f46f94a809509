//! `kiln serve`: the server of `kiln-server` with this program's engine behind it.

pub mod catalogue;
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
use crate::failure::Failure;
use catalogue::{Models, Shared};
use generator::Worker;

/// Threads that answer requests; images are generated elsewhere.
const THREADS: usize = 2;

pub fn run(args: ServeArgs) -> Result<(), Failure> {
    check(&args)?;
    log(&args);
    let models = Arc::new(Models::new(&args)?);
    let config = config(&args)?;
    let data = config.folder.clone();
    let server = Server::open(config, Box::new(Shared(Arc::clone(&models)))).map_err(|error| {
        let what = format!("can't use the data folder `{}`: {error}", data.display());
        Failure::new(what).hint("choose another with --data")
    })?;
    let worker = worker(&args, models, &data);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(format!("can't start the threads that answer: {error}")))?;
    let address = SocketAddr::new(args.host, args.port);
    let listener = runtime.block_on(TcpListener::bind(address)).map_err(|error| {
        Failure::new(format!("can't listen on {address}: {error}")).hint("choose another port with --port")
    })?;
    let address = listener.local_addr().unwrap_or(address);
    let generating = server.generate_with(worker);
    let generating = generating
        .map_err(|error| Failure::new(format!("can't start the threads that generate: {error}")))?;
    let _ = writeln!(std::io::stderr(), "kiln {} at http://{address}", env!("CARGO_PKG_VERSION"));
    runtime.block_on(kiln_server::serve(server, listener, asked_to_stop()));
    // The picture at work is done, or stops within a step.
    let _ = generating.join();
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// The engine behind the server.
fn worker(args: &ServeArgs, models: Arc<Models>, data: &Path) -> Worker {
    let mut settings = args.machine.settings();
    // Requests with the same words share their encoding, wherever it is kept.
    settings.text_cache = match args.no_cache {
        true => None,
        false => crate::cache::texts().or_else(|| Some(TextCache::new(data.join("texts")))),
    };
    settings.preview_vae = args.preview_vae.clone();
    let session = Session::new(settings, args.max_batch as usize);
    Worker::new(session, models, args.vae.clone())
}

fn check(args: &ServeArgs) -> Result<(), Failure> {
    if args.api_key.as_ref().is_some_and(|key| key.is_empty()) {
        return Err(Failure::usage("the API key is empty"));
    }
    if !args.host.is_loopback() && args.api_key.is_none() {
        return Err(Failure::usage(format!(
            "listening on {} lets others in, and needs an API key",
            args.host
        ))
        .hint("give one with --api-key or the variable KILN_API_KEY, or leave --host out"));
    }
    Ok(())
}

/// A folder beside the models folder.
fn beside_models(name: &str) -> Option<PathBuf> {
    crate::models::folders().last()?.parent().map(|kiln| kiln.join(name))
}

fn config(args: &ServeArgs) -> Result<Config, Failure> {
    let folder = args.data.clone().or_else(|| beside_models("server")).ok_or_else(|| {
        Failure::usage("there is no place for the queue and the pictures").hint("name a folder with --data")
    })?;
    let mut hosts = args.hosts.clone();
    hosts.push(match args.host {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    });
    // Listening everywhere, the address that a browser asks for can't be foreseen; the key is what keeps others out.
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
        keep: args.keep,
        grace: Duration::from_secs(args.grace),
        longest: Duration::from_secs(args.timeout),
        ..Config::new(folder)
    })
}

fn log(args: &ServeArgs) {
    let level = if args.verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false);
    let log = log.with_ansi(std::io::stderr().is_terminal());
    // There is one already only if somebody runs a server inside a server.
    let _ = match args.json {
        true => log.json().flatten_event(true).try_init(),
        false => log.compact().try_init(),
    };
}

/// Ctrl-C, or what a system sends to end a service. A second time ends the program at once.
async fn asked_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let Ok(mut end) = signal(SignalKind::terminate()) else { return std::future::pending().await };
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = end.recv() => {}
        }
        tokio::spawn(async move {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = end.recv() => {}
            }
            std::process::exit(130);
        });
    }
    #[cfg(not(unix))]
    {
        let _ = tokio::signal::ctrl_c().await;
    }
}
