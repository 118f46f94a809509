//! Damaged files give errors or other images, never a panic: thousands of reproducible changes and cuts.

use crate::common::data;
use kiln_image::{
    AiMark, AiSource, Format, Metadata, RgbImage, encode_with_metadata, from_bytes, read_ai_mark,
    read_manifest_store, read_recipe, with_manifest_store,
};

const FILES: [&str; 11] = [
    "rgb.png",
    "palette_transparent.png",
    "xmp_8.png",
    "full_color.jpg",
    "progressive.jpg",
    "cmyk.jpg",
    "rgba_lossless.webp",
    "lossy.webp",
    "palette_transparent.gif",
    "rgb.bmp",
    "lzw.tif",
];

#[test]
fn changed_bytes_never_panic() {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut read = 0;
    for name in FILES {
        let whole = std::fs::read(data(name)).unwrap();
        for _ in 0..800 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random.below(4) {
                // Every other change goes where the headers are.
                let reach = if random.below(2) == 0 { bytes.len() } else { bytes.len().min(100) };
                let at = random.below(reach);
                bytes[at] = match random.below(3) {
                    0 => 0xff,
                    1 => bytes[at] ^ (1 << random.below(8)),
                    _ => random.below(256) as u8,
                };
            }
            if random.below(8) == 0 {
                bytes.truncate(random.below(whole.len()));
            }
            if name.ends_with("png") && random.below(2) == 0 {
                repair_checksums(&mut bytes);
            }
            let _ = read_recipe(&bytes);
            read += usize::from(from_bytes(name, &bytes).is_ok());
        }
    }
    // Neither all rejected nor all read: the changes reach the decoders.
    assert!((500..8000).contains(&read), "{read} of 8800 were still images");
}

#[test]
fn marks_and_manifest_stores_of_changed_files_are_no_longer_than_the_file() {
    let mark = AiMark {
        source: AiSource::Generated,
        system: "Kiln, <a & b>".into(),
        version: "1.0.0".into(),
        label: None,
    };
    let metadata = Metadata { recipe: Some("{}"), parameters: None, ai_mark: Some(&mark) };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut marks, mut stores) = (0, 0);
    for format in [Format::Png, Format::Jpeg, Format::Webp] {
        let file = encode_with_metadata(&RgbImage::black(8, 8), format.into(), &metadata).unwrap();
        // Some segments of JPEG.
        let store: Vec<u8> = (0..140_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let whole = with_manifest_store(&file, &store).unwrap().0;
        let (mark, kept) = (read_ai_mark(&whole).unwrap(), read_manifest_store(&whole).unwrap());
        assert!(mark.is_some() && kept == Some(store));
        for _ in 0..1000 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random.below(4) {
                // Most of the file is the store's content.
                let reach = if random.below(4) == 0 { bytes.len() } else { 2500 };
                let at = random.below(reach.min(bytes.len()));
                bytes[at] = [0xff, 0, bytes[at] ^ (1 << random.below(8))][random.below(3)];
            }
            if random.below(4) == 0 {
                bytes.truncate(random.below(whole.len()));
            }
            if format == Format::Png && random.below(2) == 0 {
                repair_checksums(&mut bytes);
            }
            let length = bytes.len();
            if let Ok(Some(mark)) = read_ai_mark(&bytes) {
                let texts = [Some(mark.source), mark.system, mark.version];
                assert!(texts.iter().flatten().map(String::len).sum::<usize>() <= 3 * length);
                marks += 1;
            }
            if let Ok(Some(store)) = read_manifest_store(&bytes) {
                assert!(store.len() <= length);
                stores += 1;
            }
        }
    }
    // The changes reach both readers, and not all are harmless.
    assert!((300..2900).contains(&marks) && (300..2990).contains(&stores), "{marks} marks, {stores} stores");
}

/// Without this, almost every change to a PNG would stop at a checksum.
fn repair_checksums(png: &mut [u8]) {
    let mut rest = png.get_mut(8..).unwrap_or_default();
    while let Some(length) = rest.first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        if rest.len() < length.saturating_add(12) {
            return;
        }
        let (chunk, after) = rest.split_at_mut(length + 12);
        let sum = crc(&chunk[4..8 + length]);
        chunk[8 + length..].copy_from_slice(&sum.to_be_bytes());
        rest = after;
    }
}

fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

/// Xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit.max(1)
    }
}
