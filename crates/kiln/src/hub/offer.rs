//! Offers to download a model that `-m` names and that is not there.

use std::io::{IsTerminal, Write};
use std::path::Path;

use kiln_hub::{ModelName, ModelPlan};
use kiln_models::ModelLocation;

use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorContext};
use crate::hub::{self, consent, pull};
use crate::models;
use crate::values::bytes;

/// How to deal with a model that is not there.
#[derive(Clone, Copy, Debug)]
pub struct OfferOptions {
    /// Download without asking.
    pub yes: bool,
    /// Print nothing about the download.
    pub quiet: bool,
}

/// Resolves a model. One of the known models that is not there is downloaded, after asking; without a terminal it is an
/// error with the command that downloads it.
pub fn resolve(
    model: Option<&Path>,
    options: OfferOptions,
    cancel: &CancelFlag,
) -> Result<ModelLocation, CliError> {
    let error = match models::resolve(model) {
        Ok(location) => return Ok(location),
        Err(error) => error,
    };
    let Some(name) = model.and_then(kiln_models::known) else { return Err(error) };
    let can_ask = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !options.yes && !can_ask {
        let hint = format!("`kiln pull {}` downloads it from Hugging Face; so does --yes", name.short());
        return Err(CliError { hint: Some(hint), ..error });
    }
    let settings = kiln_models::download_settings()?;
    let plan = kiln_hub::plan_model(&settings, &name)
        .with_context(|| format!("looking for `{}` at {}", name.short(), settings.endpoint))?;
    let offer = offer(&plan, &settings.endpoint);
    if options.yes {
        if !options.quiet {
            let _ = writeln!(std::io::stderr(), "downloading {offer}");
        }
    } else if !hub::ask(&format!("`{}` is not on this machine; download {offer}?", name.short())) {
        return Err(CliError::cancelled());
    }
    consent::require(&plan, false, options.quiet)?;
    pull::download(&plan, &settings, options.quiet, cancel)?;
    models::resolve(model)
}

/// What is downloaded: its size and licence, where from and where to.
fn offer(plan: &ModelPlan, endpoint: &str) -> String {
    let (missing, all) = (plan.missing(), plan.bytes());
    let size =
        if missing < all { format!("the other {} of {}", bytes(missing), bytes(all)) } else { bytes(all) };
    let licence = pull::licence(plan)
        .map_or_else(|| "no stated licence".into(), |licence| format!("licence {licence}"));
    let mut repos: Vec<String> = plan.all().map(|plan| format!("{endpoint}/{}", plan.name.repo)).collect();
    repos.dedup();
    format!("{size} ({licence}) from {} to `{}`", repos.join(" and "), plan.model.folder.display())
}

/// Returns a prompt that is the name of a model: `run NAME PROMPT` is what ollama's users type.
pub fn model_among(prompts: &[String]) -> Option<String> {
    let is_model = |text: &&String| {
        let known = || ModelName::parse(text).is_ok_and(|name| name.is_known());
        !text.contains(char::is_whitespace) && (known() || models::folders().is_named(text))
    };
    prompts.first().filter(|_| prompts.len() > 1).filter(is_model).cloned()
}
