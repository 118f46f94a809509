//! The header of a safetensors file: 8 bytes of length, then JSON with the place of every tensor in the data after it.
//!
//! The `safetensors` crate decides what is valid. Since its errors often don't name the tensor, [`explain`] looks for the
//! problem in a header that it rejects.

use std::collections::BTreeMap;
use std::fmt;

use kiln_tensor::Shape;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::encoding::{Encoding, TensorEntry};
use crate::malformed::check_empty;
use crate::{MalformedFile, dtypes};

/// The limit of the reference implementation; real headers have some hundred kilobytes.
const MAX_HEADER: u64 = 100_000_000;

/// A validated header: every range is inside the file and has the size that dtype and shape need.
#[derive(Debug)]
pub(crate) struct Header {
    pub metadata: BTreeMap<String, String>,
    /// Where the arrays of a GGUF file's metadata begin.
    pub arrays: BTreeMap<String, usize>,
    pub entries: BTreeMap<String, TensorEntry>,
}

impl Header {
    /// Reads and validates the header of a file.
    pub fn read(file: &[u8]) -> Result<Header, MalformedFile> {
        let (json, data_start) = header_bytes(file)?;
        let raw: RawHeader =
            serde_json::from_slice(json).map_err(|e| MalformedFile::NotJson { reason: e.to_string() })?;

        let mut entries = BTreeMap::new();
        let mut infos = Vec::with_capacity(raw.tensors.len());
        for (name, t) in raw.tensors {
            let Some((file_dtype, dtype)) = dtypes::from_name(&t.dtype) else {
                return Err(MalformedFile::DType { tensor: name, dtype: t.dtype });
            };
            let (start, end) = t.data_offsets;
            let shape = Shape::from(t.shape.as_slice());
            let entry = TensorEntry { dtype, shape, range: start..end, encoding: Encoding::Dense };
            if entries.insert(name.clone(), entry).is_some() {
                return Err(MalformedFile::DuplicateTensor { tensor: name });
            }
            infos.push((name, TensorInfo { dtype: file_dtype, shape: t.shape, data_offsets: (start, end) }));
        }
        infos.sort_by_key(|(_, info)| info.data_offsets);
        let data_len = Metadata::new(None, infos.clone())
            .map_err(|e| explain(&infos).unwrap_or_else(|| MalformedFile::Other(e.to_string())))?
            .data_len();

        // Not compared by `SafeTensors::read_metadata`, which adds these numbers without an overflow check.
        let found = file.len() - data_start;
        if data_len > found {
            let truncated = infos.into_iter().find(|(_, info)| info.data_offsets.1 > found);
            let tensor = truncated.map(|(name, _)| name).unwrap_or_default();
            return Err(MalformedFile::Truncated { tensor, expected: data_len, found });
        }
        if data_len < found {
            return Err(MalformedFile::Trailing { expected: data_len, found });
        }
        for (name, entry) in &mut entries {
            check_empty(name, &entry.shape)?;
            entry.range = entry.range.start + data_start..entry.range.end + data_start;
        }
        Ok(Header { metadata: raw.metadata, arrays: BTreeMap::new(), entries })
    }
}

/// The JSON of the header, and where the data after it starts.
fn header_bytes(file: &[u8]) -> Result<(&[u8], usize), MalformedFile> {
    if file.is_empty() {
        return Err(MalformedFile::Empty);
    }
    if let Some(format) = other_format(file) {
        return Err(MalformedFile::OtherFormat(format));
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(MalformedFile::TooShort { found: file.len() });
    };
    let header = u64::from_le_bytes(*length);
    if header > MAX_HEADER {
        return Err(MalformedFile::HeaderTooLong { header, limit: MAX_HEADER });
    }
    match rest.get(..header as usize) {
        Some(json) => Ok((json, 8 + json.len())),
        None => Err(MalformedFile::HeaderLength { header, available: rest.len() }),
    }
}

