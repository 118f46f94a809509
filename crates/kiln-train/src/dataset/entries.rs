//! From listed items to what is trained on: checked images at the sizes of their buckets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use kiln_base::{hex, is_or_are, plural};
use kiln_engine::{Field, Model, hint};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::buckets::{Bucket, bucket};
use super::captions::{CaptionOptions, caption};
use super::inspect::{ImageFile, inspect};
use super::items::{Item, Listing};
use super::name_some;
use crate::cache::Cache;
use crate::{Error, Result};

/// An image is enlarged by at most this factor for a resolution that it does not have.
const MAX_ENLARGEMENT: f64 = 1.1;

/// How a listing is trained on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataOptions {
    /// Sides of the squares that give the number of pixels; an image is used at each that it is large enough for.
    pub resolutions: Vec<u32>,
    /// The word or phrase that stands for what is learned.
    pub trigger: Option<String>,
    /// Share of the examples that are learned without their caption.
    pub caption_dropout: f32,
    /// Share of the examples that are learned without their references.
    pub reference_dropout: f32,
    /// Whether half of the examples are mirrored.
    pub flip: bool,
    /// How often each image counts, times its own repeats.
    pub repeats: usize,
    /// Whether images without a caption are learned without one.
    pub allow_empty_captions: bool,
    /// Whether broken and tiny images are left out.
    pub skip_bad: bool,
}

impl DataOptions {
    /// The defaults for a model; one that was trained on small images gets its own size as the resolution.
    pub fn for_model(model: &Model) -> DataOptions {
        let resolutions = model.trained_sides().map(|_| vec![model.default_size as u32]);
        let defaults = DataOptions::default();
        DataOptions { resolutions: resolutions.unwrap_or(defaults.resolutions), ..defaults }
    }
}

impl Default for DataOptions {
    fn default() -> Self {
        DataOptions {
            resolutions: vec![768],
            trigger: None,
            caption_dropout: 0.05,
            reference_dropout: 0.0,
            flip: false,
            repeats: 1,
            allow_empty_captions: false,
            skip_bad: false,
        }
    }
}

/// An image as it is encoded.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImageUse {
    /// Its file.
    pub path: PathBuf,
    /// SHA-256 of its bytes.
    pub hash: String,
    /// What it is resized to.
    pub size: ImageSize,
}

/// How an image is resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageSize {
    /// An image to learn: it covers the bucket and is cropped.
    Bucket(Bucket),
    /// A reference: prepared as for editing, with at most the pixels of a square of this side.
    Reference(u32),
}

/// One example: an image at one size, with its text and references.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The image to learn.
    pub image: ImageUse,
    /// Its caption; empty if there is none.
    pub caption: String,
    /// What an edit starts from.
    pub references: Vec<ImageUse>,
    /// How often it counts.
    pub repeats: usize,
}

/// Checked and sized examples.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// The examples.
    pub entries: Vec<Entry>,
    /// How they are used.
    pub options: DataOptions,
    /// What the user should know: duplicates, ignored files, images that were left out.
    pub notes: Vec<String>,
}

impl Dataset {
    /// Checks the images and captions of a listing and sizes them. The cache remembers which images are whole, so that
    /// they are decoded once.
    pub fn new(listing: Listing, options: DataOptions, cache: &Cache) -> Result<Dataset> {
        let Listing { mut items, ignored } = listing;
        let mut notes = Vec::new();
        if !ignored.is_empty() {
            let names = name_some(ignored.iter().map(PathBuf::as_path));
            let (count, are) = (plural(ignored.len(), "other file"), is_or_are(ignored.len()));
            notes.push(format!("{count} {are} not used: {names}"));
        }
        let smallest = options.resolutions.iter().copied().min().unwrap_or(1);
        let (images, problems) = inspect(&items, smallest / 2, &|hash| cache.known_size(hash));
        for ImageFile { hash, size } in images.values() {
            cache.remember_size(hash, *size)?;
        }
        if !problems.is_empty() {
            let shown = problems.iter().take(5).map(|p| format!("`{}`: {}", p.path.display(), p.what));
            let shown = shown.collect::<Vec<_>>().join("\n");
            let what = format!("{} of the images can't be used\n{shown}", problems.len());
            if !options.skip_bad {
                let hint = hint!["repair or remove them"; "leave them out with ", Field::SkipBad.on()];
                return Err(Error::data(what).with_hint(hint));
            }
            items.retain(|item| {
                std::iter::once(&item.image).chain(&item.references).all(|path| images.contains_key(path))
            });
            notes.push(format!("{what}\nthey are left out"));
            if items.is_empty() {
                return Err(Error::data("no image is left").with_hint("see the notes above"));
            }
        }
        check_captions(&items, &options)?;
        notes.extend(duplicates(&items, &images));
        let entries = items.iter().flat_map(|item| expand(item, &images, &options)).collect();
        Ok(Dataset { entries, options, notes })
    }

