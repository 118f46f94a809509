//! The invisible watermark: 32 bits in an image's brightness that survive compression, resizing and cropping.
//!
//! Both networks see a picture of 256². The pattern is made stronger where the image is busy and weaker where it is smooth,
//! enlarged to the image's size, and limited so that the image stays above 45 dB. All of it is computed on the CPU, so a GPU goes
//! on with the next image meanwhile.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_image::{RgbImage, add_pattern, block_watermark_agreement, small_luma, window_means};
use kiln_nn::{PATTERN_SIDE, WATERMARK_BITS, WATERMARK_SIDE, WatermarkReader, WatermarkWriter};
use kiln_weights::WeightSource;

use crate::error::Result;

/// Both networks in f16. `tools/watermark` trains them.
const NETWORKS: &[u8] = include_bytes!("../assets/watermark.safetensors");

/// Largest change of an image, in levels: the root of the mean square. Rounding to bytes adds 0.03.
const LIMIT: f32 = 1.3;
/// Where the image is smooth a pattern of 1 changes it by so many levels, more with the deviation of what is around, at most so many.
const SMOOTH: f32 = 0.8;
const PER_DEVIATION: f32 = 0.25;
const BUSIEST: f32 = 3.5;
/// Side of the windows whose deviation counts, and of those whose mean the reader does not see.
const AROUND: usize = 9;
const COARSE: usize = 33;
/// What a level is to the reader.
const PER_LEVEL: f32 = 8.0 / 255.0;
/// How far a pattern may go from its own deviation.
const PEAK: f32 = 2.5;
/// An image has a watermark if the reader is as sure as this that there is one, and on average as sure of its bits. Tiled
/// textures alone may look like one; their bits don't.
const PRESENT: f32 = 8.0;
const CERTAIN: f32 = 4.0;
/// Bits of a known payload that must be right.
const RIGHT_BITS: u32 = 29;

/// What a watermark says: 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload(pub u32);

impl Payload {
    /// That of images of Kiln, unless another is given: its name.
    pub const KILN: Payload = Payload(u32::from_be_bytes(*b"KILN"));
    /// It as text.
    pub const KILN_TEXT: &str = "4b494c4e";

    fn bits(self) -> [bool; WATERMARK_BITS] {
        std::array::from_fn(|i| self.0 >> (WATERMARK_BITS - 1 - i) & 1 == 1)
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl FromStr for Payload {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Payload, Self::Err> {
        let is_hex = text.len() == 8 && text.bytes().all(|c| c.is_ascii_hexdigit());
        let value = is_hex.then(|| u32::from_str_radix(text, 16).ok()).flatten();
        value.map(Payload).ok_or("a watermark is 8 hexadecimal digits, such as 4b494c4e")
    }
}

/// The fixed messages that other programs write by the method `dwtDct`, how many bits they have, and whose they are.
const OTHERS: [(u64, usize, &str); 2] =
    [(0x2afe_879c_f52e, 46, "Black Forest Labs"), (0xb3ec_907b_b19e, 48, "Stable Diffusion XL")];
/// An image has such a message if its blocks agree with it as well as this.
const AGREES: f32 = 0.75;

/// A watermark that was read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FoundWatermark {
    /// One as Kiln writes them.
    Own {
        /// Its bits; after much compression a few may be wrong.
        payload: Payload,
        /// How sure the reader is of the bits, the mean of their logits: above 4.
        certainty: f32,
    },
    /// One of another program, by `dwtDct` of `invisible-watermark`.
    Other {
        /// Its fixed message.
        message: u64,
        /// Whose it is, such as `Black Forest Labs`.
        owner: &'static str,
        /// How well the image agrees with it, above 0.75.
        certainty: f32,
    },
}

impl FoundWatermark {
    /// Whether it is this payload, up to three bits. Of payloads at random one in 780,000 is.
    pub fn is(&self, payload: Payload) -> bool {
        self.right_bits(payload) >= RIGHT_BITS
    }

