//! A packed model that is stored as its difference from another one, as `tools/ember/delta.py` writes it.
//!
//! A delta is a safetensors file. Its metadata are those of the whole model that differ from the parent's, and
//! `kiln.delta`: the hashes of the parent's file and of the result. Its one tensor is a zlib stream of the transformer's
//! tensors, which have the parent's shapes and dtypes, in the order of their names:
//!
//! 1. of each tensor that is not int8, its numbers minus the parent's, as integers, byte plane by byte plane;
//! 2. of each int8 matrix `q` with a `scale` for each row, `q - round(q_parent · scale_parent / scale)`.
//!
//! Everything else is the parent's. The result is exact: its hash is checked.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;

use flate2::read::ZlibDecoder;
use kiln_base::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Error, Result, WeightSource};

/// Key of the hashes in the metadata.
const KEY: &str = "kiln.delta";
/// The tensor of a delta.
const TENSOR: &str = "difference";
/// Tensors with this prefix differ from the parent's.
const PREFIX: &str = "transformer.";
const INT8: &str = "I8";
/// Header key of the metadata.
const METADATA: &str = "__metadata__";

#[derive(Deserialize)]
struct Hashes {
    parent: String,
    result: String,
}

#[derive(Clone, Deserialize, Serialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl Entry {
    fn range(&self) -> Range<usize> {
        self.data_offsets[0]..self.data_offsets[1]
    }

    /// Bytes of a number.
    fn width(&self) -> usize {
        let numbers: usize = self.shape.iter().product();
        (self.range().len() / numbers.max(1)).max(1)
    }
}

impl WeightSource {
    /// Whether the file is the difference from another model.
    pub fn is_delta(&self) -> bool {
        self.metadata().contains_key(KEY)
    }

    /// Applies a delta to the packed model that it was made from, a safetensors file; returns the whole model.
    pub fn apply_delta(&self, parent: &[u8]) -> Result<WeightSource> {
        let failed = |reason: String| Error::Delta { file: self.path().to_owned(), reason };
        WeightSource::from_bytes(self.path(), self.rebuild(parent).map_err(failed)?)
    }

    fn rebuild(&self, parent: &[u8]) -> Result<Vec<u8>, String> {
        let hashes = self.metadata().get(KEY).and_then(|text| serde_json::from_str(text).ok());
        let hashes: Hashes = hashes.ok_or_else(|| format!("`{KEY}` in its metadata is not valid"))?;
        let other_parent = || {
            let is_other = hex(Sha256::digest(parent)) != hashes.parent;
            is_other.then(|| "it was made from another version of this model".to_owned())
        };
        let Packed { entries, mut metadata, data } =
            Packed::read(parent).ok_or("the model to apply it to is damaged")?;
        let stream = self.tensor(TENSOR).map_err(|error| error.to_string())?;
        let mut data = data.to_vec();
        apply(&entries, &mut data, stream.bytes()).map_err(|what| other_parent().unwrap_or(what))?;
        let mut hash = Sha256::new();
        changed(&entries).for_each(|(_, entry)| hash.update(&data[entry.range()]));
        if hex(hash.finalize()) != hashes.result {
            return Err(other_parent().unwrap_or("it is damaged: the result has another hash".into()));
        }
        let own = self.metadata().iter().filter(|(name, _)| *name != KEY);
        metadata.extend(own.map(|(name, value)| (name.clone(), value.clone())));
        Packed { entries, metadata, data: &data }.write().ok_or("its metadata can't be written".into())
    }
}

/// The tensors that a delta changes, by name.
fn changed(entries: &BTreeMap<String, Entry>) -> impl Iterator<Item = (&String, &Entry)> {
    entries.iter().filter(|(name, _)| name.starts_with(PREFIX))
}

