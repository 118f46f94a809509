//! Signs images of its own in every format, for other programs to check:   sign FOLDER
//! `tools/credentials/check.py` runs it.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use kiln_base::Utc;
use kiln_credentials::{Ingredient, NewCredentials, Role, Signer, Statement, sign};
use kiln_image::{AiMark, AiSource, Encoding, Format, Metadata, RgbImage, encode_with_metadata};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("usage: sign FOLDER")?);
    let files = NewCredentials::in_folder(&folder);
    files.create("Ada's studio")?;
    let signer = Signer::open(&files.key, &files.certificate)?;
    let cases = [
        ("words", vec![]),
        ("reference", vec![Role::Reference; 2]),
        ("initial", vec![Role::Initial]),
        ("initial-reference", vec![Role::Initial, Role::Reference]),
    ];
    for (side, recipe) in [(64, "{}".to_owned()), (65, format!("{{\"a\":\"{}\"}}", "b".repeat(70_001)))] {
        let pixels = (0..side * side * 3).map(|i| (i * i / 7) as u8).collect();
        let image = RgbImage::new(side, side, pixels)?;
        for (format, extension) in [(Format::Png, "png"), (Format::Jpeg, "jpg"), (Format::Webp, "webp")] {
            for (name, ingredients) in &cases {
                let is_edit = ingredients.contains(&Role::Initial);
                let source = if is_edit { AiSource::Composite } else { AiSource::Generated };
                let mark = AiMark {
                    source,
                    system: "Kiln, FLUX.2 klein 4B".into(),
                    version: "0.1.0".into(),
                    label: None,
                };
                let metadata = Metadata { recipe: Some(&recipe), parameters: None, ai_mark: Some(&mark) };
                let statement = Statement {
                    generator: ("Kiln".into(), "0.1.0".into()),
                    model: "FLUX.2 klein 4B".into(),
                    producer: Some("Ada".into()).filter(|_| side == 64),
                    ingredients: ingredients
                        .iter()
                        .map(|role| Ingredient { role: *role, credentials: None })
                        .collect(),
                    source: source.address(),
                    when: Utc::now(),
                };
                let file = encode_with_metadata(&image, Encoding::from(format), &metadata)?;
                let began = Instant::now();
                let signed = sign(&file, format, &statement, &signer)?;
                let took = began.elapsed();
                println!("{name}-{side}.{extension}: {} bytes more, {took:?}", signed.len() - file.len());
                std::fs::write(folder.join(format!("{name}-{side}.{extension}")), signed)?;
            }
        }
    }
    Ok(())
}
