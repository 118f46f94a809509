//! API keys: their names, what each may do, and the file that lists them.

use std::collections::HashMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Mutex;
use std::time::Instant;

use kiln_base::{lock, parse_bytes};

use crate::jobs::priority::Priority;
use crate::jobs::sessions::Hash;

/// Least length of a key that other machines can try.
pub const MIN_KEY_LENGTH: usize = 16;
/// Longest name of a key.
const MAX_NAME: usize = 32;

/// An API key.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Its name, in logs and lists: letters, digits, `-` and `_`.
    pub name: String,
    /// The secret.
    pub secret: String,
    /// Whether it sees, cancels and deletes everything. Other keys see only what they made.
    pub admin: bool,
    /// Its quotas.
    pub quotas: Quotas,
}

/// What one client may use; `None` for the server's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Maximum number of unfinished jobs.
    pub jobs: Option<NonZeroUsize>,
    /// Maximum number of jobs submitted in a minute.
    pub jobs_per_minute: Option<NonZeroU32>,
    /// Maximum bytes of stored input images.
    pub inputs: Option<u64>,
    /// The highest priority of its jobs.
    pub priority: Option<Priority>,
    /// Whether it may train, on a server that allows trainings; admins always may.
    pub train: bool,
}

impl Quotas {
    /// The priority of a client's jobs that ask for none.
    pub(crate) fn usual_priority(&self) -> Priority {
        self.priority.unwrap_or_default().min(Priority::Normal)
    }
}

/// A key without its secret.
#[derive(Debug)]
pub(crate) struct KeyInfo {
    pub(crate) hash: Hash,
    pub(crate) name: String,
    pub(crate) admin: bool,
    pub(crate) quotas: Quotas,
}

impl std::fmt::Debug for ApiKey {
    /// Without the secret: keys must not end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ApiKey { name, admin, quotas, .. } = self;
        f.debug_struct("ApiKey").field("name", name).field("admin", admin).field("quotas", quotas).finish()
    }
}

impl ApiKey {
    /// The only key of a server: it sees everything.
    pub fn single(secret: impl Into<String>) -> ApiKey {
        let (name, secret) = ("default".into(), secret.into());
        ApiKey { name, secret, admin: true, quotas: Quotas::default() }
    }

    /// Parses a file of keys. Each line holds a name, a secret, and any of `admin`, `train`, `priority=LEVEL` (of its
    /// jobs at most: low, normal, which is the default, or high), `jobs=N`, `per-minute=N` and `inputs=BYTES` (with K, M or G); `#` starts a comment. Errors name the line and never show a secret.
    pub fn parse_file(text: &str) -> Result<Vec<ApiKey>, String> {
        let mut keys: Vec<ApiKey> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default();
            let Some(key) = parse_line(line).map_err(|problem| format!("line {number}: {problem}"))? else {
                continue;
            };
            if keys.iter().any(|other| other.name == key.name || other.secret == key.secret) {
                return Err(format!("line {number}: the name or the key is used twice"));
            }
            keys.push(key);
        }
        if keys.is_empty() { Err("it has no keys".into()) } else { Ok(keys) }
    }
}

fn parse_line(line: &str) -> Result<Option<ApiKey>, String> {
    let mut words = line.split_whitespace();
    let Some(name) = words.next() else { return Ok(None) };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.len() > MAX_NAME || !name.chars().all(is_plain) {
        return Err(format!("expected a name of at most {MAX_NAME} letters, digits, - and _"));
    }
    let secret = words.next().ok_or("expected a name and a key")?;
    let mut key =
        ApiKey { name: name.into(), secret: secret.into(), admin: false, quotas: Quotas::default() };
    for word in words {
        let (option, value) = word.split_once('=').unwrap_or((word, ""));
        // Zero could mean none or any number: neither is guessed.
        let invalid = || {
            format!(
                "`{option}` needs a number from 1, as in `{option}=8`; without it the server's own limit applies"
            )
        };
        match option {
            "admin" if value.is_empty() => key.admin = true,
            "train" if value.is_empty() => key.quotas.train = true,
            "priority" => {
                let priority =
                    Priority::parse(value).ok_or("`priority` must be `low`, `normal` or `high`")?;
                key.quotas.priority = Some(priority);
            }
            "jobs" => key.quotas.jobs = Some(value.parse().map_err(|_| invalid())?),
            "per-minute" => key.quotas.jobs_per_minute = Some(value.parse().map_err(|_| invalid())?),
            "inputs" => key.quotas.inputs = Some(parse_bytes(value).map_err(|_| invalid())?),
            // Not shown: a key with a space in it must not end up in a log.
            _ => {
                return Err(
                    "expected `admin`, `train`, `priority=LEVEL`, `jobs=N`, `per-minute=N` or `inputs=BYTES` after the key"
                        .into(),
                );
            }
        }
    }
    if !key.admin {
        key.quotas.priority.get_or_insert_default();
    }
    Ok(Some(key))
}

