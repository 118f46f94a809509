//! `kiln worker`: generates the jobs of a fleet's queue.

use std::sync::Arc;
use std::time::Duration;

use kiln_server::Config;
use kiln_server::fleet::open_worker;
use tokio::net::TcpListener;

use super::shared::{queue_error, temporary_folder};
use crate::args::{UpsampleSource, WorkerArgs};
use crate::error::CliError;
use crate::serve::catalogue::ModelCatalogue;
use crate::serve::{engines, process, signals, start};
use crate::settings;

pub fn run(mut args: WorkerArgs) -> Result<(), CliError> {
    args.generator.machine.fill_missing(settings::get());
    let options = &args.generator;
    process::init_logging(options);
    let models = Arc::new(ModelCatalogue::new(options, false, &UpsampleSource::default())?);
    start::check_names(options, &[], &models)?;
    // A worker that can't generate must not take jobs.
    start::check(options, &models)?;
    let folder = temporary_folder()?;
    let config = process::config(options, folder.path().to_path_buf(), true)?;
    let config = Config { hosts: vec!["*".into()], ..config };
    let runtime = process::runtime()?;
    let listener = match args.metrics {
        None => None,
        Some(address) => Some(runtime.block_on(TcpListener::bind(address)).map_err(|error| {
            CliError::new(format!("can't listen on {address}: {error}")).hint("choose another with --metrics")
        })?),
    };
    let fleet = args.queue.fleet.config(&args.queue.servers);
    let worker = open_worker(config, fleet, models.clone()).map_err(|error| queue_error(&error))?;
    let engines = engines::workers(options, &models, engines::sessions(options, worker.folder())?);
    let generating = worker
        .generate_with_all(engines.collect())
        .map_err(|error| CliError::new(format!("can't start the generating threads: {error}")))?;
    let stop = {
        let _runtime = runtime.enter();
        signals::reload_on_hangup(models, None);
        // The queue gives a job that was not finished to another worker.
        signals::stop(worker.closer(), || {}, Duration::ZERO)
    };
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "worker ready");
    runtime.block_on(worker.serve(listener, stop));
    // The running job is done, or stops within a step.
    let _ = generating.join();
    worker.leave();
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}
