//! `kiln update --check`: asks whether there is a newer release. Nothing asks unless it is called.

use std::cmp::Ordering;
use std::time::Duration;

use kiln_catalog::properties::Properties;
use ureq::Agent;

use crate::args::UpdateArgs;
use crate::error::CliError;
use crate::{origin, output};

/// Where releases are; the installers of a release have the same address.
const RELEASES: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/releases");
/// The variable that names another place, such as a mirror.
const VARIABLE: &str = "KILN_RELEASES";
/// Longer answers are no version.
const MAX_BYTES: u64 = 1024;
const TIMEOUT: Duration = Duration::from_secs(10);

/// The address of the releases, without a trailing slash.
fn releases() -> String {
    let named = std::env::var(VARIABLE).ok().filter(|address| !address.trim().is_empty());
    named.map_or(RELEASES.into(), |address| address.trim().trim_end_matches('/').to_owned())
}

pub fn run(args: &UpdateArgs) -> Result<(), CliError> {
    if !args.check {
        return Err(CliError::usage("Kiln does not update itself")
            .hint("`kiln update --check` asks whether there is a newer release, and says how to get it"));
    }
    let base = releases();
    let latest = latest(&base)?;
    let current = Version::parse(env!("CARGO_PKG_VERSION")).unwrap_or_default();
    let is_newer = latest > current;
    let page = format!("{base}/tag/v{latest}");
    if args.json {
        let properties = Properties::default()
            .with("current", current.to_string())
            .with("latest", latest.to_string())
            .with("newer", is_newer)
            .with("page", &page);
        return output::print(properties.to_json().as_bytes());
    }
    let text = if is_newer {
        let how = origin::of_program()
            .map_or(String::new(), |(_, origin)| format!("update with {}\n", origin.update(&base)));
        format!("Kiln {latest} is available, this is {current}: {page}\n{how}")
    } else {
        format!("Kiln {current} is up to date; the latest release is {latest}\n")
    };
    output::print(text.as_bytes())
}

/// Asks for the version of the latest release.
fn latest(base: &str) -> Result<Version, CliError> {
    let url = format!("{base}/latest/download/VERSION");
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(TIMEOUT))
        .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")));
    let agent: Agent = config.build().into();
    let failed = |error: ureq::Error| {
        CliError::new(format!("can't reach `{url}`: {error}"))
            .hint("check the connection and the proxy; KILN_RELEASES names another address")
    };
    let mut response = agent.get(&url).call().map_err(failed)?;
    match response.status().as_u16() {
        200 => {}
        404 => {
            return Err(CliError::new(format!("there is no release at `{base}`"))
                .hint("KILN_RELEASES names another address"));
        }
        status => {
            return Err(CliError::new(format!("`{url}` answered with status {status}"))
                .hint("try again later; KILN_RELEASES names another address"));
        }
    }
    let text = response.body_mut().with_config().limit(MAX_BYTES).read_to_string();
    text.ok().and_then(|text| Version::parse(text.trim())).ok_or_else(|| {
        CliError::new(format!("`{url}` did not answer with a version"))
            .hint("check KILN_RELEASES, and that no proxy answers in its place")
    })
}

/// A version such as 0.2.0 or 0.2.0-rc.1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Version {
    numbers: [u64; 3],
    /// What makes it come before the version of its numbers.
    pre_release: Option<String>,
}

impl Version {
    fn parse(text: &str) -> Option<Version> {
        let (numbers, pre_release) = match text.split_once('-') {
            Some((numbers, pre_release)) => (numbers, Some(pre_release)),
            None => (text, None),
        };
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
        let is_usable = |text: &str| !text.is_empty() && text.len() <= 32 && text.chars().all(is_plain);
        if pre_release.is_some_and(|text| !is_usable(text)) {
            return None;
        }
        let numbers: Vec<u64> = numbers.split('.').map(|n| n.parse().ok()).collect::<Option<_>>()?;
        Some(Version { numbers: numbers.try_into().ok()?, pre_release: pre_release.map(str::to_owned) })
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.numbers;
        write!(f, "{major}.{minor}.{patch}")?;
        self.pre_release.as_ref().map_or(Ok(()), |text| write!(f, "-{text}"))
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Version) -> Ordering {
        // `rc.10` comes after `rc.9`: numbers count as such, and before words.
        let parts = |text: &Option<String>| -> Vec<Result<u64, String>> {
            let parts = text.iter().flat_map(|text| text.split('.'));
            parts.map(|part| part.parse().map_err(|_| part.to_owned())).collect()
        };
        let pre_release = match (&self.pre_release, &other.pre_release) {
            (None, Some(_)) => Ordering::Greater,
            (Some(_), None) => Ordering::Less,
            _ => parts(&self.pre_release).cmp(&parts(&other.pre_release)),
        };
        self.numbers.cmp(&other.numbers).then(pre_release)
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Version) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_number_and_after_their_candidates() {
        let in_order = ["0.1.0", "0.2.0-alpha.2", "0.2.0-rc.9", "0.2.0-rc.10", "0.2.0", "0.10.0", "1.0.0"];
        let versions = in_order.map(|text| Version::parse(text).unwrap());
        assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
        assert_eq!(versions.map(|version| version.to_string()), in_order);
        for wrong in ["", "1", "1.2", "1.2.3.4", "v1.2.3", "1.2.x", "1.2.3-", "1.2.3-a b", "<html>"] {
            assert_eq!(Version::parse(wrong), None, "{wrong}");
        }
    }
}
