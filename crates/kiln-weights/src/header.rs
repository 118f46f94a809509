//! The header of a safetensors file: 8 bytes of length, then JSON that places every tensor in the bytes behind it.
//!
//! What is valid is decided by the `safetensors` crate; since its errors often don't say which tensor is meant, a
//! header it refuses is walked once more to find out.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use kiln_tensor::{DType, Shape};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::coding::Coding;
use crate::malformed::check_empty;
use crate::{Malformed, dtypes};

/// The limit of the reference implementation; real headers have some hundred kilobytes.
const MAX_HEADER: u64 = 100_000_000;

/// Where one tensor lies in its file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub dtype: DType,
    pub shape: Shape,
    /// Bytes of the file.
    pub range: Range<usize>,
    /// What they mean.
    pub coding: Coding,
}

/// A checked header: every range lies inside the file and has the size that dtype and shape need.
#[derive(Debug)]
pub(crate) struct Header {
    pub metadata: BTreeMap<String, String>,
    pub entries: BTreeMap<String, Entry>,
}

impl Header {
    /// Reads and checks the header of a whole file.
    pub fn read(file: &[u8]) -> Result<Header, Malformed> {
        let (json, data_start) = header_bytes(file)?;
        let raw: RawHeader =
            serde_json::from_slice(json).map_err(|e| Malformed::NotJson { reason: e.to_string() })?;

        let mut entries = BTreeMap::new();
        let mut infos = Vec::with_capacity(raw.tensors.len());
        for (name, t) in raw.tensors {
            let Some((file_dtype, dtype)) = dtypes::from_name(&t.dtype) else {
                return Err(Malformed::DType { tensor: name, dtype: t.dtype });
            };
            let (start, end) = t.data_offsets;
            let (shape, coding) = (Shape::from(t.shape.as_slice()), Coding::Plain);
            let entry = Entry { dtype, shape, range: start..end, coding };
            if entries.insert(name.clone(), entry).is_some() {
                return Err(Malformed::Twice { tensor: name });
            }
            infos.push((name, TensorInfo { dtype: file_dtype, shape: t.shape, data_offsets: (start, end) }));
        }
        infos.sort_by_key(|(_, info)| info.data_offsets);
        let data_len = Metadata::new(None, infos.clone())
            .map_err(|e| explain(&infos).unwrap_or_else(|| Malformed::Other(e.to_string())))?
            .data_len();

        // Compared here and not by `SafeTensors::read_metadata`, which adds these numbers without minding overflow.
        let found = file.len() - data_start;
        if data_len > found {
            let cut = infos.into_iter().find(|(_, info)| info.data_offsets.1 > found);
            let tensor = cut.map(|(name, _)| name).unwrap_or_default();
            return Err(Malformed::Truncated { tensor, expected: data_len, found });
        }
        if data_len < found {
            return Err(Malformed::Trailing { expected: data_len, found });
        }
        for (name, entry) in &mut entries {
            check_empty(name, &entry.shape)?;
            entry.range = entry.range.start + data_start..entry.range.end + data_start;
        }
        Ok(Header { metadata: raw.metadata, entries })
    }
}

/// The JSON of the header, and where the data starts behind it.
fn header_bytes(file: &[u8]) -> Result<(&[u8], usize), Malformed> {
    if file.is_empty() {
        return Err(Malformed::Empty);
    }
    if let Some(kind) = foreign(file) {
        return Err(Malformed::Foreign(kind));
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(Malformed::TooShort { found: file.len() });
    };
    let header = u64::from_le_bytes(*length);
    if header > MAX_HEADER {
        return Err(Malformed::HeaderTooLong { header, limit: MAX_HEADER });
    }
    match rest.get(..header as usize) {
        Some(json) => Ok((json, 8 + json.len())),
        None => Err(Malformed::HeaderLength { header, available: rest.len() }),
    }
}

/// Files that people take for safetensors. None of these beginnings is the length of a possible header.
fn foreign(file: &[u8]) -> Option<&'static str> {
    const KINDS: [(&[u8], &str); 5] = [
        (b"version https://git-lfs", "a Git LFS pointer; fetch the file it stands for with `git lfs pull`"),
        (b"PK\x03\x04", "a zip archive, probably a PyTorch checkpoint; Kiln reads safetensors and GGUF"),
        (b"\x80\x02}", "a Python pickle, probably a PyTorch checkpoint; Kiln reads safetensors and GGUF"),
        (b"<!DOCTYPE", "an HTML page, not the weights; the download went wrong"),
        (b"<html", "an HTML page, not the weights; the download went wrong"),
    ];
    let kind = KINDS.iter().find(|(start, _)| file.len() >= 8 && file.starts_with(start));
    kind.map(|&(_, kind)| kind)
}

/// The first thing wrong with tensors sorted by their offsets, in the terms of this crate.
fn explain(infos: &[(String, TensorInfo)]) -> Option<Malformed> {
    let (mut end, mut before) = (0, "");
    for (name, info) in infos {
        let tensor = name.clone();
        let (start, stop) = info.data_offsets;
        if stop < start {
            return Some(Malformed::Reversed { tensor, start, end: stop });
        }
        if start < end {
            return Some(Malformed::Overlap { tensor, start, other: before.to_owned(), end });
        }
        if start > end {
            return Some(Malformed::Hole { tensor, start, expected: end });
        }
        let (file_dtype, shape) = (info.dtype.to_string(), Shape::from(info.shape.as_slice()));
        let (_, dtype) = dtypes::from_name(&file_dtype)?;
        let Some(expected) = shape.checked_numel().and_then(|n| n.checked_mul(dtype.size() * 8)) else {
            return Some(Malformed::TooLarge { tensor, shape });
        };
        let (expected, found) = (expected / 8, stop - start);
        if expected != found {
            return Some(Malformed::Size { tensor, dtype: dtypes::name_of(dtype), shape, expected, found });
        }
        (end, before) = (stop, name);
    }
    None
}

/// The header as the JSON has it, in its order, so that a name given twice is seen.
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