    /// How many bits are those of `payload`.
    fn right_bits(&self, payload: Payload) -> u32 {
        match self {
            FoundWatermark::Own { payload: found, .. } => (found.0 ^ payload.0).count_zeros(),
            FoundWatermark::Other { .. } => 0,
        }
    }

    /// Its bits, as hexadecimal digits.
    pub fn bits(&self) -> String {
        match self {
            FoundWatermark::Own { payload, .. } => payload.to_string(),
            FoundWatermark::Other { message, .. } => format!("{message:x}"),
        }
    }

    /// Whose it is, if its bits are known.
    pub fn owner(&self) -> Option<&'static str> {
        match self {
            FoundWatermark::Other { owner, .. } => Some(owner),
            FoundWatermark::Own { .. } => self.is(Payload::KILN).then_some("Kiln"),
        }
    }

    /// How sure its reader is.
    pub fn certainty(&self) -> f32 {
        match self {
            FoundWatermark::Own { certainty, .. } | FoundWatermark::Other { certainty, .. } => *certainty,
        }
    }

    /// It in words.
    pub fn summary(&self) -> String {
        match (self, self.owner()) {
            (FoundWatermark::Other { owner, .. }, _) => format!("that of {owner} (dwtDct)"),
            (_, Some(_)) => format!("Kiln's ({} of {WATERMARK_BITS} bits)", self.right_bits(Payload::KILN)),
            (_, None) => format!("{} (not Kiln's own)", self.bits()),
        }
    }
}

/// Both networks on the CPU.
struct Networks {
    backend: CpuBackend,
    writer: WatermarkWriter<CpuBackend>,
    reader: WatermarkReader<CpuBackend>,
}

impl Networks {
    fn load() -> Result<Networks> {
        let source = WeightSource::from_bytes("watermark.safetensors", NETWORKS)?;
        let backend = CpuBackend::new(CpuOptions::default())?;
        let vars = source.root();
        let writer = WatermarkWriter::load(&backend, &vars.at("writer"))?;
        let reader = WatermarkReader::load(&backend, &vars.at("reader"))?;
        Ok(Networks { backend, writer, reader })
    }

    /// Runs `f` with the networks, which are loaded at the first call.
    fn with<T>(f: impl FnOnce(&Networks) -> Result<T>) -> Result<T> {
        static LOADED: OnceLock<Mutex<Option<Networks>>> = OnceLock::new();
        let mut loaded = LOADED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let networks = match loaded.take() {
            Some(networks) => networks,
            None => Networks::load()?,
        };
        f(loaded.insert(networks))
    }
}

/// Writes a watermark into an image.
pub fn add_watermark(image: &mut RgbImage, payload: Payload) -> Result<()> {
    let levels = small_luma(image, WATERMARK_SIDE as u32);
    let luma: Vec<f32> = levels.iter().map(|level| level / 127.5 - 1.0).collect();
    let mut pattern = Networks::with(|n| Ok(n.writer.pattern(&n.backend, &luma, &payload.bits())?))?;
    let deviation = root_mean_square(&pattern).max(1e-4);
    for (value, strength) in pattern.iter_mut().zip(strengths(&levels)) {
        *value = PEAK * (*value / deviation / PEAK).tanh() * strength;
    }
    add_pattern(image, &pattern, PATTERN_SIDE, LIMIT);
    Ok(())
}

/// What the reader sees of a picture in levels: it without its coarse parts, and weaker where it is busy.
fn detail(levels: &[f32]) -> Vec<f32> {
    let coarse = window_means(levels, WATERMARK_SIDE, COARSE);
    let detail = |(level, mean): (&f32, f32)| {
        let difference = (level - mean) * PER_LEVEL;
        ((1.0 + 2.0 * difference.abs()).sqrt() - 1.0).copysign(difference)
    };
    levels.iter().zip(coarse).map(detail).collect()
}

fn root_mean_square(values: &[f32]) -> f32 {
    (values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32).sqrt()
}

