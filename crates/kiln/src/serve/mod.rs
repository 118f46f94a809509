//! `kiln serve`: runs the `kiln-server` HTTP server on the engine.

mod access;
pub mod catalogue;
mod downloads;
mod files;
pub mod generator;
pub mod signals;
pub mod start;
mod trainer;
mod turn;
mod upsample;

use std::io::{IsTerminal, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kiln_engine::{Session, Settings, TextCache};
use kiln_server::{Catalogue as _, Config, GalleryLimits, Limits, Server, TraceConfig, WebhookConfig};
use tokio::net::TcpListener;
use tracing_subscriber::filter::LevelFilter;

use crate::args::{GeneratorArgs, QueueArg, ServeArgs};
use crate::error::CliError;
use catalogue::{ModelCatalogue, SharedCatalogue};
use generator::Worker;
use trainer::ServerTrainer;
use turn::DeviceLock;

/// Threads that answer HTTP requests; images are generated on other threads.
const THREADS: usize = 2;

pub fn run(mut args: ServeArgs) -> Result<(), CliError> {
    args.generator.machine.fill_missing(crate::settings::get());
    init_logging(&args.generator);
    let config = config(&args)?;
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let models = match args.queue {
        Some(QueueArg::Length(_)) | None => {
            let models = Arc::new(ModelCatalogue::new(
                &args.generator,
                downloads::are_allowed(&args),
                &args.upsample,
            )?);
            check_names(&args.generator, &args.model_aliases, &models)?;
            start::check(&args.generator, &models)?;
            Some(models)
        }
        // A gateway has the models of its workers.
        #[cfg(feature = "fleet")]
        Some(QueueArg::Servers(_)) => None,
    };
    let runtime = runtime()?;
    // Before the data folder is touched: a server that can't listen leaves the queue alone.
    let address = SocketAddr::new(args.host, args.port);
    let listener = runtime.block_on(TcpListener::bind(address)).map_err(|error| {
        CliError::new(format!("can't listen on {address}: {error}")).hint("choose another port with --port")
    })?;
    let address = listener.local_addr().unwrap_or(address);
    #[cfg(feature = "fleet")]
    let mut temporary = None;
    let (server, generating, training) = match (&models, &args.queue) {
        #[cfg(feature = "fleet")]
        (_, Some(QueueArg::Servers(servers))) => {
            let (server, folder) = crate::fleet::gateway(&args, config, servers)?;
            // Deleted at the end, and by the next process if this one is killed.
            temporary = folder;
            (server, None, None)
        }
        (Some(models), _) => {
            let server = open(config, models)?;
            let sessions = sessions(&args.generator, server.folder())?;
            let turn = Arc::new(DeviceLock::default());
            let training = train(&args, models, &server, &sessions, &turn)?;
            let worker =
                |session| worker(&args.generator, Arc::clone(models), session).turn(Arc::clone(&turn));
            let generating = server.generate_with_all(sessions.into_iter().map(worker).collect());
            let failed = |error| CliError::new(format!("can't start the generating threads: {error}"));
            (server, Some(generating.map_err(failed)?), training)
        }
        (None, _) => {
            return Err(CliError::usage("there is neither a model nor a queue")
                .hint("choose a model with -m, or a queue with --queue"));
        }
    };
    let stop = {
        let _runtime = runtime.enter();
        if let Some(models) = models {
            signals::reload_on_hangup(models, Some((server.clone(), args.clone())));
        }
        let server = server.clone();
        signals::stop(move || server.close(), Duration::from_secs(args.linger))
    };
    announce(&format!("{scheme}://{address}"), args.generator.json);
    runtime.block_on(kiln_server::serve(server, listener, stop));
    // The running job is done, or stops within a step; a training saves its state.
    let _ = generating.map(JoinHandle::join);
    let _ = training.map(JoinHandle::join);
    #[cfg(feature = "fleet")]
    drop(temporary);
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// The threads that answer HTTP requests.
pub fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| CliError::new(format!("can't start the server's threads: {error}")))
}

/// Opens the data folder.
fn open(config: Config, models: &Arc<ModelCatalogue>) -> Result<Server, CliError> {
    let data = config.folder.clone();
    Server::open(config, Box::new(SharedCatalogue(Arc::clone(models)))).map_err(|error| {
        let message = format!("can't use the data folder `{}`: {error}", data.display());
        CliError::new(message).hint("choose another with --data")
    })
}

/// Prints where the server listens: a line, or with --json an event.
fn announce(url: &str, json: bool) {
    let version = env!("CARGO_PKG_VERSION");
    if json {
        tracing::info!(version, url, "listening");
    } else {
        let _ = writeln!(std::io::stderr(), "kiln {version} at {url}");
    }
}

/// Creates the engines of a worker: one for each device.
#[cfg(feature = "fleet")]
pub fn workers(
    args: &GeneratorArgs,
    models: &Arc<ModelCatalogue>,
    folder: &Path,
) -> Result<Vec<Worker>, CliError> {
    let worker = |session| worker(args, Arc::clone(models), session);
    Ok(sessions(args, folder)?.into_iter().map(worker).collect())
}

