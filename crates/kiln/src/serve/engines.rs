//! The engines behind a server or a worker: one for each device.

use std::path::Path;
use std::sync::Arc;

use kiln_catalog::user_cache;
use kiln_engine::{Session, Settings, TextCache};

use super::catalogue::ModelCatalogue;
use super::devices::settings_of_all;
use super::generator::Worker;
use crate::args::GeneratorArgs;
use crate::error::CliError;
use crate::settings;

/// Creates the sessions, which keep models loaded: one for each device.
pub fn sessions(args: &GeneratorArgs, folder: &Path) -> Result<Vec<Arc<Session>>, CliError> {
    let texts = if args.no_cache {
        None
    } else {
        user_cache::texts()?.or_else(|| Some(TextCache::new(folder.join("texts"))))
    };
    let session = |mut settings: Settings| {
        settings.text_cache.clone_from(&texts);
        settings.preview_vae.clone_from(&args.preview_vae);
        let session = Session::new(settings, args.max_batch as usize);
        Arc::new(session.with_model_memory(args.model_memory.unwrap_or(0)))
    };
    Ok(settings_of_all(&args.machine)?.into_iter().map(session).collect())
}

/// Creates the engines: one for each session.
pub fn workers(
    args: &GeneratorArgs,
    models: &Arc<ModelCatalogue>,
    sessions: Vec<Arc<Session>>,
) -> impl Iterator<Item = Worker> {
    sessions.into_iter().map(|session| {
        let worker = Worker::new(session, Arc::clone(models), args.vae.clone());
        worker.preload(args.preload.clone()).cache(args.cache.or(settings::get().cache))
    })
}
