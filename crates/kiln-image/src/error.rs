use std::path::PathBuf;

/// What can be wrong with a picture, or with the wish to write one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read at all.
    #[error("can't read picture `{}`: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The bytes are of no format that Kiln reads.
    #[error(
        "`{name}` is not a picture Kiln can read: expected PNG, JPEG, WebP, GIF, BMP or TIFF, found {found}"
    )]
    NotAPicture {
        /// The file, or what the caller calls the bytes.
        name: String,
        /// What the first bytes look like.
        found: String,
    },
    /// The format is known, the contents are not decodable.
    #[error("picture `{name}` is damaged or of an unsupported kind of {format}: {reason}")]
    Damaged {
        /// The file, or what the caller calls the bytes.
        name: String,
        /// The format its first bytes announce.
        format: &'static str,
        /// What the decoder said.
        reason: String,
    },
    /// Decoding would take more memory than a picture may.
    #[error(
        "picture `{name}` is too large: {width}x{height} needs {} MiB decoded; at most {}x{} and {} MiB are read",
        bytes >> 20, crate::MAX_SIDE, crate::MAX_SIDE, crate::MAX_BYTES >> 20
    )]
    TooLarge {
        /// The file, or what the caller calls the bytes.
        name: String,
        /// Width in the file's header.
        width: u32,
        /// Height in the file's header.
        height: u32,
        /// Bytes of the decoded picture.
        bytes: u64,
    },
    /// The file itself is larger than any picture that is read.
    #[error("`{name}` is too large for a picture: more than {} MiB", limit >> 20)]
    FileTooLarge {
        /// The file.
        name: String,
        /// Most bytes that are read.
        limit: u64,
    },
    /// Width, height and the data given for a picture do not fit each other.
    #[error("a picture of {width}x{height} needs {expected} values (and at least one pixel), found {found}")]
    Pixels {
        /// Width asked for.
        width: u32,
        /// Height asked for.
        height: u32,
        /// Values that width and height need.
        expected: u64,
        /// Values there are.
        found: u64,
    },
    /// The picture has a side that is too short for its use.
    #[error("the {role} is too small: {width}x{height}; both sides must be at least {min} px")]
    TooSmall {
        /// What the picture was to be used as.
        role: &'static str,
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// The shortest side allowed.
        min: u32,
    },
    /// The picture would get a side that is too long.
    #[error("the {role} would be {width}x{height}; its sides may be at most {max} px")]
    TooLong {
        /// What the picture was to be used as.
        role: &'static str,
        /// The width it would get.
        width: u32,
        /// The height it would get.
        height: u32,
        /// The longest side allowed.
        max: u32,
    },
    /// The picture is too long and thin for the model.
    #[error(
        "the {role} is too long and thin: {width}x{height}; one side may be at most {max} times the other"
    )]
    AspectRatio {
        /// What the picture was to be used as.
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
        "the {width}x{height} mask is black everywhere: nothing to crop to; paint the part to change white"
    )]
    EmptyMask {
        /// The mask's width.
        width: u32,
        /// The mask's height.
        height: u32,
    },
    /// The file name's extension names no format that is written.
    #[error("can't tell the picture format of `{}`: expected .png, .jpg, .jpeg or .webp, found {found}", path.display())]
    Format {
        /// The file asked for.
        path: PathBuf,
        /// Its extension, in words.
        found: String,
    },
    /// The encoder refused the picture.
    #[error("can't write a {width}x{height} picture as {format}: {reason}")]
    Encode {
        /// The format asked for.
        format: crate::Format,
        /// The picture's width.
        width: u32,
        /// The picture's height.
        height: u32,
        /// What the encoder said.
        reason: String,
    },
    /// The file could not be written; nothing is left of it.
    #[error("can't write `{}`: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