/// Changes the parent's `data` by the differences in a zlib stream.
fn apply(entries: &BTreeMap<String, Entry>, data: &mut [u8], stream: &[u8]) -> Result<(), String> {
    let expected: usize = changed(entries).map(|(_, entry)| entry.range().len()).sum();
    let mut differences = Vec::with_capacity(expected);
    let read = ZlibDecoder::new(stream).take(expected as u64 + 1).read_to_end(&mut differences);
    read.map_err(|error| format!("it is damaged: {error}"))?;
    if differences.len() != expected {
        return Err(format!("it has {} bytes of differences, expected {expected}", differences.len()));
    }
    let scale_of = |name: &str| entries.get(&format!("{name}_scale")).filter(|scale| scale.dtype == "F32");
    let mut parents = BTreeMap::new();
    for (name, _) in changed(entries) {
        if let Some(scale) = scale_of(name) {
            parents.insert(name, floats(&data[scale.range()]));
        }
    }
    let mut rest = &differences[..];
    for is_int8 in [false, true] {
        for (name, entry) in changed(entries).filter(|(_, entry)| (entry.dtype == INT8) == is_int8) {
            let (own, others) = rest.split_at(entry.range().len());
            rest = others;
            if !is_int8 {
                add_planes(&mut data[entry.range()], own, entry.width());
                continue;
            }
            let scale = scale_of(name).ok_or_else(|| format!("`{name}` has no scales"))?;
            let ratios: Vec<f32> =
                parents[name].iter().zip(floats(&data[scale.range()])).map(|(was, is)| was / is).collect();
            let cols = own.len() / ratios.len().max(1);
            let rows = data[entry.range()].chunks_mut(cols.max(1)).zip(own.chunks(cols.max(1)));
            for ((values, own), ratio) in rows.zip(ratios) {
                add_scaled(values, own, ratio);
            }
        }
    }
    Ok(())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Adds differences, stored as planes of bytes from the lowest, to integers of `width` bytes.
fn add_planes(values: &mut [u8], planes: &[u8], width: usize) {
    let count = values.len() / width;
    for (i, number) in values.chunks_exact_mut(width).enumerate() {
        let mut carry = 0;
        for (plane, byte) in number.iter_mut().enumerate() {
            let sum = u16::from(*byte) + u16::from(planes[plane * count + i]) + carry;
            (*byte, carry) = (sum as u8, sum >> 8);
        }
    }
}

/// Scales a row of int8 values to the other scale, and adds the differences.
fn add_scaled(values: &mut [u8], differences: &[u8], ratio: f32) {
    for (value, difference) in values.iter_mut().zip(differences) {
        let scaled = (f32::from(*value as i8) * ratio).round_ties_even().clamp(-127.0, 127.0);
        *value = (scaled as i8).wrapping_add(*difference as i8) as u8;
    }
}

/// A safetensors file.
struct Packed<'d> {
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
    data: &'d [u8],
}

