//! The crate's error type.

use std::path::PathBuf;

/// Why an image could not be read, prepared or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// The file could not be read.
    #[error("can't read image `{}`: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The bytes are in no supported format.
    #[error(
        "`{name}` is not an image Kiln can read: expected PNG, JPEG, WebP, GIF, BMP or TIFF, found {found}"
    )]
    NotAnImage {
        /// The file, or the caller's name for the bytes.
        name: String,
        found: String,
    },
    /// The format is supported, but the contents can't be decoded.
    #[error("image `{name}` is damaged or an unsupported kind of {format}: {reason}")]
    Damaged {
        /// The file, or the caller's name for the bytes.
        name: String,
        format: &'static str,
        reason: String,
    },
    /// A text in the file can't be read.
    #[error("image `{name}` holds a text that is damaged or longer than {} MiB", crate::limits::MAX_TEXT >> 20)]
    Text {
        /// The file, or the caller's name for the bytes.
        name: String,
    },
    /// The decoded image would exceed the limits.
    #[error(
        "image `{name}` is too large: {width}x{height} needs {} MiB decoded; at most {}x{} and {} MiB are read",
        bytes >> 20, crate::MAX_SIDE, crate::MAX_SIDE, crate::MAX_BYTES >> 20
    )]
    TooLarge {
        /// The file, or the caller's name for the bytes.
        name: String,
        width: u32,
        height: u32,
        bytes: u64,
    },
    /// The file exceeds the size limit.
    #[error("`{name}` is too large for an image: more than {} MiB", limit >> 20)]
    FileTooLarge { name: String, limit: u64 },
    /// The amount of data does not match the width and height.
    #[error("an image of {width}x{height} needs {expected} values (and at least one pixel), found {found}")]
    Pixels { width: u32, height: u32, expected: u64, found: u64 },
    /// A side of the image is too short for its use.
    #[error("the {role} is too small: {width}x{height}; both sides must be at least {min} px")]
    TooSmall { role: &'static str, width: u32, height: u32, min: u32 },
    /// A side of the image would become too long.
    #[error("the {role} would be {width}x{height}; its sides may be at most {max} px")]
    TooLong { role: &'static str, width: u32, height: u32, max: u32 },
    /// The sides of the image differ too much for the model.
    #[error(
        "the {role} is too long and thin: {width}x{height}; one side may be at most {max} times the other"
    )]
    AspectRatio { role: &'static str, width: u32, height: u32, max: u32 },
    /// A mask without a white pixel has no region to crop to.
    #[error(
        "the {width}x{height} mask is black everywhere: nothing to crop to; the area to change must be white"
    )]
    EmptyMask { width: u32, height: u32 },
    /// The file name's extension names no output format.
    #[error("unknown image format for `{}`: expected .png, .jpg, .jpeg or .webp, found {found}", path.display())]
    Format { path: PathBuf, found: String },
    /// The encoder failed.
    #[error("can't encode a {width}x{height} image as {format}: {reason}")]
    Encode { format: crate::Format, width: u32, height: u32, reason: String },
    /// The file could not be written.
    #[error("can't write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
