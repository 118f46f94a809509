//! What is checked before a server or worker starts: files and devices that every job would fail with.

use std::path::Path;

use kiln_engine::{FileRef, LocalFiles, Plan, Request, Settings, Setup};
use kiln_server::Catalogue as _;

use super::catalogue::{ModelCatalogue, check_files};
use super::devices::settings_of_all;
use crate::args::GeneratorArgs;
use crate::error::{CliError, ErrorContext};

/// Checks the device, the precision, the autoencoders and the folders that the options name, with the default model.
pub fn check(args: &GeneratorArgs, models: &ModelCatalogue) -> Result<(), CliError> {
    check_folder("--loras", args.loras.as_deref())?;
    check_folder("--vaes", args.vaes.as_deref())?;
    let model = models.open(None).map_err(|error| CliError::new(error.message))?;
    check_files(&model)?;
    if let Some(vae) = &args.vae {
        // The way that a job opens it.
        let vae = Some(FileRef::from(vae.clone()));
        let request = Request { prompts: vec!["a".into()], vae, ..Request::default() };
        Plan::new(&model, &request, &LocalFiles)
            .map_err(CliError::from)
            .with_context(|| "checking --vae".into())?;
    }
    for settings in settings_of_all(&args.machine)? {
        let settings = Settings { preview_vae: args.preview_vae.clone(), ..settings };
        Setup::new(&model, &settings, None)?;
    }
    Ok(())
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

/// A folder that is missing may still be made; a file in its place is a mistake.
fn check_folder(option: &str, path: Option<&Path>) -> Result<(), CliError> {
    let Some(path) = path else { return Ok(()) };
    if path.exists() && !path.is_dir() {
        let message = format!("{option} needs a folder; `{}` is a file", path.display());
        return Err(CliError::usage(message).hint("name the folder that it is in"));
    }
    if !path.exists() {
        tracing::warn!("there is no folder `{}` ({option})", path.display());
    }
    Ok(())
}
