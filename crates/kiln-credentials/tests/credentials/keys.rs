//! Keys of every kind, and certificates that validators would not accept.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_credentials::{Error, Signer, sign};
use kiln_image::{Format, read_manifest_store};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, date_time_ymd,
};

use crate::{contains, file, statement};

/// `openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048`: rcgen makes none with ring. Used here alone.
const RSA: &str = include_str!("rsa.pem");

/// The certificate of a signer, as validators accept it.
fn params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Ada");
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::EmailProtection];
    params.use_authority_key_identifier_extension = true;
    params
}

fn root() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Ada: root");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// The files of a key and of its certificate with the root.
fn files(folder: &Path, key: &KeyPair, params: CertificateParams) -> [PathBuf; 2] {
    files_below(&root(), folder, key, params)
}

fn files_below(
    root: &CertifiedIssuer<'static, KeyPair>,
    folder: &Path,
    key: &KeyPair,
    params: CertificateParams,
) -> [PathBuf; 2] {
    let certificate = params.signed_by(key, root).unwrap();
    let paths = ["key.pem", "chain.pem"].map(|name| folder.join(name));
    fs::write(&paths[0], key.serialize_pem()).unwrap();
    fs::write(&paths[1], format!("{}{}", certificate.pem(), root.pem())).unwrap();
    paths
}

#[test]
fn keys_of_every_kind_sign() {
    let folder = tempfile::tempdir().unwrap();
    let made = |algorithm| KeyPair::generate_for(algorithm).unwrap();
    // What COSE's header holds: a map of two, the algorithm's number.
    for (key, algorithm, signature) in [
        (KeyPair::generate().unwrap(), &[0xa2, 1, 0x26][..], 64),
        (made(&PKCS_ECDSA_P384_SHA384), &[0xa2, 1, 0x38, 34], 96),
        (made(&PKCS_ED25519), &[0xa2, 1, 0x27], 64),
        (KeyPair::from_pem(RSA).unwrap(), &[0xa2, 1, 0x38, 36], 256),
    ] {
        let root = root();
        let [key, chain] = files_below(&root, folder.path(), &key, params());
        let signer = Signer::open(&key, &chain).unwrap();
        assert_eq!(signer.name(), "Ada");
        let signed = sign(&file(), Format::Png, &statement(), &signer).unwrap();
        let store = read_manifest_store(&signed).unwrap().unwrap();
        assert!(contains(&store, algorithm), "{algorithm:?}");
        // No payload, then the signature, which ends the store.
        let head =
            [&[0xf6][..], &if signature < 256 { vec![0x58, signature as u8] } else { vec![0x59, 1, 0] }];
        assert!(contains(&store[store.len() - signature - 4..], &head.concat()), "{algorithm:?}");
        // The root is for validators to know.
        assert!(!contains(&store, root.der()), "{algorithm:?}");
    }
}

#[test]
fn keys_that_do_not_fit_are_refused() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [key, _] = files(one.path(), &KeyPair::generate().unwrap(), params());
    for other in [
        KeyPair::generate().unwrap(),
        KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap(),
        KeyPair::generate_for(&PKCS_ED25519).unwrap(),
        KeyPair::from_pem(RSA).unwrap(),
    ] {
        let [_, chain] = files(two.path(), &other, params());
        let error = Signer::open(&key, &chain).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::KeyMismatch) && error.advice().is_some(), "{error}");
    }
}

#[test]
fn certificates_that_validators_would_refuse_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let key = KeyPair::generate().unwrap();
    type Change = fn(&mut CertificateParams);
    let cases: [(&str, Change); 8] = [
        ("expired on 2021-02-03", |params| params.not_after = date_time_ymd(2021, 2, 3)),
        ("not valid before 2999-01-01", |params| {
            (params.not_before, params.not_after) = (date_time_ymd(2999, 1, 1), date_time_ymd(2999, 2, 1));
        }),
        ("that of an authority", |params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained)),
        ("does not allow digital signatures", |params| {
            params.key_usages = vec![KeyUsagePurpose::KeyEncipherment];
        }),
        ("must name what its key is used for", |params| params.extended_key_usages.clear()),
        ("must name what its key is used for", |params| {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::Any);
        }),
        ("lacks the extended key usage emailProtection", |params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        }),
        ("is for time stamps", |params| {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::TimeStamping);
        }),
    ];
    for (problem, change) in cases {
        let mut params = params();
        change(&mut params);
        let [key, chain] = files(folder.path(), &key, params);
        let error = Signer::open(&key, &chain).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
        assert!(error.advice().is_some_and(|advice| advice.contains("kiln credentials new")), "{problem}");
    }
}

#[test]
fn keys_of_other_forms_are_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let [key, chain] = files(folder.path(), &KeyPair::generate().unwrap(), params());
    let text = fs::read_to_string(&key).unwrap();
    for (text, problem) in [
        (text.replace("PRIVATE", "EC PRIVATE"), "is not in PKCS#8"),
        (text.replace("PRIVATE", "ENCRYPTED PRIVATE"), "has no private key in PKCS#8"),
        ("no key".into(), "has no private key in PKCS#8"),
        (text.lines().take(2).collect::<Vec<_>>().join("\n"), "has no private key in PKCS#8"),
        (text.replace(|c: char| c.is_lowercase(), "A"), "has a key of another kind"),
    ] {
        fs::write(&key, text).unwrap();
        let error = Signer::open(&key, &chain).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
        assert!(error.advice().is_some(), "{error}");
    }
}