/// Recognizes files that are mistaken for safetensors. None of these signatures is the length of a possible header.
fn other_format(file: &[u8]) -> Option<&'static str> {
    const PICKLE: &str = "a Python pickle, probably a PyTorch checkpoint; Kiln reads safetensors and GGUF";
    const FORMATS: [(&[u8], &str); 12] = [
        (b"version https://git-lfs", "a Git LFS pointer; fetch the file it stands for with `git lfs pull`"),
        (b"PK\x03\x04", "a zip archive, probably a PyTorch checkpoint; Kiln reads safetensors and GGUF"),
        (b"\x80\x02", PICKLE),
        (b"\x80\x03", PICKLE),
        (b"\x80\x04\x95", PICKLE),
        (b"\x80\x05\x95", PICKLE),
        (b"\x1f\x8b", "a gzip archive; unpack it first"),
        (b"\x89PNG\r\n", "a PNG image"),
        (b"\xff\xd8\xff", "a JPEG image"),
        (b"RIFF", "a WebP image or another RIFF file"),
        (b"\x7fELF", "a program"),
        (b"%PDF-", "a PDF document"),
    ];
    let head = &file[..file.len().min(512)];
    // Too short for safetensors, but a cut one has zeros there, which no text has.
    if head.len() < 8 {
        return is_text(head).then(|| text_format(head));
    }
    let format = FORMATS.iter().find(|(signature, _)| head.starts_with(signature));
    let possible = u64::from_le_bytes(*head.first_chunk()?) <= MAX_HEADER.min(file.len() as u64);
    match format {
        Some(&(_, description)) if !possible || head.starts_with(b"version") => Some(description),
        None if is_text(head) => Some(text_format(head)),
        _ => None,
    }
}

/// Whether these are the first bytes of a text; the last character may be cut.
fn is_text(head: &[u8]) -> bool {
    let text = match str::from_utf8(head) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            str::from_utf8(&head[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text.is_empty() && text.chars().all(|c| !c.is_control() || matches!(c, '\t' | '\r' | '\n'))
}

fn text_format(head: &[u8]) -> &'static str {
    let head = head.trim_ascii_start();
    let starts = |word: &str| head.get(..word.len()).is_some_and(|w| w.eq_ignore_ascii_case(word.as_bytes()));
    if starts("<!doctype") || starts("<html") || starts("<?xml") {
        "an HTML page, not the weights; the download went wrong"
    } else if starts("{") || starts("[") {
        "a JSON text, such as a configuration"
    } else {
        "a text file"
    }
}

/// Finds the first problem of tensors that are sorted by their offsets.
fn explain(infos: &[(String, TensorInfo)]) -> Option<MalformedFile> {
    let (mut end, mut previous) = (0, "");
    for (name, info) in infos {
        let tensor = name.clone();
        let (start, stop) = info.data_offsets;
        if stop < start {
            return Some(MalformedFile::ReversedOffsets { tensor, start, end: stop });
        }
        if start < end {
            return Some(MalformedFile::Overlap { tensor, start, other: previous.to_owned(), end });
        }
        if start > end {
            return Some(MalformedFile::Gap { tensor, start, expected: end });
        }
        let (file_dtype, shape) = (info.dtype.to_string(), Shape::from(info.shape.as_slice()));
        let (_, dtype) = dtypes::from_name(&file_dtype)?;
        let Some(expected) = shape.checked_numel().and_then(|n| n.checked_mul(dtype.size() * 8)) else {
            return Some(MalformedFile::TooLarge { tensor, shape });
        };
        let (expected, found) = (expected / 8, stop - start);
        if expected != found {
            return Some(MalformedFile::SizeMismatch {
                tensor,
                dtype: dtypes::name_of(dtype),
                shape,
                expected,
                found,
            });
        }
        (end, previous) = (stop, name);
    }
    None
}

/// The header's JSON with its order and duplicates.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawTensor)>,
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { metadata: BTreeMap::new(), tensors: Vec::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        header.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                    } else {
                        let tensor = map
                            .next_value()
                            .map_err(|e| A::Error::custom(format_args!("tensor `{name}`: {e}")))?;
                        header.tensors.push((name, tensor));
                    }
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
