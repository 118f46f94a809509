//! Reads every image once: its hash and size, and what is wrong with it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};

use kiln_base::{hex, lock, wait};
use sha2::{Digest, Sha256};

use super::items::Item;

/// Largest ratio of the sides of an image.
const MAX_RATIO: u32 = 8;

/// Bytes of memory that decoders hold together: a small file may have many pixels, and there may be many processors.
const DECODING: u64 = 1 << 30;

/// An image's file.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageFile {
    /// SHA-256 of its bytes, in hex.
    pub hash: String,
    /// Width and height in pixels, as shown: a photo's orientation is applied.
    pub size: [u32; 2],
}

/// Why an image can't be used.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// The image.
    pub path: PathBuf,
    /// What is wrong with it.
    pub what: String,
}

/// Reads the images of these items and their references, each file once. `min_side` is the side of the smallest square
/// whose pixels an image to learn must have. `known_size` returns the size of an image that was decoded before, by its
/// hash; others are decoded.
pub fn inspect(
    items: &[Item],
    min_side: u32,
    known_size: &(dyn Fn(&str) -> Option<[u32; 2]> + Sync),
) -> (BTreeMap<PathBuf, ImageFile>, Vec<Problem>) {
    let mut roles: BTreeMap<&Path, bool> = BTreeMap::new();
    for item in items {
        *roles.entry(&item.image).or_default() = true;
        item.references.iter().for_each(|path| _ = roles.entry(path).or_default());
    }
    let roles: Vec<(&Path, bool)> = roles.into_iter().collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new((BTreeMap::new(), Vec::new())));
    let memory = DecodingMemory::new(DECODING);
    let work = || {
        while let Some((path, is_learned)) = roles.get(next.fetch_add(1, Relaxed)) {
            let min = if *is_learned { min_side } else { 0 };
            match read(path, min, known_size, &memory) {
                Ok(image) => _ = lock(&found).0.insert(path.to_path_buf(), image),
                Err(what) => lock(&found).1.push(Problem { path: path.to_path_buf(), what }),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(roles.len());
    std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
    let (images, mut problems) = found.into_inner().unwrap_or_default();
    problems.sort_by(|a, b| a.path.cmp(&b.path));
    (images, problems)
}

fn read(
    path: &Path,
    min_side: u32,
    known_size: &dyn Fn(&str) -> Option<[u32; 2]>,
    memory: &DecodingMemory,
) -> Result<ImageFile, String> {
    let name = path.display().to_string();
    let bytes = read_bytes(path).map_err(|error| format!("it can't be read: {error}"))?;
    let hash = hex(Sha256::digest(&bytes));
    // A header tells neither whether the pixels are whole nor whether a photo is on its side.
    let decoded = || {
        let needed = kiln_image::decoding_bytes(&name, &bytes)?;
        memory
            .with(needed, || kiln_image::from_bytes(&name, &bytes))
            .map(|image| [image.width(), image.height()])
    };
    let size = known_size(&hash).map_or_else(decoded, Ok).map_err(|error| error.to_string())?;
    let [width, height] = size;
    if u64::from(width) * u64::from(height) < u64::from(min_side) * u64::from(min_side) {
        return Err(format!("it has {width}x{height} pixels, fewer than {min_side}x{min_side}"));
    }
    if width.max(height) > MAX_RATIO * width.min(height) {
        return Err(format!("it has {width}x{height} pixels, a ratio of more than {MAX_RATIO}:1"));
    }
    Ok(ImageFile { hash, size })
}

/// The memory that decoders may hold together.
struct DecodingMemory {
    all: u64,
    free: Mutex<u64>,
    freed: Condvar,
}

impl DecodingMemory {
    fn new(all: u64) -> DecodingMemory {
        DecodingMemory { all, free: Mutex::new(all), freed: Condvar::new() }
    }

    /// Waits until `bytes` are free, and holds them while `decode` runs. One that needs more than the limit runs alone.
    fn with<T>(&self, bytes: u64, decode: impl FnOnce() -> T) -> T {
        let bytes = bytes.min(self.all);
        let mut free = lock(&self.free);
        while *free < bytes {
            free = wait(&self.freed, free);
        }
        *free -= bytes;
        drop(free);
        let decoded = decode();
        *lock(&self.free) += bytes;
        self.freed.notify_all();
        decoded
    }
}

fn read_bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(kiln_image::MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_image::{Format, RgbImage, encode};

    #[test]
    fn large_images_are_decoded_one_after_the_other() {
        let (memory, decoders, most) = (DecodingMemory::new(10), AtomicUsize::new(0), AtomicUsize::new(0));
        let decode = || {
            most.fetch_max(decoders.fetch_add(1, Relaxed) + 1, Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(2));
            decoders.fetch_sub(1, Relaxed);
        };
        std::thread::scope(|scope| {
            for bytes in [6, 7, 100, 8] {
                let (memory, decode) = (&memory, &decode);
                scope.spawn(move || memory.with(bytes, decode));
            }
        });
        assert_eq!((most.into_inner(), *lock(&memory.free)), (1, 10));
    }

    #[test]
    fn broken_tiny_and_missing_images_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let save = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            Item::new(path, None)
        };
        let png = |width, height| encode(&RgbImage::black(width, height), Format::Png, None).unwrap();
        let whole = png(64, 64);
        let items = [
            save("a.png", &whole),
            save("b.png", &whole[..whole.len() / 2]),
            save("c.png", b"nothing"),
            save("d.png", &png(16, 16)),
            save("e.png", &png(900, 64)),
            Item { references: vec![folder.path().join("none.png")], ..save("f.png", &whole) },
        ];
        let (images, problems) = inspect(&items, 32, &|_| None);
        let names: Vec<_> = images.keys().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.png", "f.png"]);
        let same: Vec<_> = images.values().collect();
        assert_eq!((same[0], same[0].size), (same[1], [64, 64]));
        let reasons: Vec<_> = problems.iter().map(|problem| problem.what.as_str()).collect();
        for (reason, expected) in reasons.iter().zip([
            "damaged",
            "not an image",
            "16x16 pixels, fewer",
            "more than 8:1",
            "can't be read",
        ]) {
            assert!(reason.contains(expected), "{reason}");
        }
        // An image that was decoded before is not decoded again.
        assert_eq!(inspect(&items[1..2], 32, &|_| Some([64; 2])).1, []);
    }
}
