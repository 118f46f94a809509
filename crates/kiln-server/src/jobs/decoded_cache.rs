//! A cache of decoded input images, from upload until the jobs that use them are planned.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use kiln_base::lock;
use kiln_image::RgbImage;

/// Capacity in bytes of pixels; the oldest images are dropped.
const CAPACITY: usize = 256 << 20;

/// Decoded images by input name, oldest first.
#[derive(Default)]
pub(crate) struct DecodedCache(Mutex<VecDeque<(String, Arc<RgbImage>)>>);

impl DecodedCache {
    fn images(&self) -> MutexGuard<'_, VecDeque<(String, Arc<RgbImage>)>> {
        lock(&self.0)
    }

    pub(crate) fn insert(&self, name: &str, image: Arc<RgbImage>) {
        self.insert_within(CAPACITY, name, image);
    }

    fn insert_within(&self, capacity: usize, name: &str, image: Arc<RgbImage>) {
        let mut images = self.images();
        images.retain(|(known, _)| known != name);
        images.push_back((name.to_owned(), image));
        let size = |images: &VecDeque<(String, Arc<RgbImage>)>| -> usize {
            images.iter().map(|(_, image)| image.pixels().len()).sum()
        };
        while size(&images) > capacity {
            images.pop_front();
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<RgbImage>> {
        self.images().iter().find(|(known, _)| known == name).map(|(_, image)| Arc::clone(image))
    }

    pub(crate) fn remove(&self, name: &str) {
        self.images().retain(|(known, _)| known != name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_images_are_dropped_and_one_that_is_too_large_is_not_kept() {
        let cache = DecodedCache::default();
        let insert = |name: &str, side| {
            cache.insert_within(3 * 16 * 16 * 2, name, Arc::new(RgbImage::black(side, side)));
        };
        let kept = || ["a", "b", "c", "d"].map(|name| cache.get(name).is_some());
        insert("a", 16);
        insert("b", 16);
        insert("b", 16);
        assert_eq!(kept(), [true, true, false, false]);
        insert("c", 16);
        assert_eq!(kept(), [false, true, true, false]);
        insert("d", 32);
        assert_eq!(kept(), [false; 4]);
        insert("a", 16);
        cache.remove("a");
        assert_eq!(kept(), [false; 4]);
    }
}