/// How many jobs each client may submit now: a bucket that fills with time.
#[derive(Default)]
pub(crate) struct JobRates(Mutex<HashMap<String, Bucket>>);

struct Bucket {
    jobs: f64,
    filled: Instant,
}

impl JobRates {
    /// Takes a job from a client's bucket; if it is empty, returns the seconds until there is one.
    pub(crate) fn take(&self, client: &str, per_minute: NonZeroU32) -> Result<(), u64> {
        let per_minute = f64::from(per_minute.get());
        let mut buckets = lock(&self.0);
        let now = Instant::now();
        let bucket = buckets.entry(client.to_owned()).or_insert(Bucket { jobs: per_minute, filled: now });
        let gained = now.duration_since(bucket.filled).as_secs_f64() / 60.0 * per_minute;
        (bucket.jobs, bucket.filled) = ((bucket.jobs + gained).min(per_minute), now);
        if bucket.jobs < 1.0 {
            return Err(((1.0 - bucket.jobs) * 60.0 / per_minute).ceil() as u64);
        }
        bucket.jobs -= 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_lists_keys_with_their_rights() {
        let text = "# ours\nada  0123456789abcdef admin\n\nbob-2 fedcba9876543210 jobs=3 per-minute=10 inputs=2G train # new";
        let keys = ApiKey::parse_file(text).unwrap();
        assert_eq!((keys[0].name.as_str(), keys[0].admin), ("ada", true));
        let quotas = Quotas {
            jobs: NonZeroUsize::new(3),
            jobs_per_minute: NonZeroU32::new(10),
            inputs: Some(2 << 30),
            priority: Some(Priority::Normal),
            train: true,
        };
        assert_eq!((keys[1].name.as_str(), keys[1].admin, keys[1].quotas), ("bob-2", false, quotas));
        assert!(!format!("{keys:?}").contains("fedcba"), "secrets are not printed");
    }

    #[test]
    fn errors_name_the_line_and_no_secret() {
        for (text, words) in [
            ("", "no keys"),
            ("# none", "no keys"),
            ("ada", "line 1: expected a name and a key"),
            ("a/b s3cret", "line 1: expected a name of"),
            ("\nada s3cret root", "line 2: expected `admin`"),
            ("ada s3cret jobs=many", "line 1: `jobs` needs a number"),
            ("ada s3cret jobs=0", "line 1: `jobs` needs a number from 1"),
            ("ada s3cret priority=urgent", "line 1: `priority` must be"),
            ("ada s3cret per-minute=0", "line 1: `per-minute` needs a number from 1"),
            ("ada s3cret inputs=0", "line 1: `inputs` needs a number from 1"),
            ("ada s3cret inputs=", "line 1: `inputs` needs a number"),
            ("ada s3cret\nada other", "line 2: the name or the key is used twice"),
            ("ada s3cret\nbob s3cret", "line 2: the name or the key is used twice"),
        ] {
            let error = ApiKey::parse_file(text).unwrap_err();
            assert!(error.contains(words) && !error.contains("s3cret"), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_client_submits_no_more_jobs_than_its_rate() {
        let (rates, six) = (JobRates::default(), NonZeroU32::new(6).unwrap());
        assert!((0..6).all(|_| rates.take("a", six).is_ok()));
        assert_eq!(rates.take("a", six), Err(10));
        rates.take("b", six).unwrap();
        lock(&rates.0).get_mut("a").unwrap().filled -= std::time::Duration::from_secs(11);
        rates.take("a", six).unwrap();
        assert!(rates.take("a", six).is_err());
    }
}
