//! Authentication: an API key, or a browser session obtained with it. Browser requests must come from our own page.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use crate::http::wrong_keys::WrongKeys;
use crate::jobs::keys::{ApiKey, KeyInfo};
use crate::jobs::sessions::{Session, Sessions, constant_time_eq, hash};

/// Name of the session cookie on an encrypted connection. Browsers accept this prefix only from the host itself.
const SECURE_COOKIE: &str = "__Host-kiln_session";
/// Name of the session cookie on a plain connection.
pub(crate) const PLAIN_COOKIE: &str = "kiln_session";

/// What the headers of a request say about who sent it.
#[derive(Clone, Debug)]
pub(crate) enum Identity {
    /// The server has no keys.
    Open,
    /// A valid key or session.
    Key(Arc<KeyInfo>),
    /// Neither.
    Missing,
    /// A key that is wrong.
    Wrong,
}

/// The API keys and the open sessions. Only hashes of keys are stored; they are compared in constant time, so that
/// neither content nor length leaks.
pub(crate) struct Auth {
    keys: RwLock<Vec<Arc<KeyInfo>>>,
    pub(crate) sessions: Sessions,
    pub(crate) wrong_keys: WrongKeys,
}

impl Auth {
    pub(crate) fn new(keys: &[ApiKey], sessions: Vec<Session>, wrong_key_delay: Duration) -> Auth {
        let auth = Auth {
            keys: RwLock::default(),
            sessions: Sessions::new(sessions),
            wrong_keys: WrongKeys::new(wrong_key_delay),
        };
        auth.set_keys(keys);
        auth
    }

    /// Replaces the keys. Sessions of keys that are gone end.
    pub(crate) fn set_keys(&self, keys: &[ApiKey]) {
        let info = |key: &ApiKey| {
            let (name, admin, quotas) = (key.name.clone(), key.admin, key.quotas);
            Arc::new(KeyInfo { hash: hash(&key.secret), name, admin, quotas })
        };
        let keys = keys.iter().map(info).collect();
        *self.keys.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = keys;
    }

