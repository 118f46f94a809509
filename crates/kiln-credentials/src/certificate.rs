//! Certificates for signing: what validators ask of them, checked before an image is generated.

use kiln_base::Utc;
use ring::signature;

use crate::der::{self, Element};
use crate::{Algorithm, Error, Result};

/// Extended key usages.
const EMAIL_PROTECTION: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 4];
const ANY_USAGE: &[u8] = &[0x55, 0x1d, 0x25, 0];
/// Usages that exclude all others.
const TIME_STAMPING: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 8];
const OCSP_SIGNING: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 9];
/// Extensions.
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 15];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 19];
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 37];
/// A subject's names: common name, organization.
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
const ORGANIZATION: &[u8] = &[0x55, 4, 10];
const VERSION_3: &[u8] = &[2, 1, 2];

/// What is read of a certificate.
#[derive(Debug)]
pub(crate) struct Certificate {
    from: i64,
    /// The end of its validity, in seconds since 1970.
    pub until: i64,
    /// SubjectPublicKeyInfo.
    public_key: Vec<u8>,
    is_version_3: bool,
    is_authority: bool,
    signs: bool,
    usages: Vec<Vec<u8>>,
    /// Whom it names.
    pub subject: String,
    is_self_issued: bool,
}

impl Certificate {
    /// Reads a certificate in DER; `None` if it is damaged.
    pub fn read(bytes: &[u8]) -> Option<Certificate> {
        let (certificate, _) = Element::read(bytes)?;
        let body = certificate.children().next().filter(|body| body.tag == der::SEQUENCE)?;
        let mut fields = body.children().peekable();
        let version = fields.next_if(|field| field.tag == 0xa0);
        let (_serial, _algorithm, issuer) = (fields.next()?, fields.next()?, fields.next()?);
        let validity: Vec<_> = fields.next()?.children().map(time).collect::<Option<_>>()?;
        let (subject, public_key) = (fields.next()?, fields.next()?);
        let extensions = fields.find(|field| field.tag == 0xa3).and_then(|field| field.children().next());
        let mut read = Certificate {
            from: *validity.first()?,
            until: *validity.get(1)?,
            public_key: public_key.whole.to_vec(),
            is_version_3: version.is_some_and(|version| version.content == VERSION_3),
            is_authority: false,
            signs: false,
            usages: Vec::new(),
            subject: name(subject).unwrap_or_default(),
            is_self_issued: issuer.whole == subject.whole,
        };
        for extension in extensions.into_iter().flat_map(Element::children) {
            let parts: Vec<_> = extension.children().collect();
            let value = parts.iter().find(|part| part.tag == der::OCTET_STRING)?;
            let (value, _) = Element::read(value.content)?;
            match parts.first()?.content {
                KEY_USAGE => {
                    // The first bit is digitalSignature, behind a count of unused bits.
                    read.signs = value.tag == der::BIT_STRING && value.content.get(1)? & 0x80 != 0;
                }
                BASIC_CONSTRAINTS => {
                    let first = value.children().next();
                    read.is_authority =
                        first.is_some_and(|first| first.tag == der::BOOLEAN && first.content != [0]);
                }
                EXTENDED_KEY_USAGE => {
                    let usages = value.children().filter(|usage| usage.tag == der::OBJECT_IDENTIFIER);
                    read.usages = usages.map(|usage| usage.content.to_vec()).collect();
                }
                _ => {}
            }
        }
        Some(read)
    }

    /// Whether it is a root.
    pub fn is_self_issued(&self) -> bool {
        self.is_self_issued
    }

    /// Refuses what validators would refuse, `now` and for all images signed with it.
    pub fn check(&self, now: i64) -> Result<()> {
        let has = |usage: &[u8]| self.usages.iter().any(|own| own == usage);
        let day = |seconds| Utc::from_seconds(seconds).date();
        let problem = if now > self.until {
            format!("expired on {}", day(self.until))
        } else if now < self.from {
            format!("is not valid before {}", day(self.from))
        } else if !self.is_version_3 {
            "has no extensions: it must be of version 3".into()
        } else if self.is_authority {
            "is that of an authority, which must not sign images".into()
        } else if !self.signs {
            "does not allow digital signatures (key usage)".into()
        } else if self.usages.is_empty() || has(ANY_USAGE) {
            "must name what its key is used for (extended key usage)".into()
        } else if has(TIME_STAMPING) || has(OCSP_SIGNING) {
            "is for time stamps or OCSP".into()
        } else if !has(EMAIL_PROTECTION) {
            "lacks the extended key usage emailProtection".into()
        } else {
            return Ok(());
        };
        Err(Error::Certificate(problem))
    }

    /// Checks that a signature was made with its key.
    pub fn verify(&self, algorithm: Algorithm, message: &[u8], signed: &[u8]) -> Result<()> {
        let info = Element::read(&self.public_key).map(|(info, _)| info);
        let bits = info.and_then(|info| info.children().nth(1)).filter(|bits| bits.tag == der::BIT_STRING);
        let key = bits.and_then(|bits| bits.content.get(1..)).unwrap_or_default();
        let verification: &dyn signature::VerificationAlgorithm = match algorithm {
            Algorithm::Es256 => &signature::ECDSA_P256_SHA256_FIXED,
            Algorithm::Es384 => &signature::ECDSA_P384_SHA384_FIXED,
            Algorithm::Ps256 => &signature::RSA_PSS_2048_8192_SHA256,
            Algorithm::Ps384 => &signature::RSA_PSS_2048_8192_SHA384,
            Algorithm::Ps512 => &signature::RSA_PSS_2048_8192_SHA512,
            Algorithm::Ed25519 => &signature::ED25519,
            // Not in `ring`: the command that signs answers for it.
            Algorithm::Es512 => return Ok(()),
        };
        let key = signature::UnparsedPublicKey::new(verification, key);
        key.verify(message, signed).map_err(|_| Error::KeyMismatch)
    }
}

/// Seconds since 1970 of `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`.
fn time(element: Element<'_>) -> Option<i64> {
    let text = std::str::from_utf8(element.content).ok()?.strip_suffix('Z')?;
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (year, rest) = match element.tag {
        der::UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i64 = year.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        der::GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.parse().ok()?, rest)
        }
        _ => return None,
    };
    let part = |at: usize| rest.get(at..at + 2)?.parse().ok();
    let moment = Utc {
        year,
        month: part(0).filter(|month| (1..=12).contains(month))?,
        day: part(2)?,
        hour: part(4)?,
        minute: part(6)?,
        second: part(8)?,
    };
    Some(moment.seconds())
}

/// The common name of a subject, else its organization.
fn name(subject: Element<'_>) -> Option<String> {
    let entries = || subject.children().filter(|set| set.tag == der::SET).flat_map(Element::children);
    let named = |kind: &[u8]| {
        entries().find_map(|entry| {
            let mut parts = entry.children();
            (parts.next()?.content == kind).then_some(())?;
            String::from_utf8(parts.next()?.content.to_vec()).ok()
        })
    };
    named(COMMON_NAME).or_else(|| named(ORGANIZATION))
}
