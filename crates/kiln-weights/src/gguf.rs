//! The header of a GGUF file, versions 2 and 3: counts, metadata, then name, dimensions, type and offset of every tensor; the
//! data begins at the next multiple of the alignment.
//!
//! Every count and length is compared with the remaining bytes before anything is allocated for it. Arrays, which may hold a
//! vocabulary of many megabytes, are skipped, and read when they are asked for.

use std::collections::BTreeMap;
use std::ops::Range;

use kiln_tensor::{DType, Shape};

use crate::MalformedFile;
use crate::encoding::{Encoding, TensorEntry};
use crate::gguf_types::GgufType::{self, Blocks, Dense};
use crate::gguf_types::TYPES;
use crate::header::Header;
use crate::malformed::check_empty;

/// The first bytes of a GGUF file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_DIMENSIONS: u32 = 4;
/// Longest array that is read: many times a vocabulary and its merges. A byte of the file may take eight in memory.
const MAX_ARRAY: u64 = 1 << 22;

/// The type with this id, for tensor `tensor`.
fn find_type(tensor: &str, id: u32) -> Result<(&'static str, GgufType), MalformedFile> {
    let tensor = || tensor.to_owned();
    match TYPES.iter().find(|t| t.0 == id) {
        Some((_, name, Ok(found))) => Ok((name, *found)),
        Some((_, dtype, Err(instead))) => Err(MalformedFile::GgufType { tensor: tensor(), dtype, instead }),
        None => Err(MalformedFile::UnknownGgufType { tensor: tensor(), id }),
    }
}

/// The size of a value of each metadata type, except for strings (8) and arrays (9).
const VALUE_SIZES: [Option<usize>; 13] = [
    Some(1),
    Some(1),
    Some(2),
    Some(2),
    Some(4),
    Some(4),
    Some(4),
    Some(1),
    None,
    None,
    Some(8),
    Some(8),
    Some(8),
];
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Reads and validates the header of a file.
pub(crate) fn read_header(file: &[u8]) -> Result<Header, MalformedFile> {
    let mut reader = HeaderReader { file, position: MAGIC.len() };
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        let problem = match version.swap_bytes() {
            2 | 3 => "it is big-endian, which Kiln can't read".to_owned(),
            _ => format!("it has version {version}; Kiln reads 2 and 3"),
        };
        return Err(MalformedFile::Gguf { problem });
    }
    let (tensor_count, metadata_count) = (reader.u64()?, reader.u64()?);
    let (mut metadata, mut arrays) = (BTreeMap::new(), BTreeMap::new());
    for _ in 0..metadata_count {
        let key = reader.string()?;
        let at = reader.position;
        let value = reader.metadata_value()?;
        if reader.is_array(at) {
            arrays.insert(key.clone(), at);
        }
        metadata.insert(key, value);
    }
    let number = |key: &str| metadata.get(key).and_then(|text: &String| text.parse::<u64>().ok());
    if let Some(count) = number("split.count").filter(|count| *count > 1) {
        return Err(MalformedFile::SplitGguf { number: number("split.no").unwrap_or(0) + 1, count });
    }
    let mut infos = Vec::new();
    for _ in 0..tensor_count {
        infos.push(reader.tensor_info()?);
    }
    let alignment = match metadata.get(ALIGNMENT_KEY) {
        None => DEFAULT_ALIGNMENT,
        Some(text) => {
            text.parse().ok().filter(|n: &usize| n.is_power_of_two() && *n <= 1 << 20).ok_or_else(|| {
                MalformedFile::Gguf {
                    problem: format!("its `{ALIGNMENT_KEY}` is {text}, expected a power of two"),
                }
            })?
        }
    };
    let start = reader.position.next_multiple_of(alignment);
    Ok(Header { metadata, arrays, entries: resolve_entries(infos, start, file.len())? })
}

/// An array of a GGUF file's metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataArray<'f> {
    /// Texts, in the file.
    Strings(Vec<&'f str>),
    /// Integers of any size.
    Integers(Vec<i64>),
}

