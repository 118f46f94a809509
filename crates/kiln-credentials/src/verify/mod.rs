//! Checking the credentials of files, which may come from anybody.
//!
//! The validator is a crate of its own; it reads no file and no network here. Files and their stores have a maximum size, and a
//! check that takes too long is given up: its thread ends later, because its work is bounded.

mod carry;
mod claims;
mod text;
mod words;

use std::sync::mpsc;
use std::time::Duration;

use encypher_c2pa::{
    TrustListSource, VerificationReport, VerifyOptions, detached_manifest_evidence_with_options,
    verify_with_options,
};
use kiln_image::read_manifest_store;

use crate::{Problem, Report, State, Trust};

pub use carry::carry;

/// Whether this program checks credentials.
pub const CAN_VERIFY: bool = true;

/// Maximum bytes of a file that is checked.
const MAX_FILE: usize = 256 << 20;
/// Maximum bytes of its manifest store. Stores of cameras and editors with all their thumbnails have a few megabytes.
const MAX_STORE: usize = 16 << 20;
/// Maximum compressed manifests of a store. The validator allows 16 MB for each, and any number: a file of a megabyte would
/// take all memory.
const MAX_COMPRESSED: usize = 4;
/// The type of a box with one.
const COMPRESSED: &[u8; 16] = b"c2cm\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71";
/// How long a check may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// For what the validator may recurse into.
const STACK: usize = 8 << 20;
/// The names of lists of authorities in reports.
const C2PA_LIST: &str = "https://c2pa.org/trustlist";
const GIVEN_LIST: &str = "urn:kiln:trust";

/// Checks the credentials of a file.
///
/// `file` is dropped when the check has really ended, which may be after this returns.
pub fn verify<F: AsRef<[u8]> + Send + 'static>(file: F, trust: &Trust) -> Report {
    let trust = trust.clone();
    match limited(file, move |file| check(file, &trust)) {
        Ok(report) => report,
        Err(Failure::Start(error)) => {
            Report::not_checked("kiln.failed", format!("the check can't start: {error}"))
        }
        Err(Failure::Timeout) => {
            Report::not_checked("kiln.timeout", format!("the check took more than {PATIENCE:?}"))
        }
        Err(Failure::Panic) => invalid("kiln.failed"),
    }
}

/// Why a check has no result.
enum Failure {
    Start(std::io::Error),
    Timeout,
    /// The validator has panicked on this file.
    Panic,
}

/// Runs a check in a thread of its own, and waits for it as long as it may take.
fn limited<F, T>(file: F, check: impl FnOnce(&[u8]) -> T + Send + 'static) -> Result<T, Failure>
where
    F: AsRef<[u8]> + Send + 'static,
    T: Send + 'static,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    let check = move || {
        let result = check(file.as_ref());
        drop(file);
        let _ = sender.send(result);
    };
    let thread = std::thread::Builder::new().name("verify".into()).stack_size(STACK).spawn(check);
    thread.map_err(Failure::Start)?;
    receiver.recv_timeout(PATIENCE).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => Failure::Timeout,
        mpsc::RecvTimeoutError::Disconnected => Failure::Panic,
    })
}

fn check(file: &[u8], trust: &Trust) -> Report {
    let Some(media_type) = media_type(file) else { return Report::of(State::None) };
    if file.len() > MAX_FILE {
        return Report::not_checked("kiln.tooLarge", format!("the file is larger than {MAX_FILE} bytes"));
    }
    let options = options(trust);
    let Some(store) = store(file, media_type, &options) else {
        // In a damaged file, or in several places.
        let is_there = read_manifest_store(file).is_ok_and(|store| store.is_some());
        return if is_there { invalid("general.error") } else { Report::of(State::None) };
    };
    if let Some(message) = excess(&store) {
        return Report::not_checked("kiln.tooLarge", message);
    }
    let Ok(found) = verify_with_options(file, media_type, &options) else { return invalid("general.error") };
    let mut report = claims::report(&found);
    if matches!(&found.validation_state[..], "Trusted" | "Valid") {
        report.state = State::Valid;
    }
    // The validator tolerates expired and revoked certificates.
    if found.validation_results.failure.iter().any(words::is_fatal) {
        report.state = State::Invalid;
    }
    // Nor does it mind changes in the credentials of what an image was made from.
    let is_history_changed = claims::refuted(&found).next().is_some();
    if is_history_changed {
        report.state = State::Invalid;
    }
    if report.state == State::Valid && found.validation_state == "Trusted" {
        report.trusted_by = trusted_by(file, media_type, &store, trust);
        if report.trusted_by.is_some() {
            report.state = State::Trusted;
        }
    }
    report.problems = problems(&found, report.state);
    if is_history_changed {
        report.problems.insert(0, words::problem("ingredient.manifest.mismatch"));
    }
    report
}