    fn keys(&self) -> Vec<Arc<KeyInfo>> {
        self.keys.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Whether the headers carry a key to compare, which [`WrongKeys`] may forbid.
    pub(crate) fn carries_key(headers: &HeaderMap) -> bool {
        key_in(headers).is_some()
    }

    /// Who sent these headers, on an encrypted connection if `secure`.
    pub(crate) fn identify(&self, headers: &HeaderMap, secure: bool) -> Identity {
        let keys = self.keys();
        if keys.is_empty() {
            return Identity::Open;
        }
        if let Some(given) = key_in(headers) {
            let given = hash(&given);
            let mut found = Identity::Wrong;
            // Compare with all of them: the time must not tell which one matched.
            for key in keys {
                if constant_time_eq(&given, &key.hash) {
                    found = Identity::Key(key);
                }
            }
            return found;
        }
        let session = session_cookie(headers, secure).and_then(|secret| self.sessions.find(secret));
        let key =
            session.and_then(|session| keys.into_iter().find(|key| session.is_of(&key.name, &key.hash)));
        key.map_or(Identity::Missing, Identity::Key)
    }

    /// Opens a session for a key; see [`Sessions::open`].
    pub(crate) fn open_session(&self, key: &KeyInfo) -> (String, Session, Option<Session>) {
        self.sessions.open(&key.name, &key.hash)
    }

    /// Ends the session of these headers, and returns it.
    pub(crate) fn close_session(&self, headers: &HeaderMap, secure: bool) -> Option<Session> {
        let session = self.sessions.find(session_cookie(headers, secure)?)?;
        self.sessions.close(&session);
        Some(session)
    }
}

/// The `Set-Cookie` header of a session; an empty secret removes the cookie.
pub(crate) fn set_cookie(secret: &str, age: Duration, secure: bool) -> String {
    let (name, attribute) = if secure { (SECURE_COOKIE, "; Secure") } else { (PLAIN_COOKIE, "") };
    let age = age.as_secs();
    format!("{name}={secret}; HttpOnly; SameSite=Strict; Path=/; Max-Age={age}{attribute}")
}

/// The key in the `Authorization` header: a bearer token, or the password of basic authentication.
fn key_in(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
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

/// The secret in the session cookie. On an encrypted connection only the one that nobody else can set counts: a page of a
/// neighbouring host could give a browser the session of another key.
fn session_cookie(headers: &HeaderMap, secure: bool) -> Option<&str> {
    let name = if secure { SECURE_COOKIE } else { PLAIN_COOKIE };
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(found, _)| *found == name).map(|(_, value)| value)
}

/// Whether a request comes from our own page, or not from a browser at all.
///
/// A foreign page can make a browser send requests here, and can point a host name of its own at this machine (DNS
/// rebinding). So `host` must be one of our names, and `origin`, where present, must match it.
pub(crate) fn is_same_origin(host: Option<&str>, origin: Option<&str>, hosts: &[String]) -> bool {
    let Some(host) = host else { return false };
    let name = without_port(host);
    let local = ["localhost", "127.0.0.1", "[::1]"].iter().any(|local| local.eq_ignore_ascii_case(name));
    if !local && !hosts.iter().any(|ours| ours == "*" || ours.eq_ignore_ascii_case(name)) {
        return false;
    }
    let origin = origin.map(|origin| origin.split_once("://").map_or(origin, |(_, rest)| rest));
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

    fn auth(keys: &[ApiKey]) -> Auth {
        Auth::new(keys, Vec::new(), Duration::ZERO)
    }

    fn name(identity: &Identity) -> Option<&str> {
        if let Identity::Key(key) = identity { Some(&key.name) } else { None }
    }

    #[test]
    fn a_key_is_accepted_as_bearer_token_or_password_only() {
        let auth = auth(&[ApiKey::single("s3cret")]);
        let identify = |value: &str| auth.identify(&headers(&[(header::AUTHORIZATION, value)]), false);
        let basic = format!("Basic {}", BASE64_STANDARD.encode("me:s3cret"));
        for right in ["Bearer s3cret", "bearer s3cret", &basic] {
            assert_eq!(name(&identify(right)), Some("default"), "{right}");
        }
        for wrong in ["Bearer s3cre", "Bearer s3cret2", "Bearer "] {
            assert!(matches!(identify(wrong), Identity::Wrong), "{wrong}");
        }
        for none in ["s3cret", "Bearer", "Basic !", "Basic czNjcmV0", "Digest s3cret"] {
            assert!(matches!(identify(none), Identity::Missing), "{none}");
        }
        assert!(matches!(auth.identify(&HeaderMap::new(), false), Identity::Missing));
        assert!(matches!(super::tests::auth(&[]).identify(&HeaderMap::new(), false), Identity::Open));
    }

    #[test]
    fn a_session_stands_for_its_key_until_the_key_changes() {
        let keys = ApiKey::parse_file("ada s3cret admin\nbob another").unwrap();
        let auth = auth(&keys);
        let bob = auth.keys()[1].clone();
        let (secret, ..) = auth.open_session(&bob);
        for (cookie, secure) in [(PLAIN_COOKIE, false), (SECURE_COOKIE, true)] {
            let sent = headers(&[(header::COOKIE, &format!("a=b; {cookie}={secret}"))]);
            assert_eq!(name(&auth.identify(&sent, secure)), Some("bob"));
            assert!(matches!(auth.identify(&sent, !secure), Identity::Missing), "{cookie}");
        }
        let sent = headers(&[(header::COOKIE, &format!("{PLAIN_COOKIE}={secret}"))]);
        auth.set_keys(&ApiKey::parse_file("bob changed").unwrap());
        assert!(matches!(auth.identify(&sent, false), Identity::Missing));
        auth.set_keys(&keys);
        assert_eq!(name(&auth.identify(&sent, false)), Some("bob"));
        assert!(auth.close_session(&sent, false).is_some() && auth.close_session(&sent, false).is_none());
        assert!(matches!(auth.identify(&sent, false), Identity::Missing));
    }

    #[test]
    fn cookies_are_secure_on_encrypted_connections() {
        let cookie = set_cookie("x", Duration::from_secs(60), true);
        assert_eq!(cookie, "__Host-kiln_session=x; HttpOnly; SameSite=Strict; Path=/; Max-Age=60; Secure");
        assert!(!set_cookie("x", Duration::ZERO, false).contains("Secure"));
    }

    #[test]
    fn browsers_are_accepted_from_our_own_page_only() {
        let from =
            |host: &str, origin: Option<&str>| is_same_origin(Some(host), origin, &["kiln.home".into()]);
        assert!(from("localhost:7860", None) && from("127.0.0.1:7860", Some("http://127.0.0.1:7860")));
        assert!(
            from("[::1]:7860", Some("http://[::1]:7860")) && from("kiln.home", Some("https://kiln.home"))
        );
        assert!(!from("localhost:7860", Some("http://evil.example")));
        assert!(!from("evil.example:7860", None), "a foreign name that resolves to this machine");
        assert!(!from("localhost:7860", Some("null")));
        assert!(!from("localhost:7860", Some("http://localhost:1234")));
        assert!(from("LOCALHOST:7860", None) && from("Kiln.Home", Some("http://kiln.home")));
        assert!(!is_same_origin(None, None, &["*".into()]) && !is_same_origin(None, Some("http://a"), &[]));
    }
}
