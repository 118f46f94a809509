//! Offers to download a model that `-m` names and that is not there.

use std::io::{IsTerminal, Write};
use std::path::Path;

use kiln_catalog::ModelLocation;
use kiln_engine::Request;
use kiln_hub::{ModelName, ModelPlan};

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
    let Some(name) = model.and_then(kiln_catalog::known) else { return Err(error) };
    let can_ask = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !options.yes && !can_ask {
        let hint = format!("`kiln pull {}` downloads it from Hugging Face; so does --yes", name.short());
        return Err(CliError { hint: Some(hint), ..error });
    }
    let settings = kiln_catalog::download_settings()?;
    let plan = kiln_hub::plan_model(&settings, &name)
        .map_err(kiln_catalog::Error::from)
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

/// Takes the model from the first of the prompts, if it names one and there are others: `run MODEL PROMPT` is what
/// ollama's users type. Returns a note about what it was taken for.
pub fn take_model(request: &mut Request, has_more_prompts: bool) -> Result<Option<String>, CliError> {
    let Some(first) = request.prompts.first().filter(|text| !text.contains(char::is_whitespace)) else {
        return Ok(None);
    };
    let has_more_prompts = has_more_prompts || request.prompts.len() > 1;
    let is_alias = ModelName::parse(first).is_ok_and(|name| name.is_known());
    if !is_alias && !is_here(first) {
        // A word that is no model's name, but nearly, and looks like one.
        let similar = models::folders().similar(first);
        let looks_alike = has_more_prompts && first.contains(|c: char| c.is_ascii_digit() || c == '-');
        let similar = similar.first().filter(|_| looks_alike);
        return Ok(
            similar.map(|name| format!("`{first}` is taken as a prompt; did you mean the model {name}?"))
        );
    }
    if has_more_prompts {
        let model = request.prompts.remove(0);
        let note = format!("`{model}` is taken as the model, as with -m; a prompt after -p never is");
        request.model = Some(model.into());
        return Ok(Some(note));
    }
    // One word: nobody draws `klein-4b`, but there are embers, and a model's file may be called fox.
    if is_alias && first.contains('-') {
        return Err(CliError::usage(format!("there is no prompt for the model `{first}`")).hint(format!(
            "describe the image: kiln run {first} \"a red fox in the snow\"; or give the word as a prompt with -p"
        )));
    }
    Ok(Some(format!("`{first}` is taken as a prompt; the model of that name is chosen with -m {first}")))
}

/// Whether a word names a model on this machine: built in, in a models folder or in the Hugging Face cache, or a path to
/// one that looks like a path.
fn is_here(text: &str) -> bool {
    let looks_like_path = text.contains(std::path::is_separator)
        || [".safetensors", ".gguf", ".toml"].iter().any(|end| text.ends_with(end));
    match models::resolve(Some(Path::new(text))) {
        Ok(ModelLocation::BuiltIn | ModelLocation::BuiltInBase | ModelLocation::Named { .. }) => true,
        Ok(ModelLocation::Path(_)) => looks_like_path,
        Err(_) => false,
    }
}