/// Creates the sessions, which keep models loaded: one for each device.
fn sessions(args: &GeneratorArgs, folder: &Path) -> Result<Vec<Arc<Session>>, CliError> {
    let texts = if args.no_cache {
        None
    } else {
        crate::cache::texts()?.or_else(|| Some(TextCache::new(folder.join("texts"))))
    };
    let session = |mut settings: Settings| {
        settings.text_cache.clone_from(&texts);
        settings.preview_vae.clone_from(&args.preview_vae);
        let session = Session::new(settings, args.max_batch as usize);
        Arc::new(session.with_model_memory(args.model_memory.unwrap_or(0)))
    };
    Ok(args.machine.settings_of_all()?.into_iter().map(session).collect())
}

/// Creates the engine of a device.
fn worker(args: &GeneratorArgs, models: Arc<ModelCatalogue>, session: Arc<Session>) -> Worker {
    let worker = Worker::new(session, models, args.vae.clone()).preload(args.preload.clone());
    worker.cache(args.cache.or(crate::settings::get().cache))
}

/// Starts the thread that trains LoRAs, if training is allowed.
fn train(
    args: &ServeArgs,
    models: &Arc<ModelCatalogue>,
    server: &Server,
    sessions: &[Arc<Session>],
    turn: &Arc<DeviceLock>,
) -> Result<Option<JoinHandle<()>>, CliError> {
    if !args.train {
        return Ok(None);
    }
    let (models, machine) = (Arc::clone(models), args.generator.machine.clone());
    let trainer = ServerTrainer::new(models, machine, sessions.to_vec(), Arc::clone(turn))?;
    let training = server.train_with(trainer);
    Ok(Some(training.map_err(|error| CliError::new(format!("can't use the folder of trainings: {error}")))?))
}

/// Checks that the models of --preload and --model-alias exist.
pub fn check_names(
    args: &GeneratorArgs,
    aliases: &[(String, String)],
    models: &ModelCatalogue,
) -> Result<(), CliError> {
    let aliases = aliases.iter().map(|(alias, model)| (format!("--model-alias {alias}={model}"), model));
    let preloads = args.preload.iter().map(|model| (format!("--preload {model}"), model));
    let mut options = aliases.chain(preloads).peekable();
    if options.peek().is_none() {
        return Ok(());
    }
    let names: Vec<String> = models.models().into_iter().map(|model| model.name).collect();
    match options.find(|(_, model)| !names.contains(model)) {
        Some((option, model)) => Err(CliError::usage(format!("{option}: there is no model `{model}`"))
            .hint(format!("available: {}", names.join(", ")))),
        None => Ok(()),
    }
}

/// Returns a folder next to the user's models folder.
fn next_to_models(name: &str) -> Option<PathBuf> {
    crate::models::folders().paths().last()?.parent().map(|kiln| kiln.join(name))
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
    let generator = generator_config(&args.generator, folder)?;
    let limits = Limits {
        queue: match args.queue {
            None => generator.limits.queue,
            Some(QueueArg::Length(length)) => length as usize,
            #[cfg(feature = "fleet")]
            Some(QueueArg::Servers(_)) => args.queue_length as usize,
        },
        inputs: args.max_inputs,
        ..generator.limits
    };
    let webhooks =
        args.webhook_secret.as_ref().map(|secret| WebhookConfig::new(secret, args.webhook_private));
    let webhooks = webhooks.transpose().map_err(|reason| {
        CliError::usage(format!("the webhook secret is not usable: {reason}"))
            .hint("set --webhook-secret or KILN_WEBHOOK_SECRET to a long random text")
    })?;
    Ok(Config {
        api_keys: access::keys(args)?,
        tls: access::tls(args)?,
        trusted_proxies: args.trusted_proxies.clone(),
        hosts,
        limits,
        model_aliases: args.model_aliases.clone(),
        webhooks,
        gallery: GalleryLimits { images: args.keep, bytes: args.gallery_limit },
        ..generator
    })
}

/// The part of the configuration that servers and workers share.
pub fn generator_config(args: &GeneratorArgs, folder: PathBuf) -> Result<Config, CliError> {
    Ok(Config {
        embed_recipes: !args.no_recipe,
        traces: args.otlp.clone().map(|endpoint| TraceConfig { endpoint, service: service_name() }),
        check: args.check.check()?,
        limits: Limits {
            side: args.max_side,
            pixels: args.max_pixels,
            steps: args.max_steps,
            ..Limits::default()
        },
        grace: Duration::from_secs(args.grace),
        job_timeout: Duration::from_secs(args.timeout),
        ..Config::new(folder)
    })
}

/// The name of this program in traces.
fn service_name() -> String {
    std::env::var("OTEL_SERVICE_NAME").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "kiln".into())
}

pub fn init_logging(args: &GeneratorArgs) {
    let level = if args.verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false);
    let log = log.with_ansi(std::io::stderr().is_terminal());
    // Fails only if a logger is installed already.
    let _ = if args.json {
        log.json().flatten_event(true).with_span_list(false).try_init()
    } else {
        log.compact().try_init()
    };
}