/// Reads an image's watermark: one of Kiln's, or else one of those that it knows.
pub fn read_watermark(image: &RgbImage) -> Result<Option<FoundWatermark>> {
    Ok(read_own(image)?.or_else(|| read_other(image)))
}

fn read_own(image: &RgbImage) -> Result<Option<FoundWatermark>> {
    let levels = small_luma(image, WATERMARK_SIDE as u32);
    let logits = Networks::with(|n| Ok(n.reader.read(&n.backend, &detail(&levels))?))?;
    let payload = Payload(logits.bits.iter().fold(0, |bits, logit| bits << 1 | u32::from(*logit > 0.0)));
    let certainty = logits.bits.iter().map(|logit| logit.abs()).sum::<f32>() / WATERMARK_BITS as f32;
    let found = FoundWatermark::Own { payload, certainty };
    Ok((logits.presence > PRESENT && certainty > CERTAIN).then_some(found))
}

fn read_other(image: &RgbImage) -> Option<FoundWatermark> {
    OTHERS.into_iter().find_map(|(message, length, owner)| {
        let bits: Vec<bool> = (0..length).rev().map(|bit| message >> bit & 1 == 1).collect();
        let certainty = block_watermark_agreement(image, &bits);
        (certainty > AGREES).then_some(FoundWatermark::Other { message, owner, certainty })
    })
}

/// How much a pattern of 1 may change each of its places, in levels.
fn strengths(levels: &[f32]) -> Vec<f32> {
    let mean = window_means(levels, WATERMARK_SIDE, AROUND);
    let squares: Vec<f32> = levels.iter().zip(mean).map(|(level, mean)| (level - mean).powi(2)).collect();
    let variance = window_means(&squares, WATERMARK_SIDE, AROUND);
    let strength = |at: usize| (SMOOTH + PER_DEVIATION * variance[at].max(0.0).sqrt()).min(BUSIEST);
    let place = |y: usize, x: usize| {
        let corner = 2 * y * WATERMARK_SIDE + 2 * x;
        [0, 1, WATERMARK_SIDE, WATERMARK_SIDE + 1].map(|offset| strength(corner + offset)).iter().sum::<f32>()
            / 4.0
    };
    (0..PATTERN_SIDE).flat_map(|y| (0..PATTERN_SIDE).map(move |x| (y, x))).map(|(y, x)| place(y, x)).collect()
}

#[cfg(test)]
mod tests {
    use kiln_image::{Encoding, Filter, Format, encode_with, from_bytes, resize};

    use super::*;

