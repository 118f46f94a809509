//! Models that the server's page can download.

use std::path::Path;

use kiln_catalog::cache;
use kiln_family::{Alias, aliases};
use kiln_server::{DownloadLicence, DownloadableModel, JobError};

use crate::args::ServeArgs;

/// Whether clients may download models: those of this machine, and others if that is allowed.
pub fn are_allowed(args: &ServeArgs) -> bool {
    args.allow_downloads || args.host.is_loopback()
}

/// Lists the models that have a short name and are whole models, not components.
pub fn models() -> Vec<DownloadableModel> {
    let installed = cache::installed(false);
    let is_installed = |repo: &str| installed.iter().any(|model| model.repo == repo && !model.incomplete);
    let model = |alias: &Alias| DownloadableModel {
        name: alias.name.into(),
        source: alias.repo.into(),
        installed: match alias.file {
            None => is_installed(alias.repo),
            Some(_) => cache::find_pulled(Path::new(alias.name)).is_some(),
        },
        licence: alias
            .licence
            .map(|licence| DownloadLicence { name: licence.name.into(), url: licence.url.into() }),
    };
    aliases().filter(|alias| alias.is_model()).map(model).collect()
}

/// Downloads one of these models into the Hugging Face cache.
pub fn run(name: &str, on_progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<(), JobError> {
    // The server asked for consent to the licence.
    let pulled = kiln_catalog::pull(name, true, &mut |progress| on_progress(progress.done, progress.total));
    pulled.map(drop).map_err(|error| JobError::explained(&error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command, ServeCommand};
    use clap::Parser;

    #[test]
    fn other_machines_download_models_only_if_that_is_allowed() {
        let allowed = |options: &[&str]| {
            let args = ["kiln", "serve"].iter().chain(options);
            match Cli::try_parse_from(args).unwrap().command {
                Some(Command::Serve(ServeCommand::Serve(args))) => are_allowed(&args),
                _ => unreachable!(),
            }
        };
        assert!(allowed(&[]) && allowed(&["--host", "::1"]));
        assert!(!allowed(&["--host", "0.0.0.0"]) && allowed(&["--host", "0.0.0.0", "--allow-downloads"]));
    }

    #[test]
    fn models_that_need_a_choice_are_not_offered() {
        let names: Vec<String> = models().into_iter().map(|model| model.name).collect();
        assert!(names.contains(&"klein-4b".into()) && names.contains(&"klein-9b-fp8".into()));
        assert!(!names.iter().any(|name| name.contains("gguf") || name == "small-decoder"));
        assert!(names.contains(&"dev-nvfp4".into()) && !names.contains(&"dev-encoder".into()));
    }

    #[test]
    fn licences_with_conditions_are_told() {
        let models = models();
        let licence = |name: &str| models.iter().find(|model| model.name == name).unwrap().licence.clone();
        assert_eq!(licence("klein-4b"), None);
        assert_eq!(licence("klein-9b-fp8").unwrap().name, "FLUX Non-Commercial License");
        assert!(
            licence("dev").unwrap().url.starts_with("https://huggingface.co/black-forest-labs/FLUX.2-dev/")
        );
    }
}
