//! Who signs: a key with its certificates, or a program.

use std::path::Path;

use kiln_base::{Program, Utc, unix_seconds};

use crate::cbor::Value;
use crate::certificate::Certificate;
use crate::command::SignCommand;
use crate::key::{Key, read_chain};
use crate::{Algorithm, Error, Result};

/// Labels of COSE's header.
const ALGORITHM: u64 = 1;
const X5CHAIN: u64 = 33;
const COSE_SIGN1: u64 = 18;

/// A signer whose key and certificate fit each other, and whom validators accept.
pub struct Signer {
    secret: Secret,
    /// The signer's certificate first, in DER.
    chain: Vec<Vec<u8>>,
    certificate: Certificate,
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

    /// Asks a program for its certificates.
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
        let signer = Signer { secret, chain, certificate };
        let message = b"whether the key is that of the certificate";
        signer.certificate.verify(signer.algorithm(), message, &signer.sign(message)?)?;
        Ok(signer)
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

    fn algorithm(&self) -> Algorithm {
        match &self.secret {
            Secret::Key(key) => key.algorithm(),
            Secret::Command(command) => command.algorithm,
        }
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        match &self.secret {
            Secret::Key(key) => key.sign(message),
            Secret::Command(command) => command.sign(message),
        }
    }

    /// Signs a claim: a COSE_Sign1 without its payload.
    pub(crate) fn cose(&self, claim: &[u8]) -> Result<Vec<u8>> {
        let chain: Vec<_> = self.chain.iter().cloned().map(Value::Bytes).collect();
        let chain = if let [one] = &chain[..] { one.clone() } else { Value::Array(chain) };
        let protected = Value::Map(vec![
            (Value::Unsigned(ALGORITHM), self.algorithm().cose()),
            (Value::Unsigned(X5CHAIN), chain),
        ]);
        let protected = Value::Bytes(protected.encode());
        let message = Value::Array(vec![
            Value::text("Signature1"),
            protected.clone(),
            Value::Bytes(Vec::new()),
            Value::Bytes(claim.to_vec()),
        ]);
        let signed = self.sign(&message.encode())?;
        let parts = vec![protected, Value::Map(Vec::new()), Value::Null, Value::Bytes(signed)];
        Ok(Value::Tag(COSE_SIGN1, Value::Array(parts).into()).encode())
    }
}
