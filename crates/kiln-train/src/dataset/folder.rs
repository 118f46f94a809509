//! Folders of images: captions beside them, `before/` and `after/` for edits, `10_name/` for repeats.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::items::{Item, Listing};
use super::{CAPTIONS, IMAGES, has_extension, name_some, table};
use crate::{Error, Result};

/// Files that operating systems leave in folders.
const SYSTEM_FILES: [&str; 3] = ["thumbs.db", "desktop.ini", "ehthumbs.db"];

/// Lists what is to be learned from a folder of images, a JSONL file or a CSV file.
pub fn list(path: &Path) -> Result<Listing> {
    let metadata = fs::metadata(path).map_err(Error::io("read", path))?;
    let listing = match (metadata.is_dir(), path.extension().and_then(|e| e.to_str())) {
        (true, _) => list_folder(path)?,
        (false, Some("jsonl")) => table::read_jsonl(path)?,
        (false, Some("csv")) => table::read_csv(path)?,
        (false, _) => {
            let what = format!("`{}` is not a folder, a .jsonl or a .csv file", path.display());
            return Err(Error::data(what).with_hint("name the folder with the images"));
        }
    };
    if !listing.items.is_empty() {
        return Ok(listing);
    }
    let found = match &listing.ignored[..] {
        [] => "it is empty".to_owned(),
        files => format!("it has {}", name_some(files.iter().map(PathBuf::as_path))),
    };
    Err(Error::data(format!("there are no images in `{}`: {found}", path.display())).with_hint(
        "images are .png, .jpg, .webp, .gif, .bmp and .tif files, captions .txt files of the same name",
    ))
}

fn list_folder(folder: &Path) -> Result<Listing> {
    for (name, read) in
        [("metadata.jsonl", table::read_jsonl as fn(&Path) -> _), ("metadata.csv", table::read_csv)]
    {
        let path = folder.join(name);
        if path.is_file() {
            return read(&path);
        }
    }
    let entries = Entries::read(folder)?;
    let after = entries.folders.iter().find(|path| path.ends_with("after"));
    let befores: Vec<&Path> =
        entries.folders.iter().filter(|path| is_before(path)).map(|p| p.as_path()).collect();
    match (after, &befores[..]) {
        (Some(after), [_, ..]) => return list_pairs(after, &befores),
        (Some(after), []) => {
            let what = format!("`{}` has no folder `before` beside it", after.display());
            return Err(Error::data(what).with_hint("for edits, put the images to start from into before/"));
        }
        (None, [before, ..]) => {
            let what = format!("`{}` has no folder `after` beside it", before.display());
            return Err(Error::data(what).with_hint("for edits, put the edited images into after/"));
        }
        (None, []) => {}
    }
    let mut listing = entries.listing(1)?;
    for subfolder in &entries.folders {
        let repeats = repeats_of(subfolder).unwrap_or(1);
        let inner = Entries::read(subfolder)?.listing(repeats)?;
        listing.items.extend(inner.items);
        listing.ignored.extend(inner.ignored);
    }
    Ok(listing)
}

/// Whether a folder is called `before`, `before1`, `before2`, …
fn is_before(path: &Path) -> bool {
    let rest = path.file_name().and_then(|name| name.to_str()?.strip_prefix("before"));
    rest.is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The number in a folder's name like `10_sks dog`.
fn repeats_of(folder: &Path) -> Option<usize> {
    let (number, _) = folder.file_name()?.to_str()?.split_once('_')?;
    number.parse().ok().filter(|number| (1..=10_000).contains(number))
}

/// The files of a folder, by what they are.
#[derive(Default)]
struct Entries {
    images: Vec<PathBuf>,
    /// Caption files by the path of their image without the extension.
    captions: BTreeMap<PathBuf, PathBuf>,
    folders: Vec<PathBuf>,
    others: Vec<PathBuf>,
}

impl Entries {
    fn read(folder: &Path) -> Result<Entries> {
        let mut entries = Entries::default();
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
            paths.push(entry.map_err(Error::io("read", folder))?.path());
        }
        paths.sort();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
            if name.starts_with('.') || SYSTEM_FILES.contains(&name.as_str()) {
                continue;
            }
            if path.is_dir() {
                entries.folders.push(path);
            } else if has_extension(&path, &IMAGES) {
                entries.images.push(path);
            } else if has_extension(&path, &CAPTIONS) {
                entries.captions.insert(path.with_extension(""), path);
            } else {
                entries.others.push(path);
            }
        }
        Ok(entries)
    }

    /// The images with the captions beside them.
    fn listing(&self, repeats: usize) -> Result<Listing> {
        let mut captions = self.captions.clone();
        let mut items = Vec::with_capacity(self.images.len());
        for image in &self.images {
            let caption = self.captions.get(&image.with_extension("")).map(|path| read_caption(path));
            captions.remove(&image.with_extension(""));
            items.push(Item { repeats, ..Item::new(image.clone(), caption.transpose()?.flatten()) });
        }
        let ignored = self.others.iter().cloned().chain(captions.into_values()).collect();
        Ok(Listing { items, ignored })
    }

    /// The image whose name is `stem` with any extension.
    fn image(&self, stem: &Path) -> Option<&PathBuf> {
        self.images.iter().find(|path| path.file_stem() == Some(stem.as_os_str()))
    }

    fn caption(&self, stem: &Path) -> Result<Option<String>> {
        let same = |path: &&PathBuf| path.file_stem() == Some(stem.as_os_str());
        let found = self.captions.values().find(same);
        Ok(found.map(|path| read_caption(path)).transpose()?.flatten())
    }
}

