//! Downloaded models: `kiln pull`, `kiln models`, `kiln rm`.

pub mod consent;
pub mod models;
pub mod offer;
pub mod pull;
pub mod rm;

use std::io::Write;

use kiln_engine::Model;

/// Asks a question on the terminal.
pub fn ask(question: &str) -> bool {
    let _ = write!(std::io::stderr(), "{question} [y/N] ");
    let mut answer = String::new();
    let _ = std::io::stdin().read_line(&mut answer);
    ["y", "yes"].contains(&answer.trim().to_lowercase().as_str())
}

/// Returns the components that a model lacks: `no text encoder and no autoencoder`.
pub fn missing_components(model: &Model) -> Option<String> {
    let components = [("text encoder", model.text_encoder.is_none()), ("autoencoder", model.vae.is_none())];
    let missing =
        components.into_iter().filter(|(_, missing)| *missing).map(|(name, _)| format!("no {name}"));
    let missing: Vec<String> = missing.collect();
    (!missing.is_empty()).then(|| missing.join(" and "))
}
