//! Browser sessions: who has sent the API key gets a cookie instead. They end after some time, with a logout, or when
//! the key changes; a restart does not end them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use kiln_base::{hex, lock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::jobs::random::random_bytes;
use crate::jobs::store::now;

/// How long a session lasts.
pub(crate) const SESSION_AGE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Maximum number of sessions of one key; a new one replaces the oldest.
const MAX_SESSIONS: usize = 64;

pub(crate) type Hash = [u8; 32];

pub(crate) fn hash(text: &str) -> Hash {
    Sha256::digest(text.as_bytes()).into()
}

pub(crate) fn constant_time_eq(a: &Hash, b: &Hash) -> bool {
    a.ct_eq(b).into()
}

/// A session as it is stored: without its secret, and without the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Session {
    /// Hash of its secret.
    pub(crate) hash: Hash,
    /// The name of its key.
    pub(crate) key: String,
    /// Hash of its own hash and the key's: another key of this name does not match.
    pub(crate) proof: Hash,
    /// When it ends, in milliseconds since 1970.
    pub(crate) expires: i64,
}

fn proof(session: &Hash, key: &Hash) -> Hash {
    Sha256::new().chain_update(session).chain_update(key).finalize().into()
}

impl Session {
    /// Whether it belongs to this key.
    pub(crate) fn is_of(&self, name: &str, key: &Hash) -> bool {
        self.key == name && constant_time_eq(&self.proof, &proof(&self.hash, key))
    }
}

/// The open sessions, oldest first.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<VecDeque<Session>>);

impl Sessions {
    pub(crate) fn new(stored: Vec<Session>) -> Sessions {
        Sessions(Mutex::new(stored.into()))
    }

    /// Opens a session for a key. Returns its secret, the session, and the one it replaces.
    pub(crate) fn open(&self, name: &str, key: &Hash) -> (String, Session, Option<Session>) {
        let secret = hex(random_bytes::<32>());
        let hash = hash(&secret);
        let expires = now() + SESSION_AGE.as_millis() as i64;
        let session = Session { hash, key: name.to_owned(), proof: proof(&hash, key), expires };
        let mut sessions = lock(&self.0);
        sessions.retain(|session| session.expires > now());
        let of_key = sessions.iter().filter(|session| session.key == name).count();
        let oldest = sessions.iter().position(|session| session.key == name);
        let replaced = oldest.filter(|_| of_key >= MAX_SESSIONS).and_then(|oldest| sessions.remove(oldest));
        sessions.push_back(session.clone());
        (secret, session, replaced)
    }

    /// The session with this secret.
    pub(crate) fn find(&self, secret: &str) -> Option<Session> {
        let hash = hash(secret);
        let mut found = None;
        // Compare with all of them: the time must not tell which one matched.
        for session in lock(&self.0).iter() {
            if constant_time_eq(&hash, &session.hash) {
                found = Some(session.clone());
            }
        }
        found.filter(|session| session.expires > now())
    }

    /// Adds a session that another gateway opened.
    pub(crate) fn add(&self, session: Session) {
        let mut sessions = lock(&self.0);
        sessions.retain(|other| other.hash != session.hash);
        sessions.push_back(session);
    }

    /// Ends the session with this hash, in hex.
    pub(crate) fn remove(&self, hash: &str) {
        lock(&self.0).retain(|session| hex(session.hash) != hash);
    }

    /// Ends a session.
    pub(crate) fn close(&self, session: &Session) {
        lock(&self.0).retain(|other| other.hash != session.hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_lasts_until_it_is_closed_expires_or_is_replaced() {
        let (sessions, key) = (Sessions::default(), hash("s3cret"));
        let (secret, session, _) = sessions.open("ada", &key);
        assert_eq!(sessions.find(&secret), Some(session.clone()));
        assert!(sessions.find("").is_none() && sessions.find(&secret[1..]).is_none());
        sessions.close(&session);
        assert!(sessions.find(&secret).is_none());
        let late = Sessions::new(vec![Session { expires: now() - 1, ..session }]);
        assert!(late.find(&secret).is_none());
        let (first, ..) = sessions.open("ada", &key);
        let (others, ..) = sessions.open("bob", &key);
        for _ in 1..MAX_SESSIONS {
            assert!(sessions.open("ada", &key).2.is_none());
        }
        assert!(sessions.find(&first).is_some());
        assert!(sessions.open("ada", &key).2.is_some());
        assert!(sessions.find(&first).is_none() && sessions.find(&others).is_some());
    }

    #[test]
    fn a_session_ends_with_its_key() {
        let (_, session, _) = Sessions::default().open("ada", &hash("s3cret"));
        assert!(session.is_of("ada", &hash("s3cret")));
        assert!(!session.is_of("ada", &hash("another")) && !session.is_of("bob", &hash("s3cret")));
    }
}
