//! Downloads known models into the Hugging Face cache.

use std::path::Path;

use kiln_base::printable_line;
use kiln_hub::{HubSettings, ModelName, ModelPlan, PullProgress, PullSummary, Terms};

use kiln_engine::{Field, hint};

use crate::error::{Error, Result};

/// Returns the hub's endpoint and the cache folder, from the environment.
pub fn cache_settings() -> Result<HubSettings> {
    let settings = HubSettings::from_env().ok_or(kiln_hub::Error::NoCache)?;
    let endpoint = &settings.endpoint;
    if !["http://", "https://"]
        .iter()
        .any(|scheme| endpoint.len() > scheme.len() && endpoint.starts_with(scheme))
    {
        return Err(Error::usage(
            format!("HF_ENDPOINT is `{endpoint}`, which is not the address of a hub"),
            "give it with its scheme, such as https://huggingface.co",
        ));
    }
    Ok(settings)
}

/// Returns how to reach the hub, unless downloads are disabled.
pub fn download_settings() -> Result<HubSettings> {
    if is_set("HF_HUB_OFFLINE") {
        return Err(Error::missing(
            "downloads are disabled: HF_HUB_OFFLINE is set",
            "unset the variable for this command",
        ));
    }
    let settings = cache_settings()?;
    HubSettings::check_env()?;
    Ok(settings)
}

/// Downloads a model by its hub name; files that are cached already are not downloaded again. `on_progress` cancels
/// with `false`. A model whose licence has conditions needs `accept_licence`; the error names the licence.
pub fn pull(
    name: &str,
    accept_licence: bool,
    on_progress: &mut dyn FnMut(PullProgress<'_>) -> bool,
) -> Result<PullSummary> {
    let name = ModelName::parse(name)?;
    let settings = download_settings()?;
    let plan = kiln_hub::plan_model(&settings, &name)?;
    if !accept_licence {
        require_no_terms(&plan)?;
    }
    Ok(plan.run(&settings, on_progress)?)
}

/// Refuses a download whose licences have conditions.
pub fn require_no_terms(plan: &ModelPlan) -> Result<()> {
    let Some(terms) = terms(plan) else { return Ok(()) };
    let name = plan.model.name.short();
    Err(Error::missing(
        format!("`{name}` is under the {terms}, which must be accepted before the download"),
        hint![format!("read it, then pull `{name}` with "), Field::AcceptLicense.on()],
    ))
}

/// Names the licences that must be accepted before a download, and where to read them. What a repository says
/// about itself is untrusted, so it is made printable.
pub fn terms(plan: &ModelPlan) -> Option<String> {
    let describe =
        |terms: &&Terms| format!("{} ({})", printable_line(&terms.licence), printable_line(&terms.url));
    let terms: Vec<String> = plan.terms().iter().map(describe).collect();
    (!terms.is_empty()).then(|| terms.join(" and the "))
}

/// Returns the name of a model that is not a path but known, so that [`pull`] downloads it. Not any `owner/repo`: it
/// may be a path with a typo, and somebody may have a repository of that name.
pub fn known(model: &Path) -> Option<ModelName> {
    let name = Some(model).filter(|model| !model.exists()).and_then(Path::to_str)?;
    ModelName::parse(name).ok().filter(ModelName::is_known)
}

fn is_set(name: &str) -> bool {
    let value = std::env::var(name).unwrap_or_default().to_ascii_lowercase();
    ["1", "true", "yes", "on"].contains(&value.as_str())
}
