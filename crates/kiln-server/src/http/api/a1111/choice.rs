//! What a client of A1111's API has chosen for its later requests.

use std::collections::HashMap;
use std::sync::Mutex;

use kiln_base::lock;
use serde_json::Value;

use crate::http::api::fields::Fields;
use crate::jobs::Jobs;
use crate::jobs::caller::Caller;

/// A model and an autoencoder; `None` for the server's and the model's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    pub(crate) model: Option<String>,
    pub(crate) vae: Option<String>,
}

/// The choice that `POST /sdapi/v1/options` made, for requests of this API that make none. Lasts until the server stops.
#[derive(Default)]
pub(crate) struct A1111Options(pub(super) Mutex<HashMap<String, Choice>>);

impl A1111Options {
    /// The choice of this caller's key.
    pub(super) fn of(&self, caller: &Caller) -> Choice {
        lock(&self.0).get(key_name(caller)).cloned().unwrap_or_default()
    }

    /// The choice for a request with these settings.
    pub(crate) fn choice(&self, jobs: &Jobs, caller: &Caller, settings: &Fields) -> Choice {
        let current = self.of(caller);
        let text = |name: &str| settings.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let model = text("sd_model_checkpoint").map(|title| model_name(jobs, title)).or(current.model);
        let vae = match text("sd_vae") {
            Some(title) => vae_name(jobs, title),
            None => current.vae,
        };
        Choice { model, vae }
    }
}

/// The name of a caller's key; without keys all callers share one choice.
pub(super) fn key_name(caller: &Caller) -> &str {
    caller.key.as_ref().map_or("", |key| &key.name)
}

/// The name of the model with this title. A1111's titles have an extension and a hash: `klein.safetensors [0123abcdef]`.
pub(super) fn model_name(jobs: &Jobs, title: &str) -> String {
    let known = |name: &str| {
        let is_alias = jobs.config.model_aliases.iter().any(|(alias, _)| alias == name);
        is_alias || jobs.catalogue.models().iter().any(|model| model.name == name)
    };
    let bare = title.split(" [").next().unwrap_or(title).trim();
    let stem = bare.strip_suffix(".safetensors").or_else(|| bare.strip_suffix(".gguf")).unwrap_or(bare);
    let name = [title, bare, stem].into_iter().find(|name| known(name));
    // An unknown name is refused later, with the list of known ones.
    name.unwrap_or(title).to_owned()
}

/// The name of an autoencoder; `None` for those that mean the model's own, as all that this server lacks do.
pub(super) fn vae_name(jobs: &Jobs, title: &str) -> Option<String> {
    let stem = title.strip_suffix(".safetensors").unwrap_or(title);
    jobs.catalogue.vaes().into_iter().find(|name| name == stem)
}
