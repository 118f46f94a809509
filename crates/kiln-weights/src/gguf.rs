//! The header of a GGUF file, versions 2 and 3: counts, settings, then a name, dimensions, a type and an offset for every
//! tensor; the data begins at the next multiple of the alignment.
//!
//! Every count and length is compared with the bytes that are left before anything is made of it, and lists, which may
//! hold a vocabulary of many megabytes, are stepped over.

use std::collections::BTreeMap;
use std::ops::Range;

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, Shape};

use crate::Malformed;
use crate::coding::Coding;
use crate::header::{Entry, Header};
use crate::malformed::check_empty;

/// What such a file begins with.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT: usize = 32;
const MOST_DIMENSIONS: u32 = 4;

/// A tensor type: its number, its name, and what it is here.
type Kind = (u32, &'static str, Option<Stored>);

/// How a type is held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Stored {
    Plain(DType),
    Blocks(Format),
}

use Stored::{Blocks, Plain};

/// The types that files may have; those without a meaning are named in the refusal.
const KINDS: [Kind; 31] = [
    (0, "F32", Some(Plain(DType::F32))),
    (1, "F16", Some(Plain(DType::F16))),
    (2, "Q4_0", Some(Blocks(Format::Q4_0))),
    (3, "Q4_1", Some(Blocks(Format::Q4_1))),
    (6, "Q5_0", Some(Blocks(Format::Q5_0))),
    (7, "Q5_1", Some(Blocks(Format::Q5_1))),
    (8, "Q8_0", Some(Blocks(Format::Q8_0))),
    (9, "Q8_1", None),
    (10, "Q2_K", Some(Blocks(Format::Q2K))),
    (11, "Q3_K", Some(Blocks(Format::Q3K))),
    (12, "Q4_K", Some(Blocks(Format::Q4K))),
    (13, "Q5_K", Some(Blocks(Format::Q5K))),
    (14, "Q6_K", Some(Blocks(Format::Q6K))),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", Some(Plain(DType::I8))),
    (26, "I32", Some(Plain(DType::I32))),
    (27, "I64", Some(Plain(DType::I64))),
    (28, "F64", Some(Plain(DType::F64))),
    (29, "IQ1_M", None),
    (30, "BF16", Some(Plain(DType::BF16))),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", None),
];

/// The number of a format, and the names of those that are read.
pub(crate) fn number_of(stored: Stored) -> Option<u32> {
    KINDS.iter().find(|k| k.2 == Some(stored)).map(|k| k.0)
}

/// All types that are read, for messages.
pub(crate) fn names() -> String {
    KINDS.iter().filter(|k| k.2.is_some()).map(|k| k.1).collect::<Vec<_>>().join(", ")
}

