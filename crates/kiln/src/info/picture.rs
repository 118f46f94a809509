use std::path::Path;

use super::Description;
use crate::failure::Failure;
use crate::sheet::Sheet;

/// A picture and how it was made, if it says so.
pub(super) fn describe(path: &Path) -> Result<Description, Failure> {
    let bytes = kiln_engine::read_image_bytes(path)?;
    let name = path.display().to_string();
    let picture = kiln_image::from_bytes(&name, &bytes)?;
    let sheet = Sheet::default()
        .with("kind", "picture")
        .with("path", &name)
        .with("format", format(&bytes))
        .with("width", picture.width())
        .with("height", picture.height());
    let sheet = match kiln_image::read_recipe(&bytes).map_err(|e| e.named(&name))? {
        // As it is, so that recipes of other versions can be read, too.
        Some(text) => match serde_json::from_str(&text) {
            Ok(recipe) => sheet.with_sheet("recipe", recipe),
            Err(_) => sheet.with("recipe", text),
        },
        None => sheet.with("recipe", "none: not made by Kiln, or saved again by another program"),
    };
    Ok(Description { sheet, problem: None })
}

fn format(bytes: &[u8]) -> &'static str {
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => "PNG",
        [0xff, 0xd8, ..] => "JPEG",
        [b'R', b'I', b'F', b'F', ..] => "WebP",
        [b'G', b'I', b'F', ..] => "GIF",
        [b'B', b'M', ..] => "BMP",
        _ => "TIFF",
    }
}
