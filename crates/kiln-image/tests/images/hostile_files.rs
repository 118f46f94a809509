//! Small files that ask for much memory, each by another part of its format.

/// Writes bits from the lowest of each byte.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    used: u32,
}

impl Bits {
    fn put(&mut self, value: u32, count: u32) {
        for place in 0..count {
            if self.used.is_multiple_of(8) {
                self.bytes.push(0);
            }
            *self.bytes.last_mut().unwrap() |= ((value >> place & 1) as u8) << (self.used % 8);
            self.used += 1;
        }
    }

    /// Writes a Huffman code, from its highest bit.
    fn code(&mut self, value: u32, count: u32) {
        (0..count).rev().for_each(|place| self.put(value >> place & 1, 1));
    }
}

/// A zlib stream of this many bytes and a few, all zero: a five-hundredth of that.
fn zeros(count: usize) -> Vec<u8> {
    let mut bits = Bits { bytes: vec![0x78, 0x01], used: 16 };
    bits.put(0b011, 3);
    bits.code(0x30, 8);
    for _ in 0..count / 258 {
        // A copy of 258 bytes from one byte before.
        bits.code(0xc5, 8);
        bits.code(0, 5);
    }
    bits.code(0, 7);
    // Nobody gets as far as the checksum.
    bits.bytes.extend([0; 4]);
    bits.bytes
}

fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

/// A sound PNG of one pixel, with chunks before its pixels.
fn png(chunks: &[(&[u8; 4], Vec<u8>)]) -> Vec<u8> {
    let mut file = Vec::new();
    png::Encoder::new(&mut file, 1, 1).write_header().unwrap().write_image_data(&[7]).unwrap();
    let after = file.split_off(33);
    for (kind, data) in chunks {
        let body = [&kind[..], data].concat();
        file.extend((data.len() as u32).to_be_bytes());
        file.extend(&body);
        file.extend(crc(&body).to_be_bytes());
    }
    file.extend(after);
    file
}

fn jpeg(segments: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let image = kiln_image::RgbImage::black(8, 8);
    let sound = kiln_image::encode(&image, kiln_image::Format::Jpeg, None).unwrap();
    let mut file = vec![0xff, 0xd8];
    for (marker, data) in segments {
        file.extend([0xff, *marker]);
        file.extend((data.len() as u16 + 2).to_be_bytes());
        file.extend(data);
    }
    file.extend(&sound[2..]);
    file
}

fn riff(chunks: &[(&[u8; 4], Vec<u8>, Option<u32>)]) -> Vec<u8> {
    let mut body = b"WEBP".to_vec();
    for (name, data, claimed) in chunks {
        body.extend(&name[..]);
        body.extend(claimed.unwrap_or(data.len() as u32).to_le_bytes());
        body.extend(data);
        body.resize(body.len().next_multiple_of(2), 0);
    }
    [&b"RIFF"[..], &(body.len() as u32).to_le_bytes(), &body].concat()
}

/// A lossless image of 4x4 pixels with this many groups of Huffman codes, each with tables of 20 KiB.
fn vp8l(groups: u32) -> Vec<u8> {
    let mut bits = Bits::default();
    bits.put(0x2f, 8);
    bits.put(3, 14);
    bits.put(3, 14);
    bits.put(0, 4);
    // No transform, no colour cache; one block, whose group is the last.
    bits.put(0b100, 3);
    bits.put(0, 3);
    bits.put(0, 1);
    for symbol in [(groups - 1) & 0xff, (groups - 1) >> 8, 0, 0, 0] {
        bits.put(0b101, 3);
        bits.put(symbol, 8);
    }
    // Lengths 1 to 10, of which the last occurs twice; codes for the lengths have 3 or 4 bits.
    let length_bits = |length: u32| if (1..=6).contains(&length) { 3 } else { 4 };
    let length_code = |length: u32| if length <= 6 { length - 1 } else { 12 + length - 7 };
    for _ in 0..5 * groups {
        bits.put(0, 1);
        bits.put(10, 4);
        for symbol in [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10] {
            bits.put(if (1..=10).contains(&symbol) { length_bits(symbol) } else { 0 }, 3);
        }
        // Eleven lengths are stored.
        bits.put(1, 1);
        bits.put(1, 3);
        bits.put(9, 4);
        for length in (1..=10).chain([10]) {
            bits.code(length_code(length), length_bits(length));
        }
    }
    // The pixels: the shortest codes.
    bits.bytes.extend([0; 512]);
    bits.bytes
}

fn gif(screen: u16, frame: u16) -> Vec<u8> {
    let mut file = b"GIF89a".to_vec();
    [screen, screen].iter().for_each(|side| file.extend(side.to_le_bytes()));
    file.extend([0x80, 0, 0, 0, 0, 0, 255, 255, 255]);
    file.extend([0x2c, 0, 0, 0, 0]);
    [frame, frame].iter().for_each(|side| file.extend(side.to_le_bytes()));
    file.extend([0, 2, 2, 0x44, 1, 0, 0x3b]);
    file
}

