//! `kiln verify`: checks who signed images, and whether they have changed since; reads their marks.

use std::path::{Path, PathBuf};

use kiln_catalog::properties::Properties;
use kiln_catalog::{FileOrigin, trust_with};
use kiln_credentials::{Action, CAN_VERIFY, FoundIngredient, State, Trust};
use serde::Serialize;

use crate::args::VerifyArgs;
use crate::error::{CliError, ErrorKind};
use crate::{output, terminal};

/// What is said of a file.
#[derive(Serialize)]
struct FileReport {
    file: String,
    /// Why the file can't be read.
    error: Option<String>,
    #[serde(flatten)]
    origin: FileOrigin,
}

/// Checks files. A returned error is already reported: the exit code tells the worst of them.
pub fn run(args: &VerifyArgs) -> Result<(), CliError> {
    let prepared = if CAN_VERIFY { trust(&args.trust) } else { Err(not_built()) };
    let trust = prepared.inspect_err(|error| terminal::tell(&error.to_string()))?;
    let mut worst = None;
    for (i, path) in args.files.iter().enumerate() {
        let report = check(path, &trust);
        let text = if args.json {
            serde_json::to_string(&report).unwrap_or_default() + "\n"
        } else {
            let gap = if i > 0 { "\n" } else { "" };
            format!("{gap}{}", describe(&report).to_text())
        };
        output::print(text.as_bytes()).inspect_err(|error| terminal::tell(&error.to_string()))?;
        worst = worst.max(problem(&report));
    }
    match worst {
        None => Ok(()),
        Some(Worst::None) => Err(CliError { kind: ErrorKind::NoCredentials, ..CliError::new("none") }),
        Some(Worst::Invalid) => Err(CliError::new("invalid")),
    }
}

/// What the exit code tells, the worse the greater.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Worst {
    None,
    Invalid,
}

fn problem(report: &FileReport) -> Option<Worst> {
    match report.origin.credentials.state {
        State::Trusted | State::Valid => None,
        State::None => Some(Worst::None),
        State::Invalid | State::NotChecked => Some(Worst::Invalid),
    }
}

fn not_built() -> CliError {
    CliError::new("this program was built without `verify`, so nothing was checked")
        .hint("the released programs have it; in a clone: cargo build --release --features verify")
}

/// One's own root, and those of files.
pub fn trust(files: &[PathBuf]) -> Result<Trust, CliError> {
    trust_with(files).map_err(|error| {
        CliError::new(error.to_string()).hint("--trust takes the root certificate of a signer, as PEM")
    })
}

fn check(path: &Path, trust: &Trust) -> FileReport {
    let file = path.display().to_string();
    match FileOrigin::of_file(path, trust) {
        Ok(origin) => FileReport { file, error: None, origin },
        Err(error) => FileReport { file, error: Some(error.to_string()), origin: FileOrigin::unreadable() },
    }
}

fn describe(report: &FileReport) -> Properties {
    let properties = Properties::default().with("file", &report.file);
    if let Some(error) = &report.error {
        return properties.with("error", error);
    }
    let found = &report.origin.credentials;
    let signed = found.time.as_ref().map(|time| {
        format!(
            "{time}, {}",
            if found.time_stamped { "with a trusted time stamp" } else { "as the signer says" }
        )
    });
    let mut properties = properties
        .with("credentials", found.summary())
        .with("trusted by", found.trusted_by)
        .with("signed by", &found.signer)
        .with("certificate of", &found.issuer)
        .with("signed", signed)
        .with("generator", &found.generator)
        .with("model", &found.model)
        .with("producer", &found.producer);
    for action in &found.actions {
        properties = properties.with("done", done(action));
    }
    for ingredient in &found.ingredients {
        properties = properties.with("made from", made_from(ingredient));
    }
    for problem in found.problems.iter().filter(|_| found.state != State::Trusted) {
        properties = properties.with("problem", format!("{} ({})", problem.message, problem.code));
    }
    properties
        .with("ai mark", report.origin.mark_summary())
        .with("watermark", report.origin.watermark_summary())
}

fn done(action: &Action) -> String {
    let name = action.action.strip_prefix("c2pa.").unwrap_or(&action.action);
    let agent = action.agent.as_ref().map(|agent| format!(" with {agent}")).unwrap_or_default();
    let source = action.source.as_ref().map(|source| format!(" ({source})")).unwrap_or_default();
    format!("{name}{agent}{source}")
}

fn made_from(ingredient: &FoundIngredient) -> String {
    let title = ingredient.title.as_deref().unwrap_or("an image");
    let relationship = ingredient.relationship.as_deref().unwrap_or("of unknown use");
    let by = ingredient.signer.as_ref().map(|signer| format!(", signed by {signer}")).unwrap_or_default();
    let state = match ingredient.state {
        State::None => "without credentials",
        State::Trusted => "trusted when it was used",
        State::Valid => "valid when it was used, signer unknown",
        State::Invalid => "its credentials were invalid",
        State::NotChecked => "its credentials were not checked",
    };
    format!("{title} ({relationship}): {state}{by}")
}