/// Reads the array whose type stands at byte `at` of a file with a valid header; `None` if it holds neither texts nor
/// integers.
pub(crate) fn read_array(file: &[u8], at: usize) -> Result<Option<MetadataArray<'_>>, MalformedFile> {
    let mut reader = HeaderReader { file, position: at + 4 };
    let (element_type, count) = (reader.u32()?, reader.u64()?);
    if count > MAX_ARRAY {
        return Err(MalformedFile::Gguf {
            problem: format!("its metadata has an array of {count} values; at most {MAX_ARRAY} are read"),
        });
    }
    if element_type == STRING {
        let strings = (0..count).map(|_| reader.str()).collect::<Result<_, _>>()?;
        return Ok(Some(MetadataArray::Strings(strings)));
    }
    let mut integers = Vec::new();
    for _ in 0..count {
        integers.push(match element_type {
            0 => i64::from(u8::from_le_bytes(reader.array()?)),
            1 => i64::from(i8::from_le_bytes(reader.array()?)),
            2 => i64::from(u16::from_le_bytes(reader.array()?)),
            3 => i64::from(i16::from_le_bytes(reader.array()?)),
            4 => i64::from(u32::from_le_bytes(reader.array()?)),
            5 => i64::from(i32::from_le_bytes(reader.array()?)),
            11 => i64::from_le_bytes(reader.array()?),
            _ => return Ok(None),
        });
    }
    Ok(Some(MetadataArray::Integers(integers)))
}

struct TensorInfo {
    name: String,
    shape: Shape,
    gguf_type: GgufType,
    offset: u64,
}

/// Turns offsets into ranges of the file, and checks that they don't overlap.
fn resolve_entries(
    infos: Vec<TensorInfo>,
    start: usize,
    end: usize,
) -> Result<BTreeMap<String, TensorEntry>, MalformedFile> {
    let mut entries = BTreeMap::new();
    let mut ranges: Vec<(Range<usize>, String)> = Vec::with_capacity(infos.len());
    for TensorInfo { name, shape, gguf_type, offset } in infos {
        check_empty(&name, &shape)?;
        let too_large = || MalformedFile::TooLarge { tensor: name.clone(), shape: shape.clone() };
        let size = match gguf_type {
            Dense(dtype) => {
                shape.checked_numel().and_then(|n| n.checked_mul(dtype.size())).ok_or_else(too_large)?
            }
            Blocks(format) => {
                let row = format.row_bytes(shape.last()).ok_or_else(|| MalformedFile::Gguf { problem: format!(
                        "tensor `{name}` of shape {shape} can't be {format}: its rows are not a multiple of the block size"
                    ),
                })?;
                let rows = shape.dims()[..shape.rank() - 1].iter().try_fold(1usize, |n, d| n.checked_mul(*d));
                rows.and_then(|rows| rows.checked_mul(row)).ok_or_else(too_large)?
            }
        };
        let from = usize::try_from(offset).ok().and_then(|o| o.checked_add(start));
        let range = from.and_then(|from| Some(from..from.checked_add(size)?)).ok_or_else(too_large)?;
        if range.end > end {
            let (expected, found) = (range.end - start.min(range.end), end.saturating_sub(start));
            return Err(MalformedFile::Truncated { tensor: name, expected, found });
        }
        let (dtype, encoding) = match gguf_type {
            Dense(dtype) => (dtype, Encoding::Dense),
            Blocks(format) => (DType::U8, Encoding::Blocks(format)),
        };
        ranges.push((range.clone(), name.clone()));
        if entries.insert(name.clone(), TensorEntry { dtype, shape, range, encoding }).is_some() {
            return Err(MalformedFile::DuplicateTensor { tensor: name });
        }
    }
    ranges.sort_by_key(|(range, _)| (range.start, range.end));
    for pair in ranges.windows(2) {
        let [(before, other), (range, tensor)] = pair else { continue };
        if range.start < before.end {
            let (tensor, other) = (tensor.clone(), other.clone());
            return Err(MalformedFile::Overlap { tensor, start: range.start, other, end: before.end });
        }
    }
    Ok(entries)
}

struct HeaderReader<'f> {
    file: &'f [u8],
    position: usize,
}