/// A TIFF of 16x16 pixels with more tags: tag, type, count, and values or what stands for their place.
fn tiff(more: &[(u16, u16, u32, Option<u32>)], data: &[u8]) -> Vec<u8> {
    let mut tags = vec![
        (256, 4, 1, Some(16)),
        (257, 4, 1, Some(16)),
        (258, 3, 1, Some(8)),
        (259, 3, 1, Some(1)),
        (262, 3, 1, Some(1)),
        (273, 4, 1, None),
        (277, 3, 1, Some(1)),
        (278, 4, 1, Some(16)),
        (279, 4, 1, Some(data.len() as u32)),
    ];
    tags.retain(|(tag, ..)| !more.iter().any(|(other, ..)| other == tag));
    tags.extend(more);
    tags.sort_unstable();
    let place = 8 + 2 + 12 * tags.len() as u32 + 4;
    let mut file = b"II*\0\x08\0\0\0".to_vec();
    file.extend((tags.len() as u16).to_le_bytes());
    for (tag, kind, count, value) in tags {
        file.extend(u16::to_le_bytes(tag));
        file.extend(u16::to_le_bytes(kind));
        file.extend(u32::to_le_bytes(count));
        file.extend(u32::to_le_bytes(value.unwrap_or(place)));
    }
    file.extend([0; 4]);
    file.extend(data);
    file
}

fn bmp(width: i32, height: i32) -> Vec<u8> {
    let mut file = b"BM\0\0\0\0\0\0\0\0\x36\x04\0\0\x28\0\0\0".to_vec();
    file.extend(width.to_le_bytes());
    file.extend(height.to_le_bytes());
    // One plane, eight bits, run lengths.
    file.extend([1, 0, 8, 0, 1, 0, 0, 0]);
    file.resize(0x436, 0);
    file.extend([0, 1]);
    file
}

/// All of them, by name.
pub fn all() -> Vec<(&'static str, Vec<u8>)> {
    const MANY: usize = 200 << 20;
    let keyed = |key: &str, data: Vec<u8>| [key.as_bytes(), &data].concat();
    let text = |key: &str| keyed(&format!("{key}\0\x01\0\0\0"), zeros(MANY));
    let frame = |side: u16| {
        [&[8], &side.to_be_bytes()[..], &side.to_be_bytes(), &[3, 1, 17, 0, 2, 17, 0, 3, 17, 0]].concat()
    };
    let profile = |index: u8| (0xe2, [&b"ICC_PROFILE\0"[..], &[index, 200], &[0; 65_000]].concat());
    let still = |size: u8| vec![0, 0, 0, 0, size, 0, 0, size, 0, 0];
    let strip = [&[0xff, 0xd8, 0xff, 0xc0, 0, 17], &frame(16_000)[..], &[0xff, 0xd9]].concat();
    vec![
        ("png profile", png(&[(b"iCCP", keyed("p\0\0", zeros(MANY)))])),
        ("png compressed text", png(&[(b"zTXt", keyed("parameters\0\0", zeros(MANY)))])),
        ("png recipe", png(&[(b"iTXt", text("kiln"))])),
        ("png xmp", png(&[(b"iTXt", text("XML:com.adobe.xmp"))])),
        ("png many texts", png(&vec![(b"zTXt", keyed("other\0\0", zeros(4 << 20))); 40])),
        ("png exif", png(&vec![(b"eXIf", vec![0; 1 << 20]); 8])),
        ("jpeg profile", jpeg(&(0..200).map(profile).collect::<Vec<_>>())),
        ("jpeg comments", jpeg(&vec![(0xfe, [&b"kiln:"[..], &[b'a'; 60_000]].concat()); 200])),
        ("jpeg second frame", jpeg(&[(0xc0, frame(16_000))])),
        ("webp codes", riff(&[(b"VP8L", vp8l(16_384), None)])),
        ("webp fewer codes", riff(&[(b"VP8L", vp8l(4096), None)])),
        (
            "webp frame codes",
            riff(&[
                (b"VP8X", [&[2, 0, 0, 0], &still(3)[4..]].concat(), None),
                (b"ANIM", vec![0; 6], None),
                (
                    b"ANMF",
                    {
                        let stream = vp8l(16_384);
                        let head = [0, 0, 0, 0, 0, 0, 3, 0, 0, 3, 0, 0, 0, 0, 0, 0];
                        [&head[..], b"VP8L", &(stream.len() as u32).to_le_bytes(), &stream].concat()
                    },
                    None,
                ),
            ]),
        ),
        (
            "webp exif beyond the end",
            riff(&[
                (b"VP8X", [&[8, 0, 0, 0], &still(3)[4..]].concat(), None),
                (b"VP8L", vp8l(1), None),
                (b"EXIF", vec![0; 64], Some(0xffff_fff0)),
            ]),
        ),
        ("gif frame beyond the screen", gif(1, 16_000)),
        ("gif screen", gif(16_000, 1)),
        ("bmp runs", bmp(16_000, -16_000)),
        ("tiff values", tiff(&[(338, 1, 8 << 20, None)], &vec![0; 8 << 20])),
        ("tiff strips", tiff(&[(273, 1, 8 << 20, None), (279, 1, 8 << 20, None)], &vec![0; 8 << 20])),
        ("tiff values beyond the end", tiff(&[(338, 1, 0xffff_fff0, None)], &[0; 256])),
        ("tiff jpeg", tiff(&[(259, 3, 1, Some(7)), (262, 3, 1, Some(2)), (277, 3, 1, Some(3))], &strip)),
        (
            "tiff tile",
            tiff(
                &[
                    (322, 4, 1, Some(1 << 31)),
                    (323, 4, 1, Some(16)),
                    (324, 4, 1, None),
                    (325, 4, 1, Some(1 << 20)),
                    (259, 3, 1, Some(8)),
                    (317, 3, 1, Some(2)),
                    (273, 4, 0, Some(0)),
                    (279, 4, 0, Some(0)),
                ],
                &zeros(MANY),
            ),
        ),
    ]
}
