//! The items of a dataset, as its files list them.

use std::path::PathBuf;

/// One image to learn.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The image.
    pub image: PathBuf,
    /// Its caption, or the instruction of an edit; `None` if there is none.
    pub caption: Option<String>,
    /// The images that an edit starts from, in order.
    pub references: Vec<PathBuf>,
    /// How often it counts.
    pub repeats: usize,
}

impl Item {
    /// Creates an item that counts once and has no references.
    pub fn new(image: PathBuf, caption: Option<String>) -> Item {
        Item { image, caption, references: Vec::new(), repeats: 1 }
    }
}

/// What a folder or a list holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// The items, in the order of their names or of the list.
    pub items: Vec<Item>,
    /// Files that are neither images nor captions, and captions without an image.
    pub ignored: Vec<PathBuf>,
}