impl<'d> Packed<'d> {
    /// Returns `None` if the file is not a safetensors file.
    fn read(file: &'d [u8]) -> Option<Packed<'d>> {
        let (length, rest) = file.split_first_chunk::<8>()?;
        let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let mut header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
        let metadata = header.remove(METADATA).and_then(|value| serde_json::from_value(value).ok())?;
        let entries =
            header.into_iter().map(|(name, entry)| Some((name, serde_json::from_value(entry).ok()?)));
        let entries = entries.collect::<Option<BTreeMap<String, Entry>>>()?;
        let is_inside = |entry: &Entry| data.get(entry.range()).is_some();
        entries.values().all(is_inside).then_some(Packed { entries, metadata, data })
    }

    fn write(self) -> Option<Vec<u8>> {
        let mut header: BTreeMap<&str, serde_json::Value> = BTreeMap::new();
        for (name, entry) in &self.entries {
            header.insert(name, serde_json::to_value(entry).ok()?);
        }
        header.insert(METADATA, serde_json::to_value(&self.metadata).ok()?);
        let mut text = serde_json::to_vec(&header).ok()?;
        // Tensors start at multiples of 8.
        text.resize(text.len().next_multiple_of(8), b' ');
        Some([&(text.len() as u64).to_le_bytes()[..], &text, self.data].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A packed file with an int8 matrix of two rows, its scales, a norm, and a tensor that stays.
    fn packed(q: [i8; 4], scales: [f32; 2], norm: [u16; 2], metadata: &[(&str, &str)]) -> Vec<u8> {
        let data: Vec<u8> = (q.iter().map(|q| *q as u8))
            .chain(scales.iter().flat_map(|scale| scale.to_le_bytes()))
            .chain(norm.iter().flat_map(|value| value.to_le_bytes()))
            .chain([7; 4])
            .collect();
        let entry = |dtype: &str, shape: &[usize], data_offsets| {
            let (dtype, shape) = (dtype.to_owned(), shape.to_vec());
            Entry { dtype, shape, data_offsets }
        };
        let entries = BTreeMap::from([
            ("transformer.a.weight".into(), entry("I8", &[2, 2], [0, 4])),
            ("transformer.a.weight_scale".into(), entry("F32", &[2, 1], [4, 12])),
            ("transformer.norm".into(), entry("BF16", &[2], [12, 16])),
            ("vae.x".into(), entry("U8", &[4], [16, 20])),
        ]);
        let metadata = metadata.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Packed { entries, metadata, data: &data }.write().unwrap()
    }

    fn parent() -> Vec<u8> {
        packed([10, -3, 100, 1], [0.5, 2.0], [0x3f80, 0x01ff], &[("card", "old"), ("size", "256")])
    }

    fn child() -> Vec<u8> {
        packed([21, -5, 49, -127], [0.25, 4.0], [0x3f81, 0x0200], &[("card", "new"), ("size", "256")])
    }

    /// A delta as the tool writes it; `damage` changes the stream.
    fn delta(hashes: [&str; 2], damage: impl Fn(&mut Vec<u8>)) -> WeightSource {
        use std::io::Write;
        let (parent, child) = (parent(), child());
        let [old, new] = [&parent, &child].map(|file| Packed::read(file).unwrap().data);
        let ratios = [2.0, 0.5];
        let mut scaled: Vec<u8> = old[..4].to_vec();
        scaled.chunks_mut(2).zip(ratios).for_each(|(row, ratio)| add_scaled(row, &[0; 2], ratio));
        let mut stream = Vec::new();
        for (range, width) in [(4..12, 4), (12..16, 2)] {
            // Differences of little-endian integers, as planes.
            let number =
                |bytes: &[u8]| bytes.iter().rev().fold(0u32, |sum, byte| sum << 8 | u32::from(*byte));
            let pairs = new[range.clone()].chunks(width).zip(old[range].chunks(width));
            let differences: Vec<u32> =
                pairs.map(|(new, old)| number(new).wrapping_sub(number(old))).collect();
            let plane = |plane: usize| differences.iter().map(move |d| (d >> (8 * plane)) as u8);
            stream.extend((0..width).flat_map(plane));
        }
        stream.extend(new[..4].iter().zip(&scaled).map(|(new, old)| new.wrapping_sub(*old)));
        let mut packer = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
        packer.write_all(&stream).unwrap();
        let mut stream = packer.finish().unwrap();
        damage(&mut stream);
        let [parent, result] = hashes;
        let metadata = BTreeMap::from([
            ("card".to_owned(), "new".to_owned()),
            (KEY.to_owned(), serde_json::json!({"parent": parent, "result": result}).to_string()),
        ]);
        let entry = Entry { dtype: "U8".into(), shape: vec![stream.len()], data_offsets: [0, stream.len()] };
        let entries = BTreeMap::from([(TENSOR.to_owned(), entry)]);
        let file = Packed { entries, metadata, data: &stream }.write().unwrap();
        WeightSource::from_bytes("delta", file).unwrap()
    }

    fn hashes() -> [String; 2] {
        let child = child();
        [hex(Sha256::digest(parent())), hex(Sha256::digest(&Packed::read(&child).unwrap().data[..16]))]
    }

    #[test]
    fn the_whole_model_comes_back_to_the_bit() {
        let [parent_hash, result] = hashes();
        let delta = delta([&parent_hash, &result], |_| {});
        assert!(delta.is_delta());
        assert_eq!(delta.rebuild(&parent()).unwrap(), child());
        assert_eq!(delta.apply_delta(&parent()).unwrap().metadata()["size"], "256");
    }

    #[test]
    fn damaged_and_foreign_deltas_are_told_apart() {
        let [parent_hash, result] = hashes();
        let message = |hashes: [&str; 2], damage: fn(&mut Vec<u8>)| {
            delta(hashes, damage).apply_delta(&parent()).unwrap_err().to_string()
        };
        let truncated = message([&parent_hash, &result], |stream| stream.truncate(9));
        assert!(truncated.contains("damaged"), "{truncated}");
        let flipped = message([&parent_hash, &result], |stream| stream[4] ^= 8);
        assert!(flipped.contains("damaged") || flipped.contains("bytes of differences"), "{flipped}");
        assert!(message([&parent_hash, "0"], |_| {}).contains("another hash"));
        assert!(message(["0", "0"], |_| {}).contains("another version"));
        let other = delta([&parent_hash, &result], |_| {});
        assert!(other.apply_delta(b"nothing").is_err());
    }

    #[test]
    fn planes_carry_and_rows_are_scaled() {
        // 0x01ff + 0x0001 and 0x8000 + 0x8001, in two planes.
        let mut values = [0xff, 0x01, 0x00, 0x80];
        add_planes(&mut values, &[1, 1, 0, 0x80], 2);
        assert_eq!(values, [0x00, 0x02, 0x01, 0x00]);
        let mut row = [10u8, -3i8 as u8, 100, 1];
        add_scaled(&mut row, &[0, 1, -2i8 as u8, 255], 1.5);
        assert_eq!(row.map(|value| value as i8), [15, -3, 125, 1]);
        add_scaled(&mut row, &[0; 4], f32::NAN);
        assert_eq!(row, [0; 4]);
    }
}