/// Who vouches for the signer. The validator also knows lists that are not C2PA's, its maker's among them: those don't count.
fn trusted_by(file: &[u8], media_type: &str, store: &[u8], trust: &Trust) -> Option<&'static str> {
    const GIVEN: &str = "a given root";
    let is_trusted = |found: &VerificationReport| found.validation_state == "Trusted";
    let trusts = |pem: &str| {
        let alone = VerifyOptions { no_default_trust: true, trust_pem: Some(pem.into()), ..options(trust) };
        !pem.is_empty() && verify_with_options(file, media_type, &alone).is_ok_and(|found| is_trusted(&found))
    };
    if trusts(&trust.own) {
        return Some("the own root of this machine");
    }
    if trust.pem != trust.own && trusts(&trust.pem) {
        return Some(GIVEN);
    }
    // Only this version of the rules tells the list.
    let given = TrustListSource {
        uri: GIVEN_LIST.into(),
        source_type: "org.kiln.trust".into(),
        identifier: None,
        certificates_pem: trust.pem.clone(),
        not_before: None,
        not_after: None,
    };
    let named = VerifyOptions {
        spec_version: Some("2.5".into()),
        trust_pem: None,
        claim_trust_sources: (!trust.pem.is_empty()).then(|| vec![given]),
        ..options(trust)
    };
    if self::store(file, media_type, &named)? != store {
        return None;
    }
    let found = verify_with_options(file, media_type, &named).ok()?;
    let has = |uri: &str| found.validation_results.trust_list_sources.iter().any(|list| list.uri == uri);
    if has(GIVEN_LIST) {
        return Some(GIVEN);
    }
    has(C2PA_LIST).then_some("C2PA's trust list")
}

/// The store that the validator will read; `None` if there is none, or not in one place.
fn store(file: &[u8], media_type: &str, options: &VerifyOptions) -> Option<Vec<u8>> {
    let found = detached_manifest_evidence_with_options(file, media_type, options);
    found.ok().flatten().map(|found| found.manifest_store)
}

/// Why a store is not given to the validator.
fn excess(store: &[u8]) -> Option<String> {
    if store.len() > MAX_STORE {
        return Some(format!("the credentials are larger than {MAX_STORE} bytes"));
    }
    let compressed = store.windows(COMPRESSED.len()).filter(|bytes| bytes == COMPRESSED).count();
    let message = || format!("the credentials have more than {MAX_COMPRESSED} compressed parts");
    (compressed > MAX_COMPRESSED).then(message)
}

/// Nothing is asked of the network, whatever the environment says.
fn options(trust: &Trust) -> VerifyOptions {
    let mut options = VerifyOptions {
        trust_pem: (!trust.pem.is_empty()).then(|| trust.pem.clone()),
        online: Some(false),
        ..VerifyOptions::default()
    };
    options.telemetry.enabled = Some(false);
    options
}

fn problems(found: &VerificationReport, state: State) -> Vec<Problem> {
    let mut problems: Vec<Problem> = Vec::new();
    let failures = &found.validation_results.failure;
    // The worst first: an unknown signer is none in a file that was changed.
    let (fatal, others): (Vec<_>, Vec<_>) = failures.iter().partition(|status| words::is_fatal(status));
    for status in fatal.into_iter().chain(others.into_iter().filter(|_| state != State::Trusted)) {
        let problem = words::problem(&status.code);
        if !problems.contains(&problem) && problems.len() < claims::MAX_LIST {
            problems.push(problem);
        }
    }
    if problems.is_empty() && state == State::Valid {
        problems.push(words::problem(words::UNTRUSTED));
    }
    if problems.is_empty() && state == State::Invalid {
        problems.push(words::problem("general.error"));
    }
    problems
}

fn invalid(code: &str) -> Report {
    Report { problems: vec![words::problem(code)], ..Report::of(State::Invalid) }
}

/// The media type of the image files that may have credentials.
fn media_type(file: &[u8]) -> Option<&'static str> {
    match file {
        [0x89, b'P', b'N', b'G', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        [b'G', b'I', b'F', b'8', ..] => Some("image/gif"),
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => Some("image/tiff"),
        _ => None,
    }
}
