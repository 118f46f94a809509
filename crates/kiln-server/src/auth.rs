//! Authentication: an API key, or a browser session obtained with it. Browser requests must come from our own page.

use std::collections::VecDeque;
use std::sync::Mutex;

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_base::{hex, lock};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::server::random_bytes;

/// Name of the session cookie.
pub(crate) const COOKIE: &str = "kiln_session";
/// Maximum number of browser sessions; a new one replaces the oldest.
const MAX_SESSIONS: usize = 64;

type Hash = [u8; 32];

/// The API key and the open sessions. Only hashes are stored; they are compared in constant time, so that neither
/// content nor length leaks.
pub(crate) struct Auth {
    key: Option<Hash>,
    sessions: Mutex<VecDeque<Hash>>,
}

impl Auth {
    pub(crate) fn new(key: Option<&str>) -> Auth {
        Auth { key: key.map(hash), sessions: Mutex::default() }
    }

    /// Whether the server has an API key.
    pub(crate) fn is_required(&self) -> bool {
        self.key.is_some()
    }

    /// Whether these headers carry the API key or a valid session.
    pub(crate) fn allows(&self, headers: &HeaderMap) -> bool {
        let Some(key) = &self.key else { return true };
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        if given.and_then(key_from_header).is_some_and(|given| constant_time_eq(&hash(&given), key)) {
            return true;
        }
        let Some(session) = session_cookie(headers) else { return false };
        let session = hash(session);
        let sessions = lock(&self.sessions);
        // Compare with all of them: the time must not tell which one matched.
        sessions.iter().fold(false, |found, known| found | constant_time_eq(&session, known))
    }

    /// Opens a session and returns its secret.
    pub(crate) fn new_session(&self) -> String {
        let secret = hex(random_bytes::<32>());
        let mut sessions = lock(&self.sessions);
        if sessions.len() == MAX_SESSIONS {
            sessions.pop_front();
        }
        sessions.push_back(hash(&secret));
        secret
    }
}

/// The key in an `Authorization` header: a bearer token, or the password of basic authentication.
fn key_from_header(value: &str) -> Option<String> {
    let (scheme, rest) = value.split_once(' ')?;
    match scheme.to_ascii_lowercase().as_str() {
        "bearer" => Some(rest.trim().to_owned()),
        "basic" => {
            let text = String::from_utf8(BASE64_STANDARD.decode(rest.trim()).ok()?).ok()?;
            text.split_once(':').map(|(_, password)| password.to_owned())
        }
        _ => None,
    }
}

fn session_cookie(headers: &HeaderMap) -> Option<&str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    all.flat_map(|value| value.split(';'))
        .find_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='))
}

fn hash(text: &str) -> Hash {
    Sha256::digest(text.as_bytes()).into()
}

fn constant_time_eq(a: &Hash, b: &Hash) -> bool {
    a.ct_eq(b).into()
}

/// Whether a request comes from our own page, or not from a browser at all.
///
/// A foreign page can make a browser send requests here, and can point a host name of its own at this machine (DNS
/// rebinding). So `Host` must be one of our names, and `Origin`, where present, must match it.
pub(crate) fn is_same_origin(headers: &HeaderMap, hosts: &[String]) -> bool {
    let text =
        |header| headers.get(header).map(|value: &axum::http::HeaderValue| value.to_str().unwrap_or("?"));
    let Some(host) = text(header::HOST) else { return text(header::ORIGIN).is_none() };
    let name = without_port(host);
    let local = ["localhost", "127.0.0.1", "[::1]"].contains(&name);
    if !local && !hosts.iter().any(|ours| ours == "*" || ours.eq_ignore_ascii_case(name)) {
        return false;
    }
    let origin = text(header::ORIGIN).map(|origin| origin.split_once("://").map_or(origin, |(_, rest)| rest));
    origin.is_none_or(|origin| origin.eq_ignore_ascii_case(host))
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.is_empty() => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(header::HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_key_is_accepted_as_bearer_token_or_password_only() {
        let auth = Auth::new(Some("s3cret"));
        let accepts = |value: &str| auth.allows(&headers(&[(header::AUTHORIZATION, value)]));
        assert!(accepts("Bearer s3cret") && accepts("bearer s3cret"));
        assert!(accepts(&format!("Basic {}", BASE64_STANDARD.encode("me:s3cret"))));
        for wrong in [
            "s3cret",
            "Bearer",
            "Bearer s3cre",
            "Bearer s3cret2",
            "Basic !",
            "Basic czNjcmV0",
            "Digest s3cret",
        ] {
            assert!(!accepts(wrong), "{wrong}");
        }
        assert!(!auth.allows(&HeaderMap::new()));
        assert!(Auth::new(None).allows(&HeaderMap::new()));
    }

    #[test]
    fn a_session_is_valid_until_newer_ones_replace_it() {
        let auth = Auth::new(Some("s3cret"));
        let first = auth.new_session();
        let accepts =
            |session: &str| auth.allows(&headers(&[(header::COOKIE, &format!("a=b; {COOKIE}={session}"))]));
        assert!(accepts(&first) && !accepts("") && !accepts(&first[1..]));
        for _ in 0..MAX_SESSIONS {
            auth.new_session();
        }
        assert!(!accepts(&first));
    }

    #[test]
    fn browsers_are_accepted_from_our_own_page_only() {
        let from = |host: &str, origin: Option<&str>| {
            let mut pairs = vec![(header::HOST, host)];
            pairs.extend(origin.map(|origin| (header::ORIGIN, origin)));
            is_same_origin(&headers(&pairs), &["kiln.home".into()])
        };
        assert!(from("localhost:7860", None) && from("127.0.0.1:7860", Some("http://127.0.0.1:7860")));
        assert!(
            from("[::1]:7860", Some("http://[::1]:7860")) && from("kiln.home", Some("https://kiln.home"))
        );
        assert!(!from("localhost:7860", Some("http://evil.example")));
        assert!(!from("evil.example:7860", None), "a foreign name that resolves to this machine");
        assert!(!from("localhost:7860", Some("null")));
        assert!(!from("localhost:7860", Some("http://localhost:1234")));
    }
}
