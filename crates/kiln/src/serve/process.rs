//! What servers and workers have in common: the log, the threads that answer, the configuration.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use kiln_engine::Embedded;
use kiln_server::{Config, Limits, TraceConfig};
use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::filter::LevelFilter;

use crate::args::GeneratorArgs;
use crate::error::CliError;
use crate::terminal;

/// Threads that answer HTTP requests; images are generated on other threads.
const THREADS: usize = 2;

/// The threads that answer HTTP requests.
pub fn runtime() -> Result<Runtime, CliError> {
    Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| CliError::new(format!("can't start the server's threads: {error}")))
}

/// The part of the configuration that servers and workers share. A gateway writes no files, and signs none.
pub fn config(args: &GeneratorArgs, folder: PathBuf, writes_files: bool) -> Result<Config, CliError> {
    let credentials = if writes_files { args.sign.credentials()? } else { None };
    if args.no_ai_mark {
        tracing::warn!("files won't say that a model made the images (--no-ai-mark; see docs/provenance.md)");
    }
    if let Some(own) = &credentials {
        let signer = &own.signer;
        tracing::info!(until = signer.valid_until().date(), "files are signed as {}", signer.name());
    }
    Ok(Config {
        embedded: Embedded {
            recipe: !args.no_recipe,
            ai_mark: !args.no_ai_mark,
            aigc_label: args.aigc_label.clone(),
            credentials,
            watermark: args.watermark.payload(),
        },
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
    let log = log.with_ansi(std::io::stderr().is_terminal() && terminal::has_escapes());
    // Fails only if a logger is installed already.
    let _ = if args.json {
        log.json().flatten_event(true).with_span_list(false).try_init()
    } else {
        log.compact().try_init()
    };
}
