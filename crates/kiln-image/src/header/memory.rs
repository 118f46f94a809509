//! The memory that decoding an image takes at most.

/// Copies of a file's bytes that decoders make: of all of it, or of its metadata.
const FILE_COPIES: u64 = 3;

/// The headers of an image file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// Most bytes for each pixel while it is decoded: stored, in the decoder's buffers, and as RGB.
    pub(super) pixel_bytes: u64,
    /// Bytes that do not depend on the size of the image.
    pub(super) extra: u64,
    pub(super) file: u64,
}

impl Header {
    /// The most memory that decoding takes, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        // Decoders round the sides up to whole blocks.
        let side = |side: u32| u64::from(side).next_multiple_of(64);
        let pixels = side(self.width).saturating_mul(side(self.height));
        pixels.saturating_mul(self.pixel_bytes).saturating_add(self.beside_pixels())
    }

    /// The memory for what is not a pixel.
    pub(crate) fn beside_pixels(&self) -> u64 {
        self.extra.saturating_add(FILE_COPIES.saturating_mul(self.file))
    }
}

pub(super) fn truncated() -> String {
    "the file is truncated".into()
}

/// Twice the stored pixels, because they may be rotated, and RGB.
pub(super) fn twice_and_rgb(stored: u64) -> u64 {
    stored.saturating_mul(2).saturating_add(3)
}