    /// Returns the number of examples in one pass over the data, repeats included.
    pub fn epoch(&self) -> usize {
        self.entries.iter().map(|entry| entry.repeats).sum()
    }

    /// Returns a hash of everything that is learned and how it is drawn.
    pub fn hash(&self) -> String {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        for entry in &self.entries {
            add(&format!("{:?} {} {}", entry.image.size, entry.image.hash, entry.repeats));
            add(&entry.caption);
            entry.references.iter().for_each(|image| add(&format!("{:?} {}", image.size, image.hash)));
        }
        let DataOptions { caption_dropout, reference_dropout, flip, .. } = &self.options;
        add(&format!("{caption_dropout} {reference_dropout} {flip}"));
        hex(hash.finalize())
    }

    /// Returns the sizes of the images, and the number of examples of each.
    pub fn sizes(&self) -> BTreeMap<Bucket, usize> {
        let mut sizes = BTreeMap::new();
        for entry in &self.entries {
            if let ImageSize::Bucket(size) = entry.image.size {
                *sizes.entry(size).or_default() += entry.repeats;
            }
        }
        sizes
    }

    /// Returns the largest number of references of an example.
    pub fn references(&self) -> usize {
        self.entries.iter().map(|entry| entry.references.len()).max().unwrap_or(0)
    }

    /// Returns all texts that have to be encoded: the captions, and the empty one if captions are dropped.
    pub fn texts(&self) -> BTreeSet<&str> {
        let empty = (self.options.caption_dropout > 0.0).then_some("");
        self.entries.iter().map(|entry| entry.caption.as_str()).chain(empty).collect()
    }
}

