//! Signs images of its own in every format and with every kind of key, for other programs to check:   sign FOLDER
//! `tools/credentials/check.py` runs it.

#[path = "../tests/credentials/tsa.rs"]
mod tsa;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kiln_base::{Utc, unix_seconds};
use kiln_credentials::{Ingredient, NewCredentials, Role, Signer, Statement, sign};
use kiln_image::{AiMark, AiSource, Encoding, Format, Metadata, RgbImage, encode_with_metadata};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, date_time_ymd,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const FORMATS: [(Format, &str); 3] = [(Format::Png, "png"), (Format::Jpeg, "jpg"), (Format::Webp, "webp")];
/// An image of 1024×1024 has as many bytes as a usual file.
const SIDES: [u32; 3] = [64, 65, 1024];

fn main() -> Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("usage: sign FOLDER")?);
    let files = NewCredentials::in_folder(&folder);
    files.create("Ada's studio")?;
    let signer = files.open()?;
    let words: &[Role] = &[];
    for side in SIDES {
        for (name, roles) in [
            ("words", words),
            ("reference", &[Role::Reference; 2]),
            ("initial", &[Role::Initial]),
            ("initial-reference", &[Role::Initial, Role::Reference]),
        ] {
            write(&folder, name, side, statement(roles, None), true, &signer)?;
        }
    }
    // Stores of every length, and those that need more than one segment of JPEG.
    for (name, length) in [("odd", 1), ("even", 2), ("long", 70_000)] {
        write(&folder, name, 64, statement(words, Some("A".repeat(length))), true, &signer)?;
    }
    write(&folder, "bare", 64, statement(words, None), false, &signer)?;

    let tsa = tsa::Tsa::new();
    std::fs::write(folder.join("tsa.pem"), &tsa.root)?;
    let url = tsa::serve(move |_, request| ("200 OK", tsa.answer(request)));
    let stamped = files.open()?.with_time_stamps(&url)?;
    write(&folder, "stamped", 64, statement(&[Role::Reference], None), true, &stamped)?;

    let root = root()?;
    std::fs::write(folder.join("other.pem"), root.pem())?;
    let rsa = KeyPair::from_pem(include_str!("../tests/credentials/rsa.pem"))?;
    for (name, key) in [
        ("p384", KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384)?),
        ("ed25519", KeyPair::generate_for(&PKCS_ED25519)?),
        ("rsa", rsa),
    ] {
        let signer = below(&root, &folder, &key, unix_seconds() + 86_400)?;
        write(&folder, name, 64, statement(&[Role::Reference], None), true, &signer)?;
    }
    // As long as this runs; the checks come later.
    let until = unix_seconds() + 3;
    let short = below(&root, &folder, &KeyPair::generate()?, until)?;
    write(&folder, "expired", 64, statement(words, None), true, &short)?;
    let short = short.with_time_stamps(&url)?;
    write(&folder, "expired-stamped", 64, statement(words, None), true, &short)?;
    while unix_seconds() <= until {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(short.check().is_err());
    Ok(())
}

fn statement(roles: &[Role], producer: Option<String>) -> Statement {
    let is_edit = roles.contains(&Role::Initial);
    let source = if is_edit { AiSource::Composite } else { AiSource::Generated };
    Statement {
        generator: ("Kiln".into(), "0.1.0".into()),
        model: "FLUX.2 klein 4B".into(),
        producer,
        ingredients: roles.iter().map(|role| Ingredient { role: *role, credentials: None }).collect(),
        source: source.address(),
        watermarked: false,
        when: Utc::now(),
    }
}

/// Writes a file of every format, and says how long signing took.
fn write(
    folder: &Path,
    name: &str,
    side: u32,
    statement: Statement,
    is_marked: bool,
    signer: &Signer,
) -> Result<()> {
    // Recipes of both parities, and one that XMP and EXIF have to be behind.
    let recipe = if side == 65 { format!("{{\"a\":\"{}\"}}", "b".repeat(70_001)) } else { "{}".to_owned() };
    let pixels = (0..u64::from(side * side * 3)).map(|i| (i * i / 7) as u8).collect();
    let image = RgbImage::new(side, side, pixels)?;
    let source = if statement.ingredients.iter().any(|own| own.role == Role::Initial) {
        AiSource::Composite
    } else {
        AiSource::Generated
    };
    let mark =
        AiMark { source, system: "Kiln, FLUX.2 klein 4B".into(), version: "0.1.0".into(), label: None };
    let metadata = match is_marked {
        true => Metadata { recipe: Some(&recipe), parameters: None, ai_mark: Some(&mark) },
        false => Metadata::default(),
    };
    for (format, extension) in FORMATS {
        let file = encode_with_metadata(&image, Encoding::from(format), &metadata)?;
        let began = Instant::now();
        let signed = sign(&file, format, &statement, signer)?;
        let (took, size) = (began.elapsed(), signed.len() - file.len());
        let began = Instant::now();
        ring::digest::digest(&ring::digest::SHA256, &file);
        let hashing = began.elapsed();
        let length = file.len();
        println!(
            "{name}-{side}.{extension}: {length} bytes, {size} more, {took:.1?}, hashing alone {hashing:.1?}"
        );
        std::fs::write(folder.join(format!("{name}-{side}.{extension}")), signed)?;
    }
    Ok(())
}

fn root() -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Ada: another root");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Ok(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?)
}

/// A signer whose certificate expires at a moment.
fn below(
    root: &CertifiedIssuer<'static, KeyPair>,
    folder: &Path,
    key: &KeyPair,
    until: i64,
) -> Result<Signer> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Ada");
    params.distinguished_name.push(DnType::OrganizationName, "Ada");
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::EmailProtection];
    params.use_authority_key_identifier_extension = true;
    params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(until as u64);
    let paths = ["other-key.pem", "other-certificate.pem"].map(|name| folder.join(name));
    std::fs::write(&paths[0], key.serialize_pem())?;
    std::fs::write(&paths[1], params.signed_by(key, root)?.pem())?;
    Ok(Signer::open(&paths[0], &paths[1])?)
}
