//! Keys, certificates and time stamps, as users have them.

mod keys;
mod time_stamps;
mod tsa;

use kiln_base::Utc;
use kiln_credentials::{Ingredient, Role, Statement};
use kiln_image::{AiSource, Format, RgbImage, encode};

fn statement() -> Statement {
    Statement {
        generator: ("Kiln".into(), "1.0.0".into()),
        model: "Pebble".into(),
        producer: None,
        ingredients: vec![Ingredient { role: Role::Reference, credentials: None }],
        source: AiSource::Generated.address(),
        watermarked: false,
        when: Utc::now(),
    }
}

fn file() -> Vec<u8> {
    encode(&RgbImage::black(8, 8), Format::Png, None).unwrap()
}

/// Whether bytes occur in others.
fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
