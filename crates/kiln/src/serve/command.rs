//! The command `kiln serve`.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kiln_server::{Config, GalleryLimits, Limits, Server, StoreError, WebhookConfig};
use tokio::runtime::Runtime;

use super::catalogue::ModelCatalogue;
use super::generator::Worker;
use super::trainer::ServerTrainer;
use super::turn::DeviceLock;
use super::{access, browser, downloads, engines, files, fleet, listen, process, signals, start};
use crate::args::{QueueArg, ServeArgs, ServerList};
use crate::error::CliError;
use crate::{settings, terminal};

/// Where jobs are generated: here, with these models, or by the workers of a fleet with this queue.
enum Role<'a> {
    Generates(Arc<ModelCatalogue>),
    Gateway(&'a ServerList),
}

pub fn run(mut args: ServeArgs) -> Result<(), CliError> {
    args.generator.machine.fill_missing(settings::get());
    process::init_logging(&args.generator);
    let config = config(&args)?;
    let folder = config.folder.clone();
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let role = match &args.queue {
        Some(QueueArg::Servers(servers)) => Role::Gateway(servers),
        Some(QueueArg::Length(_)) | None => {
            let downloads = downloads::are_allowed(&args);
            let models = ModelCatalogue::new(&args.generator, downloads, &args.upsample)?;
            start::check_names(&args.generator, &args.model_aliases, &models)?;
            start::check(&args.generator, &models)?;
            Role::Generates(Arc::new(models))
        }
    };
    let runtime = process::runtime()?;
    // Before the data folder is touched: a server that can't listen leaves the queue alone.
    let (listener, warning) = match runtime.block_on(listen::listen(&args)) {
        Err(_) if args.open && show_running(&runtime, &args) => return Ok(()),
        listened => listened?,
    };
    let address = listener.local_addr().unwrap_or(SocketAddr::new(args.host, args.port));
    // A gateway's folder is deleted at the end, and by the next process if this one is killed.
    let (server, threads, _temporary) = match &role {
        Role::Gateway(servers) => {
            let (server, temporary) = fleet::gateway(&args, config, servers)?;
            (server, Vec::new(), temporary)
        }
        Role::Generates(models) => {
            let server = match Server::open(config, Arc::clone(models) as _) {
                Err(StoreError::InUse) if args.open && show_running(&runtime, &args) => return Ok(()),
                opened => opened.map_err(|error| unusable(&folder, &error))?,
            };
            let threads = generate(&args, models, &server)?;
            (server, threads, None)
        }
    };
    let stop = {
        let _runtime = runtime.enter();
        if let Role::Generates(models) = &role {
            signals::reload_on_hangup(Arc::clone(models), Some((server.clone(), args.clone())));
        }
        let (closing, interrupted) = (server.clone(), server.clone());
        signals::stop(
            move || closing.close(),
            move || interrupted.interrupt(),
            Duration::from_secs(args.linger),
        )
    };
    // Not before: a second double click finds the data folder in use, and opens the page of the first.
    if let Some(warning) = warning {
        tracing::warn!("{warning}");
    }
    announce(&format!("{scheme}://{address}"), args.generator.json);
    if args.open {
        browser::open(scheme, address);
    }
    runtime.block_on(kiln_server::serve(server, listener, stop));
    // The running job is done, or stops within a step; a training saves its state.
    threads.into_iter().for_each(|thread| drop(thread.join()));
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

fn unusable(folder: &Path, error: &StoreError) -> CliError {
    CliError::new(format!("can't use the data folder `{}`: {error}", folder.display()))
        .hint("choose another with --data")
}

/// Opens the page of a server that runs already; false if none is found.
fn show_running(runtime: &Runtime, args: &ServeArgs) -> bool {
    let Some(address) = runtime.block_on(listen::running(args)) else { return false };
    terminal::tell(&format!("kiln runs already, at http://{address}: opening its page"));
    browser::open("http", address);
    true
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

/// Starts the threads that generate and, if that is allowed, train LoRAs.
fn generate(
    args: &ServeArgs,
    models: &Arc<ModelCatalogue>,
    server: &Server,
) -> Result<Vec<JoinHandle<()>>, CliError> {
    let sessions = engines::sessions(&args.generator, server.folder())?;
    let turn = Arc::new(DeviceLock::default());
    let mut threads = Vec::new();
    if args.train {
        let (models, machine) = (Arc::clone(models), args.generator.machine.clone());
        let trainer = ServerTrainer::new(models, machine, sessions.clone(), Arc::clone(&turn))?;
        let failed = |error| CliError::new(format!("can't use the folder of trainings: {error}"));
        threads.push(server.train_with(trainer).map_err(failed)?);
    }
    let worker = |worker: Worker| worker.turn(Arc::clone(&turn));
    let workers = engines::workers(&args.generator, models, sessions).map(worker);
    let failed = |error| CliError::new(format!("can't start the generating threads: {error}"));
    threads.push(server.generate_with_all(workers.collect()).map_err(failed)?);
    Ok(threads)
}

fn config(args: &ServeArgs) -> Result<Config, CliError> {
    let folder = args.data.clone().or_else(|| files::next_to_models("server")).ok_or_else(|| {
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
    let is_gateway = matches!(args.queue, Some(QueueArg::Servers(_)));
    let generator = process::config(&args.generator, folder, !is_gateway)?;
    let limits = Limits {
        queue: match args.queue {
            None => generator.limits.queue,
            Some(QueueArg::Length(length)) => length as usize,
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
        trust: crate::verify::trust(&args.trust)?,
        public_verify: args.public_verify,
        gallery: GalleryLimits { images: args.keep, bytes: args.gallery_limit },
        ..generator
    })
}
