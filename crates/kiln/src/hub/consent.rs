//! Consent to licences: told before a download, and needed for it.

use std::io::IsTerminal;

use kiln_base::printable_line;
use kiln_hub::{ModelPlan, Terms};

use crate::error::CliError;
use crate::values::bytes;
use crate::{hub, terminal};

/// Names the licences of what will be downloaded, and asks whether they are accepted, unless they are. Without a
/// terminal, it is an error that says how to accept them.
pub fn require(plan: &ModelPlan, accepted: bool, quiet: bool) -> Result<(), CliError> {
    let terms = plan.terms();
    if terms.is_empty() || accepted && quiet {
        return Ok(());
    }
    let name = plan.model.name.short();
    let listed: Vec<String> = terms.iter().map(|terms| describe(terms)).collect();
    let listed = listed.join(" and the ");
    if accepted {
        terminal::tell(&format!("`{name}` is under the {listed}"));
        return Ok(());
    }
    if std::io::stdin().is_terminal() && std::io::stderr().is_terminal() {
        let size = bytes(plan.missing());
        let question = format!("`{name}` ({size}) is under the {listed}\naccept it and download?");
        return if hub::ask(&question) { Ok(()) } else { Err(CliError::cancelled()) };
    }
    Err(CliError::new(format!("`{name}` is under the {listed}, which must be accepted before the download"))
        .hint(format!("read it, then run `kiln pull {name} --accept-license`")))
}

/// A licence and where to read it. What a repository says about itself may have any form.
fn describe(terms: &Terms) -> String {
    format!("{} ({})", printable_line(&terms.licence), printable_line(&terms.url))
}
