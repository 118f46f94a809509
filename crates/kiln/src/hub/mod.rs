//! Models that are fetched: `kiln pull`, `kiln models`, `kiln rm`, and what a name of the hub stands for.

pub mod list;
pub mod pull;
pub mod remove;

use std::path::{Path, PathBuf};

use kiln_hub::{Cache, Installed, Name, Settings};

use crate::failure::Failure;

/// Where models are fetched from and kept.
pub fn settings() -> Result<Settings, Failure> {
    Settings::from_env().ok_or_else(|| Failure::from(kiln_hub::Error::NoCache))
}

/// The name on the hub that is asked for, if it is one, and where its model is in the cache.
pub fn pulled(asked: &Path) -> Option<(String, PathBuf)> {
    let name = Name::parse(asked.to_str()?).ok()?;
    let cache = Cache::new(Settings::from_env()?.cache);
    let path = cache.find(&name).ok()??;
    Some((name.short(), path))
}

/// Whether a name is one that `kiln pull` takes.
pub fn can_be_pulled(asked: &Path) -> bool {
    asked.to_str().is_some_and(|text| Name::parse(text).is_ok())
}

/// The models in the cache that are of the FLUX.2 family, or all of them.
pub fn installed(all: bool) -> Vec<Installed> {
    let found = Settings::from_env().map_or(Vec::new(), |settings| Cache::new(settings.cache).list());
    found.into_iter().filter(|one| all || is_flux2(one)).collect()
}

/// Whole models in the cache, whose parts may go with a transformer that came alone.
pub fn whole_models() -> Vec<PathBuf> {
    let found = installed(false).into_iter().filter(|one| one.is_model && !one.incomplete);
    found.map(|one| one.snapshot).collect()
}

/// The short name of the whole model whose parts go with a klein of this width of texts.
pub fn whole_model(text_width: usize) -> Option<&'static str> {
    match text_width {
        7680 => Some("klein-4b"),
        12288 => Some("klein-9b"),
        _ => None,
    }
}

/// How `-m` takes it.
pub fn short(repo: &str) -> String {
    Name { repo: repo.to_owned(), revision: "main".into(), pattern: None }.short()
}

fn is_flux2(one: &Installed) -> bool {
    let name = one.repo.to_ascii_lowercase().replace(['.', '-', '_'], "");
    let index = || std::fs::read_to_string(one.snapshot.join("model_index.json"));
    name.contains("flux2") || one.is_model && index().is_ok_and(|text| text.contains("\"Flux2"))
}
