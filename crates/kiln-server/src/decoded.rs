//! Images that came with requests, decoded, until the jobs that name them are planned.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use kiln_base::lock;
use kiln_image::Picture;

/// Bytes of pixels that are kept; the oldest images make room.
const CAPACITY: usize = 256 << 20;

/// Decoded images by input name, oldest first.
#[derive(Default)]
pub(crate) struct Decoded(Mutex<VecDeque<(String, Arc<Picture>)>>);

impl Decoded {
    fn images(&self) -> MutexGuard<'_, VecDeque<(String, Arc<Picture>)>> {
        lock(&self.0)
    }

    pub(crate) fn keep(&self, name: &str, picture: Arc<Picture>) {
        self.keep_within(CAPACITY, name, picture);
    }

    fn keep_within(&self, capacity: usize, name: &str, picture: Arc<Picture>) {
        let mut images = self.images();
        images.retain(|(known, _)| known != name);
        images.push_back((name.to_owned(), picture));
        let size = |images: &VecDeque<(String, Arc<Picture>)>| -> usize {
            images.iter().map(|(_, picture)| picture.pixels().len()).sum()
        };
        while size(&images) > capacity {
            images.pop_front();
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Picture>> {
        self.images().iter().find(|(known, _)| known == name).map(|(_, picture)| Arc::clone(picture))
    }

    pub(crate) fn forget(&self, name: &str) {
        self.images().retain(|(known, _)| known != name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_images_make_room_and_one_that_is_too_large_is_not_kept() {
        let decoded = Decoded::default();
        let keep = |name: &str, side| {
            decoded.keep_within(3 * 16 * 16 * 2, name, Arc::new(Picture::black(side, side)));
        };
        let kept = || ["a", "b", "c", "d"].map(|name| decoded.get(name).is_some());
        keep("a", 16);
        keep("b", 16);
        keep("b", 16);
        assert_eq!(kept(), [true, true, false, false]);
        keep("c", 16);
        assert_eq!(kept(), [false, true, true, false]);
        keep("d", 32);
        assert_eq!(kept(), [false; 4]);
        keep("a", 16);
        decoded.forget("a");
        assert_eq!(kept(), [false; 4]);
    }
}
