//! What to train on: images with captions, or pairs for editing.
//!
//! ```text
//! folder, JSONL or CSV ──list──▶ Item (image, caption, references) ──inspect──▶ Image (hash, size), problems
//!     ──expand──▶ Entry: an image at a bucket's size, with its caption ──order──▶ the batches of each step
//! ```
//! Nothing here depends on the model or the device: the same folder gives the same entries in the same order.

mod buckets;
mod captions;
mod csv;
mod entries;
mod folder;
mod inspect;
mod items;
mod order;
mod table;

pub use buckets::{Bucket, bucket};
pub(crate) use buckets::{fit, flip};
pub use captions::{CaptionOptions, caption};
pub use entries::{DataOptions, Dataset, Entry, ImageSize, ImageUse};
pub use folder::list;
pub use inspect::{ImageFile, Problem, inspect};
pub use items::{Item, Listing};
pub use order::{Draw, Order};

use std::path::Path;

/// Extensions of files that are taken for images. Those that Kiln can't read are reported, not skipped.
const IMAGES: [&str; 12] =
    ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "jxl"];

/// Extensions of caption files.
const CAPTIONS: [&str; 2] = ["txt", "caption"];

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|found| extensions.iter().any(|known| found.eq_ignore_ascii_case(known)))
}

/// Names up to five files in a message.
pub(crate) fn name_some<'p>(paths: impl IntoIterator<Item = &'p Path>) -> String {
    const SHOWN: usize = 5;
    let names: Vec<String> = paths.into_iter().map(|path| format!("`{}`", path.display())).collect();
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}