/// Bytes of a value of each kind of setting but text (8) and lists (9).
const SCALARS: [Option<usize>; 13] = [
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
const TEXT: u32 = 8;
const LIST: u32 = 9;

/// Reads and checks the header of a whole file.
pub(crate) fn read(file: &[u8]) -> Result<Header, Malformed> {
    let mut cursor = Cursor { file, at: MAGIC.len() };
    let version = cursor.u32()?;
    if !(2..=3).contains(&version) {
        let what = match version.swap_bytes() {
            2 | 3 => "is big-endian, which Kiln can't read".to_owned(),
            _ => format!("has version {version}; Kiln reads 2 and 3"),
        };
        return Err(Malformed::Gguf { what: format!("it {what}") });
    }
    let (tensors, settings) = (cursor.u64()?, cursor.u64()?);
    let mut metadata = BTreeMap::new();
    for _ in 0..settings {
        let key = cursor.text()?;
        let value = cursor.setting()?;
        metadata.insert(key, value);
    }
    let mut infos = Vec::new();
    for _ in 0..tensors {
        infos.push(cursor.info()?);
    }
    let alignment = match metadata.get(ALIGNMENT_KEY) {
        None => ALIGNMENT,
        Some(text) => {
            text.parse().ok().filter(|n: &usize| n.is_power_of_two() && *n <= 1 << 20).ok_or_else(|| {
                Malformed::Gguf { what: format!("its `{ALIGNMENT_KEY}` is {text}, expected a power of two") }
            })?
        }
    };
    let start = cursor.at.next_multiple_of(alignment);
    Ok(Header { metadata, entries: place(infos, start, file.len())? })
}

struct Info {
    name: String,
    shape: Shape,
    stored: Stored,
    offset: u64,
}

/// Turns offsets into ranges of the file, none of them shared.
fn place(infos: Vec<Info>, start: usize, end: usize) -> Result<BTreeMap<String, Entry>, Malformed> {
    let mut entries = BTreeMap::new();
    let mut ranges: Vec<(Range<usize>, String)> = Vec::with_capacity(infos.len());
    for Info { name, shape, stored, offset } in infos {
        check_empty(&name, &shape)?;
        let too_large = || Malformed::TooLarge { tensor: name.clone(), shape: shape.clone() };
        let size = match stored {
            Plain(dtype) => {
                shape.checked_numel().and_then(|n| n.checked_mul(dtype.size())).ok_or_else(too_large)?
            }
            Blocks(format) => {
                let row = format.row_bytes(shape.last()).ok_or_else(|| Malformed::Gguf {
                    what: format!(
                        "tensor `{name}` of shape {shape} can't be {format}: its rows are no whole blocks"
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
            return Err(Malformed::Truncated { tensor: name, expected, found });
        }
        let (dtype, coding) = match stored {
            Plain(dtype) => (dtype, Coding::Plain),
            Blocks(format) => (DType::U8, Coding::Blocks(format)),
        };
        ranges.push((range.clone(), name.clone()));
        if entries.insert(name.clone(), Entry { dtype, shape, range, coding }).is_some() {
            return Err(Malformed::Twice { tensor: name });
        }
    }
    ranges.sort_by_key(|(range, _)| (range.start, range.end));
    for pair in ranges.windows(2) {
        let [(before, other), (range, tensor)] = pair else { continue };
        if range.start < before.end {
            let (tensor, other) = (tensor.clone(), other.clone());
            return Err(Malformed::Overlap { tensor, start: range.start, other, end: before.end });
        }
    }
    Ok(entries)
}

struct Cursor<'f> {
    file: &'f [u8],
    at: usize,
}

impl<'f> Cursor<'f> {
    fn take(&mut self, count: usize) -> Result<&'f [u8], Malformed> {
        let rest = &self.file[self.at..];
        let taken = rest.get(..count).ok_or_else(|| Malformed::Gguf {
            what: format!(
                "its header wants {count} bytes at byte {}, where {} are left",
                self.at,
                rest.len()
            ),
        })?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn bytes(&mut self) -> Result<&'f [u8], Malformed> {
        let length = self.u64()?;
        self.take(usize::try_from(length).unwrap_or(usize::MAX))
    }

    fn text(&mut self) -> Result<String, Malformed> {
        let at = self.at;
        let text = std::str::from_utf8(self.bytes()?);
        text.map(str::to_owned).map_err(|_| Malformed::Gguf {
            what: format!("the text at byte {at} of its header is not UTF-8"),
        })
    }

    /// A setting's value as text; of a list, how many there are.
    fn setting(&mut self) -> Result<String, Malformed> {
        match self.u32()? {
            0 | 7 => Ok(u8::from_le_bytes(self.array()?).to_string()),
            1 => Ok(i8::from_le_bytes(self.array()?).to_string()),
            2 => Ok(u16::from_le_bytes(self.array()?).to_string()),
            3 => Ok(i16::from_le_bytes(self.array()?).to_string()),
            4 => Ok(u32::from_le_bytes(self.array()?).to_string()),
            5 => Ok(i32::from_le_bytes(self.array()?).to_string()),
            6 => Ok(f32::from_le_bytes(self.array()?).to_string()),
            TEXT => self.text(),
            LIST => self.skip_list(),
            10 => Ok(u64::from_le_bytes(self.array()?).to_string()),
            11 => Ok(i64::from_le_bytes(self.array()?).to_string()),
            12 => Ok(f64::from_le_bytes(self.array()?).to_string()),
            other => {
                Err(Malformed::Gguf { what: format!("it has a setting of kind {other}, which there is not") })
            }
        }
    }

    fn skip_list(&mut self) -> Result<String, Malformed> {
        let (kind, count) = (self.u32()?, self.u64()?);
        match SCALARS.get(kind as usize) {
            Some(Some(size)) => {
                let bytes = usize::try_from(count).ok().and_then(|n| n.checked_mul(*size));
                self.take(bytes.unwrap_or(usize::MAX))?;
            }
            None if kind != TEXT => {
                return Err(Malformed::Gguf {
                    what: format!("it has a list of kind {kind}, which there is not"),
                });
            }
            _ if kind == LIST => {
                return Err(Malformed::Gguf { what: "it has a list of lists, which no model needs".into() });
            }
            // Each text takes 8 bytes at least, so that the file's end stops a count that lies.
            _ => {
                for _ in 0..count {
                    self.bytes()?;
                }
            }
        }
        Ok(format!("[{count} values]"))
    }

    fn info(&mut self) -> Result<Info, Malformed> {
        let name = self.text()?;
        let count = self.u32()?;
        if count > MOST_DIMENSIONS {
            return Err(Malformed::Gguf {
                what: format!("tensor `{name}` has {count} dimensions, at most 4 are known"),
            });
        }
        let mut dims = Vec::new();
        for _ in 0..count {
            let dim = self.u64()?;
            dims.push(usize::try_from(dim).unwrap_or(usize::MAX));
        }
        // The fastest dimension comes first there and last here.
        dims.reverse();
        let kind = self.u32()?;
        let stored = match KINDS.iter().find(|k| k.0 == kind) {
            Some((_, _, Some(stored))) if !dims.is_empty() || matches!(stored, Plain(_)) => *stored,
            Some((_, dtype, _)) => {
                return Err(Malformed::GgufType { tensor: name, dtype: (*dtype).to_owned() });
            }
            None => return Err(Malformed::GgufType { tensor: name, dtype: format!("number {kind}") }),
        };
        Ok(Info { name, shape: dims.into(), stored, offset: self.u64()? })
    }
}
