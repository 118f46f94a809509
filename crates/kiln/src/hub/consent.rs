//! Consent to licences: told before a download, and needed for it.

use std::io::IsTerminal;

use kiln_hub::ModelPlan;

use crate::error::CliError;
use crate::values::bytes;
use crate::{hub, terminal};

/// Names the licences of what will be downloaded, and asks whether they are accepted, unless they are. Without a
/// terminal, it is an error that says how to accept them.
pub fn require(plan: &ModelPlan, accepted: bool, quiet: bool) -> Result<(), CliError> {
    let Some(listed) = kiln_catalog::terms(plan).filter(|_| !(accepted && quiet)) else { return Ok(()) };
    let name = plan.model.name.short();
    if accepted {
        terminal::tell(&format!("`{name}` is under the {listed}"));
        return Ok(());
    }
    if std::io::stdin().is_terminal() && std::io::stderr().is_terminal() {
        let size = bytes(plan.missing());
        let question = format!("`{name}` ({size}) is under the {listed}\naccept it and download?");
        return if hub::ask(&question) { Ok(()) } else { Err(CliError::cancelled()) };
    }
    Ok(kiln_catalog::require_no_terms(plan)?)
}
