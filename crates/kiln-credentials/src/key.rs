//! Private keys in PEM files.

use std::path::Path;

use ring::rand::SystemRandom;
use ring::signature::{self, EcdsaKeyPair, Ed25519KeyPair, RsaKeyPair};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::{Algorithm, Error, Result};

/// A key that signs in this process.
pub(crate) enum Key {
    Ecdsa(Algorithm, EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
    Rsa(RsaKeyPair),
}

impl Key {
    /// Reads a key in PKCS#8: of P-256, P-384, Ed25519 or RSA.
    pub fn open(path: &Path) -> Result<Key> {
        let text = read(path)?;
        let Ok(key) = PrivatePkcs8KeyDer::from_pem_slice(&text) else {
            let is_old = PrivateKeyDer::from_pem_slice(&text).is_ok();
            let problem =
                if is_old { "is not in PKCS#8" } else { "has no private key in PKCS#8 (PEM, not encrypted)" };
            return Err(Error::content(path, problem));
        };
        let (bytes, random) = (key.secret_pkcs8_der(), SystemRandom::new());
        let ecdsa = |algorithm, kind| {
            EcdsaKeyPair::from_pkcs8(kind, bytes, &random).ok().map(|key| Key::Ecdsa(algorithm, key))
        };
        ecdsa(Algorithm::Es256, &signature::ECDSA_P256_SHA256_FIXED_SIGNING)
            .or_else(|| ecdsa(Algorithm::Es384, &signature::ECDSA_P384_SHA384_FIXED_SIGNING))
            .or_else(|| Ed25519KeyPair::from_pkcs8_maybe_unchecked(bytes).ok().map(Key::Ed25519))
            .or_else(|| RsaKeyPair::from_pkcs8(bytes).ok().map(Key::Rsa))
            .ok_or_else(|| {
                Error::content(
                    path,
                    "has a key of another kind: expected P-256, P-384, Ed25519, or RSA of 2048 bits or more",
                )
            })
    }

    pub fn algorithm(&self) -> Algorithm {
        match self {
            Key::Ecdsa(algorithm, _) => *algorithm,
            Key::Ed25519(_) => Algorithm::Ed25519,
            Key::Rsa(_) => Algorithm::Ps256,
        }
    }

    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let (random, failed) = (SystemRandom::new(), |_| Error::Signing("the key failed".into()));
        match self {
            Key::Ecdsa(_, key) => Ok(key.sign(&random, message).map_err(failed)?.as_ref().to_vec()),
            Key::Ed25519(key) => Ok(key.sign(message).as_ref().to_vec()),
            Key::Rsa(key) => {
                let mut signed = vec![0; key.public().modulus_len()];
                key.sign(&signature::RSA_PSS_SHA256, &random, message, &mut signed).map_err(failed)?;
                Ok(signed)
            }
        }
    }
}

/// Reads the certificates of a PEM file, the signer's first.
pub(crate) fn read_chain(path: &Path) -> Result<Vec<Vec<u8>>> {
    chain(&read(path)?).ok_or_else(|| Error::content(path, "has no certificate (PEM)"))
}

/// The certificates of a PEM text.
pub(crate) fn chain(text: &[u8]) -> Option<Vec<Vec<u8>>> {
    let all: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let all: Vec<_> = all.ok()?.into_iter().map(|certificate| certificate.to_vec()).collect();
    (!all.is_empty()).then_some(all)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    kiln_base::read_regular(path).map_err(|source| Error::File { action: "read", path: path.into(), source })
}
