//! Signature algorithms of COSE that C2PA allows.

use std::fmt;
use std::str::FromStr;

use crate::cbor::Value;

/// A signature algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of the standard")]
pub enum Algorithm {
    Es256,
    Es384,
    Es512,
    Ps256,
    Ps384,
    Ps512,
    Ed25519,
}

impl Algorithm {
    const NAMES: [(&'static str, Algorithm); 7] = [
        ("es256", Algorithm::Es256),
        ("es384", Algorithm::Es384),
        ("es512", Algorithm::Es512),
        ("ps256", Algorithm::Ps256),
        ("ps384", Algorithm::Ps384),
        ("ps512", Algorithm::Ps512),
        ("ed25519", Algorithm::Ed25519),
    ];

    /// Its number in COSE.
    pub(crate) fn cose(self) -> Value {
        let number: i64 = match self {
            Algorithm::Es256 => -7,
            Algorithm::Es384 => -35,
            Algorithm::Es512 => -36,
            Algorithm::Ps256 => -37,
            Algorithm::Ps384 => -38,
            Algorithm::Ps512 => -39,
            Algorithm::Ed25519 => -8,
        };
        Value::Negative((-1 - number) as u64)
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Algorithm, String> {
        let found = Algorithm::NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        found.map(|(_, algorithm)| *algorithm).ok_or_else(|| {
            let known: Vec<_> = Algorithm::NAMES.iter().map(|(name, _)| *name).collect();
            format!("unknown algorithm `{text}`: expected {}", known.join(", "))
        })
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Algorithm::NAMES.iter().find(|(_, algorithm)| algorithm == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}