    /// A picture with smooth, busy, dark and bright parts.
    fn picture(width: u32, height: u32) -> RgbImage {
        let mut noise = 1u32;
        let pixels = (0..height).flat_map(|y| (0..width).map(move |x| (x, y))).flat_map(|(x, y)| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (u, v) = (x as f32 / width as f32, y as f32 / height as f32);
            let hill = (u * 9.0).sin() * 25.0 + v * 120.0;
            let grain = if v > 0.6 { (noise >> 26) as f32 } else { 0.0 };
            let disc = if (u - 0.3).hypot(v - 0.4) < 0.15 { 90.0 } else { 0.0 };
            [hill + grain + 40.0, hill + disc + 30.0, 150.0 - hill + grain].map(|c| c as u8)
        });
        RgbImage::new(width, height, pixels.collect()).unwrap()
    }

    fn marked(image: &RgbImage, payload: Payload) -> RgbImage {
        let mut marked = image.clone();
        add_watermark(&mut marked, payload).unwrap();
        marked
    }

    fn through(image: &RgbImage, format: Format, quality: u8) -> RgbImage {
        let file = encode_with(image, Encoding { quality: Some(quality), ..format.into() }, None).unwrap();
        from_bytes("image", &file).unwrap()
    }

    #[test]
    fn a_watermark_is_read_after_what_happens_to_images() {
        for (payload, image) in
            [(Payload::KILN, picture(640, 512)), (Payload(0x0123_89ef), picture(300, 420))]
        {
            let marked = marked(&image, payload);
            let (width, height) = (image.width(), image.height());
            let changes = [
                ("nothing", marked.clone()),
                ("JPEG 75", through(&marked, Format::Jpeg, 75)),
                ("JPEG 50", through(&marked, Format::Jpeg, 50)),
                ("WebP 80", through(&marked, Format::Webp, 80)),
                ("half", resize(&marked, width / 2, height / 2, Filter::Bicubic)),
                ("crop", marked.crop(11, 8, width * 19 / 20, height * 19 / 20)),
            ];
            for (name, changed) in changes {
                let found = read_watermark(&changed).unwrap().unwrap_or_else(|| panic!("none after {name}"));
                assert!(found.is(payload), "{payload} after {name}: {found:?}");
                assert_eq!(found.is(Payload::KILN), payload == Payload::KILN);
            }
        }
    }

    #[test]
    fn nobody_sees_a_watermark() {
        let image = picture(512, 512);
        let marked = marked(&image, Payload::KILN);
        let error: f64 = image
            .pixels()
            .iter()
            .zip(marked.pixels())
            .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
            .sum();
        let psnr = 10.0 * (255.0f64.powi(2) * image.pixels().len() as f64 / error).log10();
        assert!((45.0..60.0).contains(&psnr), "{psnr} dB");
        let most = image.pixels().iter().zip(marked.pixels()).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(most < Some(12), "{most:?}");
    }

    #[test]
    fn images_without_a_watermark_have_none() {
        for image in [picture(640, 512), picture(64, 64), RgbImage::black(256, 256), RgbImage::black(1, 1)] {
            assert_eq!(read_watermark(&image).unwrap(), None);
        }
    }

    #[test]
    fn watermarks_of_other_programs_are_read() {
        let file = include_bytes!("../../kiln-image/tests/data/dwt_dct.webp");
        let image = from_bytes("dwt_dct.webp", file).unwrap();
        let found = read_watermark(&image).unwrap().expect("a watermark");
        assert_eq!((found.owner(), found.bits()), (Some("Black Forest Labs"), "2afe879cf52e".into()));
        assert_eq!(found.summary(), "that of Black Forest Labs (dwtDct)");
        assert!(!found.is(Payload::KILN));
        // A crop moves the blocks.
        assert_eq!(read_watermark(&image.crop(3, 5, 200, 150)).unwrap(), None);
    }

    #[test]
    fn every_known_message_is_read_from_its_blocks() {
        for (message, length, owner) in OTHERS {
            let bit_at =
                |x: usize, y: usize| message >> (length - 1 - (y / 8 * 32 + x / 8) % length) & 1 == 1;
            // The sums of 2² such blues are 24 and 8 above multiples of 36.
            let pixels = (0..256).flat_map(|y| (0..256).map(move |x| (x, y)));
            let pixels = pixels.flat_map(|(x, y)| [128, 128, if bit_at(x, y) { 151 } else { 133 }]).collect();
            let found = read_other(&RgbImage::new(256, 256, pixels).unwrap()).expect(owner);
            assert_eq!((found.owner(), found.bits()), (Some(owner), format!("{message:x}")));
        }
    }

    #[test]
    fn tiny_and_narrow_images_take_a_watermark() {
        for [width, height] in [[1, 1], [16, 2000], [3, 7]] {
            let image = marked(&RgbImage::black(width, height), Payload::KILN);
            assert_eq!((image.width(), image.height()), (width, height));
        }
    }

    #[test]
    fn payloads_are_eight_hexadecimal_digits() {
        assert_eq!(Payload::KILN_TEXT.parse(), Ok(Payload::KILN));
        assert_eq!(Payload::KILN.to_string(), Payload::KILN_TEXT);
        for text in ["", "4b494c4", "4b494c4e0", "0x4b494c", "4b494c4g", "+b494c4e"] {
            assert!(text.parse::<Payload>().is_err(), "{text}");
        }
    }
}
