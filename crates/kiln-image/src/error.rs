//! The crate's error type.

use std::path::PathBuf;

/// Why an image could not be read, prepared or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("can't read image `{}`: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The bytes are in no supported format.
    #[error(
        "`{name}` is not an image Kiln can read: expected PNG, JPEG, WebP, GIF, BMP or TIFF, found {found}"
    )]
    NotAnImage {
        /// The file, or the caller's name for the bytes.
        name: String,
        /// What the first bytes look like.
        found: String,
    },
    /// The format is supported, but the contents can't be decoded.
    #[error("image `{name}` is damaged or an unsupported kind of {format}: {reason}")]
    Damaged {
        /// The file, or the caller's name for the bytes.
        name: String,
        /// The format, recognized by the first bytes.
        format: &'static str,
        /// The decoder's message.
        reason: String,
    },
    /// A text in the file can't be read.
    #[error("image `{name}` holds a text that is damaged or longer than {} MiB", crate::recipe::MAX_TEXT >> 20)]
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
        /// Width in the file's header.
        width: u32,
        /// Height in the file's header.
        height: u32,
        /// Bytes of the decoded image.
        bytes: u64,
    },
    /// The file exceeds the size limit.
    #[error("`{name}` is too large for an image: more than {} MiB", limit >> 20)]
    FileTooLarge {
        /// The file.
        name: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// The amount of data does not match the width and height.
    #[error("an image of {width}x{height} needs {expected} values (and at least one pixel), found {found}")]
    Pixels {
        /// The given width.
        width: u32,
        /// The given height.
        height: u32,
        /// Number of values for this size.
        expected: u64,
        /// Number of values given.
        found: u64,
    },
    /// A side of the image is too short for its use.
    #[error("the {role} is too small: {width}x{height}; both sides must be at least {min} px")]
    TooSmall {
        /// What the image is used as.
        role: &'static str,
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// The shortest side allowed.
        min: u32,
    },
    /// A side of the image would become too long.
    #[error("the {role} would be {width}x{height}; its sides may be at most {max} px")]
    TooLong {
        /// What the image is used as.
        role: &'static str,
        /// The resulting width.
        width: u32,
        /// The resulting height.
        height: u32,
        /// The longest side allowed.
        max: u32,
    },
    /// The sides of the image differ too much for the model.
    #[error(
        "the {role} is too long and thin: {width}x{height}; one side may be at most {max} times the other"
    )]
    AspectRatio {
        /// What the image is used as.
        role: &'static str,
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// The largest ratio of the sides.
        max: u32,
    },
    /// A mask without a white pixel has no region to crop to.
    #[error(
        "the {width}x{height} mask is black everywhere: nothing to crop to; the area to change must be white"
    )]
    EmptyMask {
        /// The mask's width.
        width: u32,
        /// The mask's height.
        height: u32,
    },
    /// The file name's extension names no output format.
    #[error("unknown image format for `{}`: expected .png, .jpg, .jpeg or .webp, found {found}", path.display())]
    Format {
        /// The file to write.
        path: PathBuf,
        /// A description of its extension.
        found: String,
    },
    /// The encoder failed.
    #[error("can't encode a {width}x{height} image as {format}: {reason}")]
    Encode {
        /// The output format.
        format: crate::Format,
        /// The image's width.
        width: u32,
        /// The image's height.
        height: u32,
        /// The encoder's message.
        reason: String,
    },
    /// The file could not be written.
    #[error("can't write `{}`: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
