//! Who signs: a key with its certificates, or a program.

use std::path::Path;

use kiln_base::{Program, Utc, unix_seconds};

use crate::cbor::Value;
use crate::certificate::Certificate;
use crate::command::SignCommand;
use crate::key::{Key, read_chain};
use crate::time_stamp::TimeStamps;
use crate::{Algorithm, Error, Result};

/// Labels of COSE's header.
const ALGORITHM: u64 = 1;
const X5CHAIN: u64 = 33;
const COSE_SIGN1: u64 = 18;

/// A signer whose key and certificate fit each other, and whom validators accept.
pub struct Signer {
    secret: Secret,
    certificate: Certificate,
    /// COSE's header with the algorithm and the certificates, the signer's first.
    protected: Value,
    signature_length: usize,
    time_stamps: Option<TimeStamps>,
}

enum Secret {
    Key(Box<Key>),
    Command(SignCommand),
}

impl Signer {
    /// Opens a key and its certificates, which PEM files hold.
    pub fn open(key: &Path, certificates: &Path) -> Result<Signer> {
        Signer::checked(Secret::Key(Box::new(Key::open(key)?)), read_chain(certificates)?)
    }

    /// Asks a program for its certificates. For every signature it runs again.
    pub fn command(program: Program) -> Result<Signer> {
        let (command, chain) = SignCommand::open(program)?;
        Signer::checked(Secret::Command(command), chain)
    }

    fn checked(secret: Secret, mut chain: Vec<Vec<u8>>) -> Result<Signer> {
        let read =
            |der: &Vec<u8>| Certificate::read(der).ok_or_else(|| Error::Certificate("is damaged".into()));
        let certificate = read(chain.first().unwrap_or(&Vec::new()))?;
        certificate.check(unix_seconds())?;
        // Roots are the validator's to know.
        for i in (1..chain.len()).rev() {
            if read(&chain[i])?.is_self_issued() {
                chain.remove(i);
            }
        }
        let mut chain: Vec<_> = chain.into_iter().map(Value::Bytes).collect();
        let chain = if chain.len() == 1 { chain.remove(0) } else { Value::Array(chain) };
        let protected = Value::Map(vec![
            (Value::Unsigned(ALGORITHM), secret.algorithm().cose()),
            (Value::Unsigned(X5CHAIN), chain),
        ]);
        let message = b"whether the key is that of the certificate";
        let signature = secret.sign(message)?;
        certificate.verify(secret.algorithm(), message, &signature)?;
        Ok(Signer {
            secret,
            certificate,
            protected: Value::Bytes(protected.encode()),
            signature_length: signature.len(),
            time_stamps: None,
        })
    }

    /// Adds time stamps of the authority at this address (RFC 3161) to all signatures. It is asked for one at once, so that a
    /// wrong address is noticed before images are generated.
    pub fn with_time_stamps(self, url: &str) -> Result<Signer> {
        Ok(Signer { time_stamps: Some(TimeStamps::open(url)?), ..self })
    }

    /// Whom the certificate names.
    pub fn name(&self) -> &str {
        &self.certificate.subject
    }

    /// The last moment at which the certificate is valid.
    pub fn valid_until(&self) -> Utc {
        Utc::from_seconds(self.certificate.until)
    }

    /// Refuses a certificate that has expired since it was opened.
    pub fn check(&self) -> Result<()> {
        self.certificate.check(unix_seconds())
    }

    /// The length of what [`seal`](Signer::seal) returns.
    pub(crate) fn seal_length(&self) -> usize {
        let signature = vec![0; self.signature_length];
        match &self.time_stamps {
            None => self.cose(&signature, None, &[]).len(),
            Some(stamps) => self.cose(&signature, Some(&vec![0; stamps.room()]), &[0]).len(),
        }
    }

    /// Signs a claim: a COSE_Sign1 without its payload, of `length` bytes; `None` if a time stamp makes it longer.
    pub(crate) fn seal(&self, claim: &[u8], length: usize) -> Result<Option<Vec<u8>>> {
        let signature = self.secret.sign(&self.structure("Signature1", claim))?;
        if signature.len() != self.signature_length {
            return Err(Error::Signing("signatures of the key have no fixed length".into()));
        }
        let Some(stamps) = &self.time_stamps else { return Ok(Some(self.cose(&signature, None, &[]))) };
        let payload = Value::Bytes(signature.clone()).encode();
        let token = stamps.stamp(&self.structure("CounterSignature", &payload))?;
        Ok(padded(length, |padding| self.cose(&signature, Some(&token), padding)))
    }

    /// What is signed: COSE's Sig_structure.
    fn structure(&self, context: &str, payload: &[u8]) -> Vec<u8> {
        let payload = Value::Bytes(payload.to_vec());
        let external = Value::Bytes(Vec::new());
        Value::Array(vec![Value::text(context), self.protected.clone(), external, payload]).encode()
    }

    /// A COSE_Sign1 with a time stamp and paddings of these lengths, which are not signed.
    fn cose(&self, signature: &[u8], token: Option<&[u8]>, padding: &[usize]) -> Vec<u8> {
        let token = token.map(|token| {
            let token = Value::object([("val", Some(Value::Bytes(token.to_vec())))]);
            (Value::text("sigTst2"), Value::object([("tstTokens", Some(Value::Array(vec![token])))]))
        });
        let padding = ["pad", "pad2"].into_iter().zip(padding);
        let padding = padding.map(|(name, length)| (Value::text(name), Value::Bytes(vec![0; *length])));
        let unprotected = Value::Map(token.into_iter().chain(padding).collect());
        let parts = vec![self.protected.clone(), unprotected, Value::Null, Value::Bytes(signature.to_vec())];
        Value::Tag(COSE_SIGN1, Value::Array(parts).into()).encode()
    }
}

/// Fills up to a length. The length of a padding is written in one to five bytes, so that some lengths need two paddings.
fn padded(length: usize, build: impl Fn(&[usize]) -> Vec<u8>) -> Option<Vec<u8>> {
    let missing = length.checked_sub(build(&[0]).len())?;
    let sizes = |missing: usize| missing.saturating_sub(4)..=missing;
    sizes(missing).map(|size| build(&[size])).find(|built| built.len() == length).or_else(|| {
        let missing = length.checked_sub(build(&[0, 0]).len())?;
        sizes(missing).map(|size| build(&[size, 0])).find(|built| built.len() == length)
    })
}

impl Secret {
    fn algorithm(&self) -> Algorithm {
        match self {
            Secret::Key(key) => key.algorithm(),
            Secret::Command(command) => command.algorithm,
        }
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        match self {
            Secret::Key(key) => key.sign(message),
            Secret::Command(command) => command.sign(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_from_that_of_an_empty_padding_can_be_had() {
        let build = |padding: &[usize]| {
            let fields = ["pad", "pad2"].into_iter().zip(padding);
            let fields = fields.map(|(name, length)| (Value::text(name), Value::Bytes(vec![0; *length])));
            Value::Map(fields.collect()).encode()
        };
        let least = build(&[0]).len();
        for length in least..least + 70_000 {
            assert_eq!(padded(length, build).map(|built| built.len()), Some(length));
        }
        assert_eq!(padded(least - 1, build), None);
    }
}