impl<'f> HeaderReader<'f> {
    fn take(&mut self, count: usize) -> Result<&'f [u8], MalformedFile> {
        let rest = &self.file[self.position..];
        let taken = rest.get(..count).ok_or_else(|| MalformedFile::Gguf {
            problem: format!(
                "its header needs {count} bytes at byte {}, where {} are left",
                self.position,
                rest.len()
            ),
        })?;
        self.position += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedFile> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, MalformedFile> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, MalformedFile> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn bytes(&mut self) -> Result<&'f [u8], MalformedFile> {
        let length = self.u64()?;
        self.take(usize::try_from(length).unwrap_or(usize::MAX))
    }

    fn str(&mut self) -> Result<&'f str, MalformedFile> {
        let at = self.position;
        std::str::from_utf8(self.bytes()?).map_err(|_| MalformedFile::Gguf {
            problem: format!("the text at byte {at} of its header is not UTF-8"),
        })
    }

    fn string(&mut self) -> Result<String, MalformedFile> {
        self.str().map(str::to_owned)
    }

    /// A metadata value as text; for an array, its length.
    fn metadata_value(&mut self) -> Result<String, MalformedFile> {
        match self.u32()? {
            0 | 7 => Ok(u8::from_le_bytes(self.array()?).to_string()),
            1 => Ok(i8::from_le_bytes(self.array()?).to_string()),
            2 => Ok(u16::from_le_bytes(self.array()?).to_string()),
            3 => Ok(i16::from_le_bytes(self.array()?).to_string()),
            4 => Ok(u32::from_le_bytes(self.array()?).to_string()),
            5 => Ok(i32::from_le_bytes(self.array()?).to_string()),
            6 => Ok(f32::from_le_bytes(self.array()?).to_string()),
            STRING => self.string(),
            ARRAY => self.skip_array(),
            10 => Ok(u64::from_le_bytes(self.array()?).to_string()),
            11 => Ok(i64::from_le_bytes(self.array()?).to_string()),
            12 => Ok(f64::from_le_bytes(self.array()?).to_string()),
            other => Err(MalformedFile::Gguf {
                problem: format!("its metadata has a value of unknown type {other}"),
            }),
        }
    }

    /// Whether the value at this byte, which was read already, is an array.
    fn is_array(&self, at: usize) -> bool {
        self.file.get(at..at + 4) == Some(&ARRAY.to_le_bytes())
    }

    fn skip_array(&mut self) -> Result<String, MalformedFile> {
        let (element_type, count) = (self.u32()?, self.u64()?);
        match VALUE_SIZES.get(element_type as usize) {
            Some(Some(size)) => {
                let bytes = usize::try_from(count).ok().and_then(|n| n.checked_mul(*size));
                self.take(bytes.unwrap_or(usize::MAX))?;
            }
            None => {
                return Err(MalformedFile::Gguf {
                    problem: format!("its metadata has an array of unknown type {element_type}"),
                });
            }
            Some(None) if element_type == ARRAY => {
                return Err(MalformedFile::Gguf {
                    problem: "its metadata has an array of arrays, which Kiln can't read".into(),
                });
            }
            // Strings. Each takes at least 8 bytes, so that the end of the file stops a wrong count.
            Some(None) => {
                for _ in 0..count {
                    self.bytes()?;
                }
            }
        }
        Ok(format!("[{count} values]"))
    }

    fn tensor_info(&mut self) -> Result<TensorInfo, MalformedFile> {
        let name = self.string()?;
        let count = self.u32()?;
        if count > MAX_DIMENSIONS {
            return Err(MalformedFile::Gguf {
                problem: format!(
                    "tensor `{name}` has {count} dimensions, more than the {MAX_DIMENSIONS} that the format allows"
                ),
            });
        }
        let mut dims = Vec::new();
        for _ in 0..count {
            let dim = self.u64()?;
            dims.push(usize::try_from(dim).unwrap_or(usize::MAX));
        }
        // To ggml a vector is a matrix of one row, and some programs write norms as a matrix of one row or column.
        if let [n, 1] | [1, n] = dims[..] {
            dims = vec![n];
        }
        // GGUF has the fastest dimension first.
        dims.reverse();
        let (type_name, gguf_type) = find_type(&name, self.u32()?)?;
        if dims.is_empty() && matches!(gguf_type, Blocks(_)) {
            return Err(MalformedFile::Gguf {
                problem: format!(
                    "tensor `{name}` has no dimensions, but type {type_name}, which stores rows"
                ),
            });
        }
        Ok(TensorInfo { name, shape: dims.into(), gguf_type, offset: self.u64()? })
    }
}
