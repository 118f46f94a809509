//! Why an image can't be signed.

use std::path::PathBuf;

/// An error of signing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file can't be read or written.
    #[error("can't {action} `{}`: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Nobody has made a key.
    #[error("there is no key to sign with in `{}`", path.display())]
    NoKey {
        /// Where it would be.
        path: PathBuf,
    },
    /// A file of a key or certificate has something else in it.
    #[error("`{}` {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The certificate is not one that validators accept.
    #[error("the certificate {0}")]
    Certificate(String),
    /// The key is not that of the certificate.
    #[error("the private key does not belong to the certificate")]
    KeyMismatch,
    /// A key can't sign.
    #[error("can't sign: {0}")]
    Signing(String),
    /// The program that signs.
    #[error("the signing command `{command}` {problem}")]
    Command {
        /// The program.
        command: String,
        /// What is wrong.
        problem: String,
    },
    /// The authority of time stamps.
    #[error("no time stamp from `{url}`: {problem}")]
    TimeStamp {
        /// Its address.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The image file.
    #[error(transparent)]
    Image(#[from] kiln_image::Error),
}

/// A result of signing.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn content(path: impl Into<PathBuf>, problem: impl Into<String>) -> Error {
        Error::Content { path: path.into(), problem: problem.into() }
    }

    /// What to do about it.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Error::Certificate(_) => Some(
                "`kiln credentials new` makes a certificate; one of an authority needs the extended key usages \
                 emailProtection (and C2PA's claim signing, if it has that), and must not be an authority itself",
            ),
            Error::NoKey { .. } => Some(
                "make one with `kiln credentials new`, or give a key and its certificate, or a program that signs",
            ),
            Error::KeyMismatch => Some("give the key and the certificate that were made together"),
            Error::Content { problem, .. } if problem.contains("PKCS#8") => {
                Some("convert it: openssl pkcs8 -topk8 -nocrypt -in old.pem -out key.pem")
            }
            Error::Content { .. } => {
                Some("give the files of the private key and of its certificate, both as PEM")
            }
            Error::Command { .. } => Some(
                "run it by hand with --signer-info: it prints alg and sign_cert as JSON, and ends with status 0",
            ),
            Error::TimeStamp { .. } => Some(
                "give the address of an authority that answers RFC 3161 requests over HTTP; without one, files are signed \
                 without a time stamp",
            ),
            _ => None,
        }
    }
}