/// Rejects images without a caption, unless there is a trigger.
fn check_captions(items: &[Item], options: &DataOptions) -> Result<()> {
    if options.trigger.is_some() || options.allow_empty_captions {
        return Ok(());
    }
    let missing: Vec<&Path> =
        items.iter().filter(|item| item.caption.is_none()).map(|item| item.image.as_path()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let what = format!("{} of {} images have no caption: {}", missing.len(), items.len(), name_some(missing));
    Err(Error::data(what).with_hint(hint![
        "write what each shows into a .txt file of the same name";
        "give one word for all with ", Field::Trigger;
        "train without captions with ", Field::NoCaptions.on()
    ]))
}

/// Notes about images to learn that are the same file.
fn duplicates(items: &[Item], images: &BTreeMap<PathBuf, ImageFile>) -> Vec<String> {
    let mut by_hash: BTreeMap<&str, BTreeSet<&Path>> = BTreeMap::new();
    for item in items {
        if let Some(image) = images.get(&item.image) {
            by_hash.entry(&image.hash).or_default().insert(&item.image);
        }
    }
    let same = by_hash.into_values().filter(|paths| paths.len() > 1);
    same.map(|paths| format!("these are the same image, which counts more for it: {}", name_some(paths)))
        .collect()
}

/// The examples of an item: one for each resolution that its image is large enough for, at least the smallest.
fn expand(item: &Item, images: &BTreeMap<PathBuf, ImageFile>, options: &DataOptions) -> Vec<Entry> {
    let Some(image) = images.get(&item.image) else { return Vec::new() };
    let mut resolutions = options.resolutions.clone();
    resolutions.sort_unstable();
    resolutions.dedup();
    let [width, height] = image.size.map(f64::from);
    let side = (width * height).sqrt();
    let fitting = |resolution: &u32| f64::from(*resolution) <= side * MAX_ENLARGEMENT;
    let count = resolutions.iter().filter(|resolution| fitting(resolution)).count().max(1);
    let text = caption(item.caption.as_deref(), &CaptionOptions { trigger: options.trigger.clone() });
    let entry = |&resolution: &u32| {
        let reference = |path: &PathBuf| {
            let hash = images.get(path)?.hash.clone();
            Some(ImageUse { path: path.clone(), hash, size: ImageSize::Reference(resolution) })
        };
        Entry {
            image: ImageUse {
                path: item.image.clone(),
                hash: image.hash.clone(),
                size: ImageSize::Bucket(bucket(image.size, resolution)),
            },
            caption: text.clone().unwrap_or_default(),
            references: item.references.iter().filter_map(reference).collect(),
            repeats: item.repeats * options.repeats,
        }
    };
    resolutions.iter().take(count).map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_image::{Format, RgbImage, encode};

    fn save(folder: &Path, name: &str, side: u32) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, encode(&RgbImage::black(side, side), Format::Png, None).unwrap()).unwrap();
        path
    }

    fn dataset(items: Vec<Item>, options: DataOptions) -> Result<Dataset> {
        let folder = tempfile::tempdir().unwrap();
        Dataset::new(Listing { items, ignored: Vec::new() }, options, &Cache::new(folder.path()))
    }

    #[test]
    fn an_image_is_used_at_each_resolution_that_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let items = vec![
            Item::new(save(folder.path(), "a.png", 128), Some("a".into())),
            Item { repeats: 3, ..Item::new(save(folder.path(), "b.png", 40), Some("b".into())) },
        ];
        let options = DataOptions { resolutions: vec![128, 64], repeats: 2, ..DataOptions::default() };
        let data = dataset(items, options).unwrap();
        assert_eq!(data.sizes(), BTreeMap::from([([64, 64], 8), ([128, 128], 2)]));
        assert_eq!((data.entries.len(), data.epoch(), data.texts().len()), (3, 10, 3));
    }

    #[test]
    fn missing_captions_bad_images_and_duplicates_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let bad = folder.path().join("c.png");
        std::fs::write(&bad, "x").unwrap();
        let (a, b) = (save(folder.path(), "a.png", 64), save(folder.path(), "b.png", 64));
        let items = vec![Item::new(a, None), Item::new(b, None), Item::new(bad, None)];
        let options = DataOptions { resolutions: vec![64], ..DataOptions::default() };
        let message = dataset(items.clone(), options.clone()).unwrap_err().to_string();
        assert!(message.contains("1 of the images") && message.contains("c.png"), "{message}");
        let options = DataOptions { skip_bad: true, ..options };
        let message = dataset(items.clone(), options.clone()).unwrap_err().to_string();
        assert!(message.contains("2 of 2 images have no caption"), "{message}");
        let options = DataOptions { trigger: Some("sks".into()), ..options };
        let data = dataset(items, options).unwrap();
        assert_eq!(data.entries.iter().map(|entry| entry.caption.as_str()).collect::<Vec<_>>(), ["sks"; 2]);
        assert!(data.notes.iter().any(|note| note.contains("the same image")), "{:?}", data.notes);
        assert!(data.notes.iter().any(|note| note.contains("left out")), "{:?}", data.notes);
    }

    #[test]
    fn the_hash_changes_with_a_caption_but_not_with_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (save(folder.path(), "a.png", 64), save(folder.path(), "b.png", 64));
        let hash = |path: &PathBuf, text: &str| {
            let options = DataOptions { resolutions: vec![64], ..DataOptions::default() };
            dataset(vec![Item::new(path.clone(), Some(text.into()))], options).unwrap().hash()
        };
        assert_eq!(hash(&a, "fox"), hash(&b, "fox"));
        assert_ne!(hash(&a, "fox"), hash(&a, "hen"));
    }
}
