//! What the hub is asked, and what it answers.

use std::time::Duration;

use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::name::is_plain;
use crate::{Error, Name, Result, Settings};

/// The longest list of files that is read.
const MOST_LIST_BYTES: u64 = 32 << 20;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Where it is in the repository.
    pub path: String,
    /// Its bytes.
    pub size: u64,
    /// What it is named after in the cache, and checked with: a SHA-256 of large files, git's SHA-1 of small ones.
    pub hash: String,
}

/// A repository at one commit.
#[derive(Debug)]
pub(crate) struct Listing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
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

/// Speaks to the hub.
pub(crate) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl Client {
    pub fn new(settings: &Settings) -> Client {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            // A line that is dead, not slow: what has come is kept, and the rest asked for again.
            .timeout_per_read(Some(Duration::from_secs(60)))
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .build();
        let (endpoint, token) = (settings.endpoint.clone(), settings.token.clone());
        Client { agent: config.into(), endpoint, token }
    }

    /// The files of a repository.
    pub fn list(&self, name: &Name) -> Result<Listing> {
        let Name { repo, revision, .. } = name;
        let url = format!("{}/api/models/{repo}/revision/{}?blobs=true", self.endpoint, escaped(revision));
        let mut answer = self.get(&url, None)?;
        self.check(&answer, &url, repo, || format!("repository `{repo}` with a revision `{revision}`"))?;
        let nonsense = |what: String| Error::Answer { what, url: url.clone() };
        let text = answer.body_mut().with_config().limit(MOST_LIST_BYTES).read_to_vec();
        let text = text.map_err(|e| Error::Connection { url: url.clone(), reason: e.to_string() })?;
        let info: Info = serde_json::from_slice(&text)
            .map_err(|e| nonsense(format!("a list that can't be read ({e})")))?;
        if !is_hash(&info.sha) {
            return Err(nonsense(format!("a commit named {:?}", info.sha)));
        }
        let files = info.siblings.into_iter().map(|sibling| {
            let (size, hash) = match (sibling.lfs, sibling.size, sibling.blob_id) {
                (Some(lfs), ..) => (lfs.size, lfs.sha256),
                (None, Some(size), Some(id)) => (size, id),
                _ => {
                    return Err(nonsense(format!("a file {:?} without size or checksum", sibling.rfilename)));
                }
            };
            if !is_hash(&hash) {
                return Err(nonsense(format!("a file {:?} with the checksum {hash:?}", sibling.rfilename)));
            }
            Ok(RemoteFile { path: sibling.rfilename, size, hash })
        });
        Ok(Listing { commit: info.sha, files: files.collect::<Result<_>>()? })
    }

    /// A file from byte `from` on.
    pub fn file(&self, repo: &str, commit: &str, path: &str, from: u64) -> Result<(String, Response<Body>)> {
        let path_parts: Vec<String> = path.split('/').map(escaped).collect();
        let url = format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, path_parts.join("/"));
        let answer = self.get(&url, (from > 0).then_some(from))?;
        // The whole file, the rest of it, or that there is no rest.
        if ![200, 206, 416].contains(&answer.status().as_u16()) {
            self.check(&answer, &url, repo, || format!("file `{path}` in `{repo}`"))?;
        }
        Ok((url, answer))
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

    /// Turns a refusal into an error.
    fn check(&self, answer: &Response<Body>, url: &str, repo: &str, what: impl Fn() -> String) -> Result<()> {
        let status = answer.status().as_u16();
        let code = answer.headers().get("x-error-code").and_then(|v| v.to_str().ok()).unwrap_or_default();
        let repo = repo.to_owned();
        match status {
            200 => Ok(()),
            401 | 403 if self.token.is_some() && (code == "GatedRepo" || status == 403) => {
                let page = format!("{}/{repo}", self.endpoint);
                Err(Error::Gated { repo, page })
            }
            401 | 403 => Err(Error::Unauthorised { repo, status }),
            404 => Err(Error::NotFound { what: what() }),
            // The hub is busy: worth another attempt.
            408 | 429 | 500..=599 => {
                Err(Error::Connection { url: url.to_owned(), reason: format!("the hub answered {status}") })
            }
            _ => Err(Error::Answer { what: format!("status {status}"), url: url.to_owned() }),
        }
    }
}

/// Hexadecimal digits, as many as a hash has.
fn is_hash(text: &str) -> bool {
    (40..=64).contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// A part of a path as a part of an address.
fn escaped(text: &str) -> String {
    if is_plain(text) {
        return text.to_owned();
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-~".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