/// Reads a caption file; `None` if there is only white space in it.
fn read_caption(path: &Path) -> Result<Option<String>> {
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    let text = kiln_base::decode_text(bytes).map_err(|_| {
        Error::data(format!("the caption `{}` is not UTF-8", path.display()))
            .with_hint("save it as UTF-8, as every editor can")
    })?;
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Some(text).filter(|text| !text.is_empty()))
}

/// The images in `after/` with those of the same name in `before/`, `before1/`, …, and the instruction beside any of them.
fn list_pairs(after: &Path, befores: &[&Path]) -> Result<Listing> {
    let mut befores: Vec<(&Path, Entries)> =
        befores.iter().map(|folder| Ok((*folder, Entries::read(folder)?))).collect::<Result<_>>()?;
    let number = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.trim_start_matches("before").parse::<u64>().unwrap_or(0)
    };
    befores.sort_by_key(|(path, _)| number(path));
    let above = Entries::read(after.parent().unwrap_or(Path::new(".")))?;
    let after = Entries::read(after)?;
    let mut items = Vec::with_capacity(after.images.len());
    for image in &after.images {
        let stem = Path::new(image.file_stem().unwrap_or_default());
        let mut references = Vec::with_capacity(befores.len());
        for (folder, entries) in &befores {
            references.push(entries.image(stem).cloned().ok_or_else(|| {
                let what =
                    format!("`{}` has no image of this name in `{}`", image.display(), folder.display());
                Error::data(what)
                    .with_hint("an edit is an image in after/ and one of the same name in before/")
            })?);
        }
        let mut caption = after.caption(stem)?;
        for entries in befores.iter().map(|(_, entries)| entries).chain([&above]) {
            caption = match caption {
                None => entries.caption(stem)?,
                found => found,
            };
        }
        items.push(Item { references, ..Item::new(image.clone(), caption) });
    }
    let alone = befores[0]
        .1
        .images
        .iter()
        .filter(|path| path.file_stem().is_some_and(|stem| after.image(Path::new(stem)).is_none()));
    let ignored = alone.chain(&after.others).chain(befores.iter().flat_map(|(_, entries)| &entries.others));
    Ok(Listing { items, ignored: ignored.cloned().collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    fn message(files: &[(&str, &str)]) -> String {
        list(folder(files).path()).unwrap_err().to_string()
    }

    #[test]
    fn captions_stand_beside_images_and_junk_is_listed() {
        let files = [
            ("b.JPG", ""),
            ("a.png", ""),
            ("a.txt", "\u{feff} a red\n fox "),
            (".DS_Store", ""),
            ("notes.md", ""),
            ("c.txt", "no image"),
            ("3_more/d.webp", ""),
        ];
        let folder = folder(&files);
        let listing = list(folder.path()).unwrap();
        let names: Vec<_> =
            listing.items.iter().map(|i| i.image.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.png", "b.JPG", "d.webp"]);
        assert_eq!(listing.items[0].caption.as_deref(), Some("a red fox"));
        assert_eq!((listing.items[1].caption.as_deref(), listing.items[2].repeats), (None, 3));
        let ignored: Vec<_> =
            listing.ignored.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(ignored, ["notes.md", "c.txt"]);
    }

    #[test]
    fn pairs_take_references_in_order_and_the_instruction_from_either_side() {
        let files = [
            ("after/1.png", ""),
            ("after/1.txt", "make it night"),
            ("after/2.png", ""),
            ("before/1.jpg", ""),
            ("before/2.jpg", ""),
            ("before/2.txt", "make it day"),
            ("before10/1.png", ""),
            ("before10/2.png", ""),
            ("before2/1.png", ""),
            ("before2/2.png", ""),
        ];
        let folder = folder(&files);
        let items = list(folder.path()).unwrap().items;
        let relative = |path: &PathBuf| {
            path.strip_prefix(folder.path()).unwrap().display().to_string().replace('\\', "/")
        };
        let references: Vec<String> = items[0].references.iter().map(relative).collect();
        assert_eq!(references, ["before/1.jpg", "before2/1.png", "before10/1.png"]);
        let captions: Vec<_> = items.iter().map(|item| item.caption.as_deref().unwrap()).collect();
        assert_eq!(captions, ["make it night", "make it day"]);
    }

    #[test]
    fn a_list_in_the_folder_comes_before_its_images() {
        let folder = folder(&[("a.png", ""), ("b.png", ""), ("metadata.csv", "file_name,text\nb.png,bee")]);
        let items = list(folder.path()).unwrap().items;
        assert_eq!(items, [Item::new(folder.path().join("b.png"), Some("bee".into()))]);
    }

    #[test]
    fn folders_without_images_and_pairs_without_a_partner_are_errors() {
        assert!(message(&[]).contains("it is empty"));
        assert!(message(&[("a.zip", ""), ("b.txt", "x")]).contains("a.zip"));
        assert!(message(&[("after/1.png", "")]).contains("no folder `before`"));
        assert!(message(&[("before/1.png", "")]).contains("no folder `after`"));
        let one = message(&[("after/1.png", ""), ("after/2.png", ""), ("before/1.png", "")]);
        assert!(one.contains("2.png") && one.contains("before"), "{one}");
        let file = folder(&[("a.zip", "")]);
        assert!(list(&file.path().join("a.zip")).unwrap_err().to_string().contains("not a folder"));
        assert!(list(&file.path().join("none")).unwrap_err().to_string().starts_with("can't read"));
    }
}
