//! The hub's HTTP API: listing and downloading files.
//!
//! `ureq` with `rustls`: the hub's own crate brings an asynchronous runtime and a second HTTP stack, and leaves checksums and
//! unsafe names to its caller. The hub is not trusted: names are checked before they become paths, nothing longer than
//! announced is written, a file counts only if its hash is right, and the token goes to the endpoint only.

use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::name::is_path_component;
use crate::remote_file::RemoteFile;
use crate::{Error, HubSettings, ModelName, Result};

/// The largest list of files that is accepted, in bytes.
const MAX_LIST_BYTES: u64 = 32 << 20;

/// The longest name of a licence that is shown, in characters.
const MAX_LICENCE: usize = 60;
/// The longest address of a licence that is shown, in bytes.
const MAX_URL: usize = 300;

/// The files of a repository at one commit.
#[derive(Debug)]
pub(crate) struct RepoListing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
    pub licence: Option<String>,
    /// The address of the licence's text, if it is stated.
    pub licence_url: Option<String>,
    /// Whether its terms must be accepted on its page.
    pub gated: bool,
}

#[derive(Deserialize)]
struct ModelInfo {
    sha: String,
    siblings: Vec<Sibling>,
    /// The head of the model card, which its author writes: of any form.
    #[serde(default, rename = "cardData")]
    card: serde_json::Value,
    /// `false`, or how access is granted.
    #[serde(default)]
    gated: serde_json::Value,
}

impl ModelInfo {
    /// The stated licence; `other` stands for one with a name of its own. The text is shown, so it must be plain.
    fn licence(&self) -> Option<String> {
        let text = |key: &str| self.card.get(key)?.as_str();
        let licence = text("license").filter(|licence| *licence != "other");
        let licence = licence.or_else(|| text("license_name")).or_else(|| text("license"))?;
        let plain = |c: &char| c.is_ascii_graphic() || *c == ' ';
        Some(licence.chars().filter(plain).take(MAX_LICENCE).collect()).filter(|l: &String| !l.is_empty())
    }

    fn licence_url(&self) -> Option<String> {
        let link = self.card.get("license_link")?.as_str()?;
        let is_plain = link.len() <= MAX_URL && link.bytes().all(|b| b.is_ascii_graphic());
        (link.starts_with("https://") && is_plain).then(|| link.to_owned())
    }

    fn is_gated(&self) -> bool {
        self.gated.is_string() || self.gated == true
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

/// A client of the hub.
pub(crate) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl Client {
    pub fn new(settings: &HubSettings) -> Client {
        let timeout = Some(settings.timeout);
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_resolve(timeout)
            .timeout_connect(timeout)
            .timeout_send_request(timeout)
            .timeout_recv_response(timeout)
            // Detects dead connections; a download then resumes where it stopped.
            .timeout_per_read(timeout)
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .build();
        let (endpoint, token) = (settings.endpoint.clone(), settings.token.clone());
        Client { agent: config.into(), endpoint, token }
    }

    /// Lists the files of a repository.
    pub fn list(&self, name: &ModelName) -> Result<RepoListing> {
        let ModelName { repo, revision, .. } = name;
        let url =
            format!("{}/api/models/{repo}/revision/{}?blobs=true", self.endpoint, percent_encode(revision));
        let mut response = self.get(&url, None)?;
        self.check(&response, &url, repo, || format!("repository `{repo}` with a revision `{revision}`"))?;
        let bad = |what: String| Error::BadResponse { what, url: url.clone() };
        let text = response.body_mut().with_config().limit(MAX_LIST_BYTES).read_to_vec();
        let text = text.map_err(|e| Error::Connection { url: url.clone(), reason: e.to_string() })?;
        let info: ModelInfo =
            serde_json::from_slice(&text).map_err(|e| bad(format!("an invalid list ({e})")))?;
        if !is_hash(&info.sha) {
            return Err(bad(format!("a commit named {:?}", info.sha)));
        }
        let (licence, licence_url, gated) = (info.licence(), info.licence_url(), info.is_gated());
        let files = info.siblings.into_iter().map(|sibling| {
            let (size, hash) = match (sibling.lfs, sibling.size, sibling.blob_id) {
                (Some(lfs), ..) => (lfs.size, lfs.sha256),
                (None, Some(size), Some(id)) => (size, id),
                _ => {
                    return Err(bad(format!("a file {:?} without size or checksum", sibling.rfilename)));
                }
            };
            if !is_hash(&hash) {
                return Err(bad(format!("a file {:?} with the checksum {hash:?}", sibling.rfilename)));
            }
            Ok(RemoteFile { path: sibling.rfilename, size, hash })
        });
        let files = files.collect::<Result<_>>()?;
        Ok(RepoListing { commit: info.sha, files, licence, licence_url, gated })
    }

    /// Requests a file from byte `from` on. Returns its address and the response, with status 200, 206 or 416.
    pub fn download(
        &self,
        repo: &str,
        commit: &str,
        path: &str,
        from: u64,
    ) -> Result<(String, Response<Body>)> {
        let components: Vec<String> = path.split('/').map(percent_encode).collect();
        let url = format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, components.join("/"));
        let response = self.get(&url, (from > 0).then_some(from))?;
        // 200: the whole file; 206: the rest; 416: there is no rest.
        if ![200, 206, 416].contains(&response.status().as_u16()) {
            self.check(&response, &url, repo, || format!("file `{path}` in `{repo}`"))?;
        }
        Ok((url, response))
    }

    fn get(&self, url: &str, from: Option<u64>) -> Result<Response<Body>> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(from) = from {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call().map_err(|e| Error::Connection { url: url.to_owned(), reason: e.to_string() })
    }

    /// Converts a status other than 200 to an error.
    fn check(
        &self,
        response: &Response<Body>,
        url: &str,
        repo: &str,
        what: impl Fn() -> String,
    ) -> Result<()> {
        let status = response.status().as_u16();
        let code = response.headers().get("x-error-code").and_then(|v| v.to_str().ok()).unwrap_or_default();
        let repo = repo.to_owned();
        match status {
            200 => Ok(()),
            401 | 403 if self.token.is_some() && (code == "GatedRepo" || status == 403) => {
                let page = format!("{}/{repo}", self.endpoint);
                Err(Error::Gated { repo, page })
            }
            401 | 403 => Err(Error::Unauthorised { repo, status }),
            404 => Err(Error::NotFound { what: what() }),
            // The hub is busy; a `Connection` error is retried.
            408 | 429 | 500..=599 => {
                Err(Error::Connection { url: url.to_owned(), reason: format!("the hub answered {status}") })
            }
            _ => Err(Error::BadResponse { what: format!("status {status}"), url: url.to_owned() }),
        }
    }
}

/// Whether this looks like a SHA-1 or SHA-256 in hex.
fn is_hash(text: &str) -> bool {
    (40..=64).contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Percent-encodes one path component.
fn percent_encode(text: &str) -> String {
    if is_path_component(text) {
        return text.to_owned();
    }
    let unreserved = |b: u8| b.is_ascii_alphanumeric() || b"._-~".contains(&b);
    text.bytes()
        .map(|b| if unreserved(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}
