//! The largest images and texts that are read.

/// Longest side of an image that is read, in pixels.
pub const MAX_SIDE: u32 = 16384;
/// Most bytes that an image may have, as a file and decoded.
pub const MAX_BYTES: u64 = 512 << 20;
/// Longest text of a file that is returned. Compressed, it may be a thousandth of that.
pub(crate) const MAX_TEXT: usize = 1 << 20;
