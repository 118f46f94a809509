//! Signs images that are made from signed ones, for other programs to check:   carry FOLDER
//! `tools/credentials/check_verify.py` runs it.

use std::error::Error;
use std::path::PathBuf;

use kiln_base::Utc;
use kiln_credentials::{Carried, Ingredient, NewCredentials, Role, Signer, Statement, carry, sign};
use kiln_image::{AiSource, Format, RgbImage, encode};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("usage: carry FOLDER")?);
    let [own, other] = ["own", "other"].map(|name| NewCredentials::in_folder(&folder.join(name)));
    own.create("Ada's studio")?;
    other.create("Bob")?;
    let own = Signer::open(&own.key, &own.certificate)?;
    let other = Signer::open(&other.key, &other.certificate)?;
    for (format, extension) in [(Format::Png, "png"), (Format::Jpeg, "jpg"), (Format::Webp, "webp")] {
        let write =
            |name: &str, file: &[u8]| std::fs::write(folder.join(format!("{name}.{extension}")), file);
        let first = signed(&own, format, &[])?;
        let second = signed(&other, format, &[])?;
        let mut changed = second.clone();
        // Pixels or metadata, behind or before the credentials.
        let at = if format == Format::Webp { 30 } else { changed.len() - 20 };
        changed[at] ^= 1;
        let mut forged = second.clone();
        let claim = forged.windows(10).position(|bytes| bytes == b"instanceID").ok_or("no claim")?;
        forged[claim + 20] ^= 1;
        let edit = |roles: &[(Role, &[u8])]| {
            let all: Vec<_> = roles.iter().map(|(role, file)| (*role, carry(file.to_vec()))).collect();
            signed(&own, format, &all)
        };
        let edited = edit(&[(Role::Initial, &first)])?;
        write("initial", &edited)?;
        write("references", &edit(&[(Role::Reference, &first), (Role::Reference, &second)])?)?;
        write("twice", &edit(&[(Role::Initial, &first), (Role::Reference, &first)])?)?;
        write("again", &edit(&[(Role::Initial, &edited), (Role::Reference, &second)])?)?;
        write("changed", &edit(&[(Role::Initial, &changed)])?)?;
        write("forged", &edit(&[(Role::Initial, &forged)])?)?;
    }
    Ok(())
}

fn signed(
    signer: &Signer,
    format: Format,
    from: &[(Role, Option<Carried>)],
) -> Result<Vec<u8>, Box<dyn Error>> {
    let is_edit = from.iter().any(|(role, _)| *role == Role::Initial);
    let source = if is_edit { AiSource::Composite } else { AiSource::Generated };
    let ingredients =
        from.iter().map(|(role, own)| Ingredient { role: *role, credentials: own.clone() }).collect();
    let statement = Statement {
        generator: ("Kiln".into(), "0.1.0".into()),
        model: "FLUX.2 klein 4B".into(),
        producer: None,
        ingredients,
        source: source.address(),
        watermarked: false,
        when: Utc::now(),
    };
    let image = RgbImage::new(64, 64, (0..64 * 64 * 3).map(|i| (i * i / 7) as u8).collect())?;
    Ok(sign(&encode(&image, format, Some("{}"))?, format, &statement, signer)?)
}
