//! TensorBoard's event files: length-prefixed records with masked CRC-32C checksums, each a protocol buffer `Event`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::SystemTime;

use crate::{Error, Result};

/// Scalars over steps, in a file that TensorBoard finds in its folder.
pub struct EventFile {
    file: File,
}

impl EventFile {
    /// Creates a new file in a folder. TensorBoard merges the files of a training that was resumed.
    pub fn create(folder: &Path) -> Result<EventFile> {
        let now = wall_time();
        let path = folder.join(format!("events.out.tfevents.{:.0}.kiln.{}", now, std::process::id()));
        let file = fs::create_dir_all(folder).and_then(|()| File::create(&path));
        let mut events = EventFile { file: file.map_err(Error::io("create", &path))? };
        // Field 3: the version.
        let event = [double(1, now), bytes(3, b"brain.Event:2")].concat();
        events.write(&event).map_err(Error::io("write", &path))?;
        Ok(events)
    }

    /// Adds scalars of a step.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f32)]) -> io::Result<()> {
        let value =
            |(tag, value): &(&str, f32)| bytes(1, &[bytes(1, tag.as_bytes()), float(2, *value)].concat());
        let summary: Vec<u8> = values.iter().flat_map(value).collect();
        self.write(&[double(1, wall_time()), varint_field(2, step), bytes(5, &summary)].concat())
    }

    fn write(&mut self, event: &[u8]) -> io::Result<()> {
        self.file.write_all(&record(event))
    }
}

/// A record: the length, its checksum, the data, their checksum.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), data, &masked_crc(data)].concat()
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

fn varint_field(field: u8, value: u64) -> Vec<u8> {
    [vec![field << 3], varint(value)].concat()
}

fn double(field: u8, value: f64) -> Vec<u8> {
    [&[field << 3 | 1][..], &value.to_le_bytes()].concat()
}

fn float(field: u8, value: f32) -> Vec<u8> {
    [&[field << 3 | 5][..], &value.to_le_bytes()].concat()
}

fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    [&[field << 3 | 2][..], &varint(value.len() as u64), value].concat()
}

/// The masked checksum: rotated and offset, because CRCs of data that contain CRCs are problematic.
fn masked_crc(data: &[u8]) -> [u8; 4] {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32C, bit by bit: records are short.
fn crc32c(data: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (POLYNOMIAL * (crc & 1)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_that_of_the_standard() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn a_record_holds_step_tag_and_value() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(folder.path()).unwrap();
        events.scalars(300, &[("loss", 0.5)]).unwrap();
        let path = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(bytes[8..12], masked_crc(&bytes[..8]));
        let second = &bytes[16 + length..];
        let length = u64::from_le_bytes(second[..8].try_into().unwrap()) as usize;
        let data = &second[12..12 + length];
        assert_eq!(second[12 + length..], masked_crc(data));
        assert_eq!(data[9..12], [2 << 3, 0xac, 2]);
        assert!(data.ends_with(&[1 << 3 | 2, 4, b'l', b'o', b's', b's', 2 << 3 | 5, 0, 0, 0, 0x3f]));
    }
}
