//! A certificate of one's own: a private authority, and a signer below it.

use std::path::{Path, PathBuf};

use kiln_base::{AtomicFile, Utc, write_atomic};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

use crate::{Error, Result, Signer};

/// How long they are valid.
const YEARS: i64 = 10;
/// C2PA's usage: signing claims.
const CLAIM_SIGNING: &[u64] = &[1, 3, 6, 1, 4, 1, 62558, 2, 1];

/// The files of a new signer.
#[derive(Clone, Debug)]
pub struct NewCredentials {
    /// The private key, readable by its owner alone.
    pub key: PathBuf,
    /// The signer's certificate.
    pub certificate: PathBuf,
    /// The authority's certificate, to hand out to those who check images.
    pub root: PathBuf,
}

impl NewCredentials {
    /// The files that a folder has or will have.
    pub fn in_folder(folder: &Path) -> NewCredentials {
        NewCredentials {
            key: folder.join("key.pem"),
            certificate: folder.join("certificate.pem"),
            root: folder.join("root.pem"),
        }
    }

    /// Opens them to sign with.
    pub fn open(&self) -> Result<Signer> {
        if !self.key.is_file() {
            return Err(Error::NoKey { path: self.key.clone() });
        }
        Signer::open(&self.key, &self.certificate)
    }

    /// Makes a key and certificates in the name of `name`. The authority's key is not kept: it signs this once.
    pub fn create(&self, name: &str) -> Result<()> {
        let failed = |error: rcgen::Error| Error::Signing(format!("can't make a certificate: {error}"));
        let now = Utc::now();
        let params = |title: String| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, title);
            // A day of room for clocks that are slow.
            let yesterday = Utc::from_seconds(now.seconds() - 86_400);
            params.not_before = date_time_ymd(yesterday.year as i32, yesterday.month, yesterday.day);
            params.not_after = date_time_ymd((now.year + YEARS) as i32, now.month, now.day.min(28));
            params.use_authority_key_identifier_extension = true;
            params
        };
        let mut root = params(format!("{name}: root"));
        root.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        root.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let root =
            CertifiedIssuer::self_signed(root, KeyPair::generate().map_err(failed)?).map_err(failed)?;
        let mut signer = params(name.to_owned());
        // What validators show.
        signer.distinguished_name.push(DnType::OrganizationName, name);
        signer.is_ca = IsCa::ExplicitNoCa;
        signer.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        signer.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::EmailProtection,
            ExtendedKeyUsagePurpose::Other(CLAIM_SIGNING.to_vec()),
        ];
        let key = KeyPair::generate().map_err(failed)?;
        let signer = signer.signed_by(&key, &root).map_err(failed)?;

        let writing = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::File { action: "write", path, source }
        };
        let mut private = AtomicFile::create_private(&self.key).map_err(writing(&self.key))?;
        std::io::Write::write_all(private.file(), key.serialize_pem().as_bytes())
            .map_err(writing(&self.key))?;
        private.commit().map_err(writing(&self.key))?;
        for (path, certificate) in [(&self.certificate, signer.pem()), (&self.root, root.pem())] {
            write_atomic(path, certificate.as_bytes()).map_err(writing(path))?;
        }
        Ok(())
    }
}
