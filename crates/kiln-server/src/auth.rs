//! Who is let in: an API key, or a session that a browser got for it; and browsers only from our own page.

use std::collections::VecDeque;
use std::sync::Mutex;

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_base::lock;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::server::random;

/// The cookie of a session.
pub(crate) const COOKIE: &str = "kiln_session";
/// Browsers that are let in at the same time.
const SESSIONS: usize = 64;

type Hash = [u8; 32];

/// What opens the door. Only hashes are kept and compared, in constant time, so that neither content nor length leaks.
pub(crate) struct Keys {
    key: Option<Hash>,
    sessions: Mutex<VecDeque<Hash>>,
}

impl Keys {
    pub(crate) fn new(key: Option<&str>) -> Keys {
        Keys { key: key.map(hash), sessions: Mutex::default() }
    }

    /// Whether a key is needed at all.
    pub(crate) fn needed(&self) -> bool {
        self.key.is_some()
    }

    /// Whether these headers open the door.
    pub(crate) fn open(&self, headers: &HeaderMap) -> bool {
        let Some(key) = &self.key else { return true };
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        if given.and_then(secret).is_some_and(|secret| same(&hash(&secret), key)) {
            return true;
        }
        let Some(session) = cookie(headers) else { return false };
        let session = hash(session);
        let sessions = lock(&self.sessions);
        // All are looked at: the time says nothing about which one it was.
        sessions.iter().fold(false, |found, known| found | same(&session, known))
    }

    /// A new session's secret; the oldest makes room.
    pub(crate) fn session(&self) -> String {
        let secret: String = random::<32>().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut sessions = lock(&self.sessions);
        if sessions.len() == SESSIONS {
            sessions.pop_front();
        }
        sessions.push_back(hash(&secret));
        secret
    }
}

/// The key in an `Authorization` header: a bearer token, or the password of the basic scheme.
fn secret(value: &str) -> Option<String> {
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

fn cookie(headers: &HeaderMap) -> Option<&str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    all.flat_map(|value| value.split(';'))
        .find_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='))
}

fn hash(text: &str) -> Hash {
    Sha256::digest(text.as_bytes()).into()
}

fn same(a: &Hash, b: &Hash) -> bool {
    a.ct_eq(b).into()
}

/// Whether a browser that sends these headers was asked by our own page.
///
/// Pages of others can make a browser send requests here, and can make up names for this machine. So the name asked for
/// must be one of ours, and the page that asks must come from that same name.
pub(crate) fn is_own_page(headers: &HeaderMap, hosts: &[String]) -> bool {
    let text = |name| headers.get(name).map(|value: &axum::http::HeaderValue| value.to_str().unwrap_or("?"));
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
    fn a_key_opens_as_bearer_or_password_and_nothing_else_does() {
        let keys = Keys::new(Some("s3cret"));
        let with = |value: &str| keys.open(&headers(&[(header::AUTHORIZATION, value)]));
        assert!(with("Bearer s3cret") && with("bearer s3cret"));
        assert!(with(&format!("Basic {}", BASE64_STANDARD.encode("me:s3cret"))));
        for wrong in [
            "s3cret",
            "Bearer",
            "Bearer s3cre",
            "Bearer s3cret2",
            "Basic !",
            "Basic czNjcmV0",
            "Digest s3cret",
        ] {
            assert!(!with(wrong), "{wrong}");
        }
        assert!(!keys.open(&HeaderMap::new()));
        assert!(Keys::new(None).open(&HeaderMap::new()));
    }

    #[test]
    fn a_session_opens_until_newer_ones_take_its_place() {
        let keys = Keys::new(Some("s3cret"));
        let first = keys.session();
        let with =
            |session: &str| keys.open(&headers(&[(header::COOKIE, &format!("a=b; {COOKIE}={session}"))]));
        assert!(with(&first) && !with("") && !with(&first[1..]));
        for _ in 0..SESSIONS {
            keys.session();
        }
        assert!(!with(&first));
    }

    #[test]
    fn browsers_are_let_in_from_our_own_page_only() {
        let from = |host: &str, origin: Option<&str>| {
            let mut pairs = vec![(header::HOST, host)];
            pairs.extend(origin.map(|origin| (header::ORIGIN, origin)));
            is_own_page(&headers(&pairs), &["kiln.home".into()])
        };
        assert!(from("localhost:7860", None) && from("127.0.0.1:7860", Some("http://127.0.0.1:7860")));
        assert!(
            from("[::1]:7860", Some("http://[::1]:7860")) && from("kiln.home", Some("https://kiln.home"))
        );
        assert!(!from("localhost:7860", Some("http://evil.example")));
        assert!(!from("evil.example:7860", None), "a name that was made up for this machine");
        assert!(!from("localhost:7860", Some("null")));
        assert!(!from("localhost:7860", Some("http://localhost:1234")));
    }
}
