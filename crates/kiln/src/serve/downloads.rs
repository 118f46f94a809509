//! Models that the server's page can download.

use kiln_hub::{ALIASES, ModelName};
use kiln_server::{DownloadableModel, JobError};

use crate::error::CliError;
use crate::hub::{self, pull};

/// Lists the models that have a name of their own and are complete.
pub fn models() -> Vec<DownloadableModel> {
    let installed = hub::installed(false);
    let is_installed = |repo: &str| installed.iter().any(|model| model.repo == repo && !model.incomplete);
    let model = |(name, repo): &(&str, &str)| DownloadableModel {
        name: (*name).into(),
        source: (*repo).into(),
        installed: is_installed(repo),
    };
    // A repository of several GGUF files needs a choice, which a name alone is not; the small decoder is not a model.
    ALIASES
        .iter()
        .filter(|(name, _)| !name.ends_with("-gguf") && *name != "small-decoder")
        .map(model)
        .collect()
}

/// Downloads one of these models into the Hugging Face cache.
pub fn run(name: &str, on_progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<(), JobError> {
    let failed = |error: CliError| {
        let hint = error.hint.map_or(String::new(), |hint| format!("; {hint}"));
        JobError::server("download_failed", format!("{}{hint}", error.message))
    };
    let name = ModelName::parse(name).map_err(|error| failed(error.into()))?;
    let settings = pull::settings().map_err(failed)?;
    let pulled = kiln_hub::pull(&settings, &name, &mut |progress| on_progress(progress.done, progress.total));
    match pulled {
        Ok(_) => Ok(()),
        Err(kiln_hub::Error::Cancelled) => Err(JobError::cancelled()),
        Err(error) => Err(failed(error.into())),
    }
}
