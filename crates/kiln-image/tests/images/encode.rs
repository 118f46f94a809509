//! Encoding images, and reading their recipes back.

use std::path::Path;

use crate::common::{data, pattern};
use kiln_image::{
    Encoding, Format, Metadata, RgbImage, encode, encode_with, encode_with_metadata, from_bytes, open,
    read_recipe,
};

const FORMATS: [Format; 3] = [Format::Png, Format::Jpeg, Format::Webp];

#[test]
fn lossless_formats_keep_every_byte() {
    for (width, height) in [(1, 1), (64, 48), (33, 7)] {
        let image: RgbImage = pattern(width, height);
        for format in [Format::Png, Format::Webp] {
            for recipe in [None, Some("{}")] {
                let bytes = encode(&image, format, recipe).unwrap();
                assert_eq!(from_bytes("x", &bytes).unwrap(), image, "{format} {width}x{height}");
            }
        }
    }
}

/// Difficult images: one colour, noise, one pixel wide, strips of two rows, many strips.
#[test]
fn lossless_strips_keep_every_byte_of_any_image() {
    let mut noise = 1u32;
    let mut random = || {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (noise >> 24) as u8
    };
    let sizes = [(1, 1), (2, 3), (1, 5000), (16_000, 7), (640, 512)];
    for (width, height) in sizes {
        let bytes = 3 * width as usize * height as usize;
        let flat = vec![200; bytes];
        let noisy: Vec<u8> = (0..bytes).map(|_| random()).collect();
        let sparse: Vec<u8> = (0..bytes).map(|_| if random() < 3 { random() } else { 0 }).collect();
        let shades: Vec<u8> = (0..bytes).map(|i| ((i / 700) as u8).wrapping_add(random() / 64)).collect();
        for (what, pixels) in [("flat", flat), ("noisy", noisy), ("sparse", sparse), ("shades", shades)] {
            let image = RgbImage::new(width, height, pixels).unwrap();
            for format in [Format::Png, Format::Webp] {
                let file = encode(&image, format, None).unwrap();
                assert_eq!(from_bytes("x", &file).unwrap(), image, "{format}: {what} {width}x{height}");
                // Every row of a PNG has a filter byte.
                let raw = bytes + height as usize;
                let limit = if what == "noisy" { raw + raw / 200 } else { raw / 2 };
                assert!(
                    file.len() < limit + 1000,
                    "{format}: {what} {width}x{height}: {} of {raw}",
                    file.len()
                );
            }
        }
    }
}

/// Film grain, where searching for matches makes the file larger, and a repetitive pattern.
#[test]
fn a_small_png_is_never_larger_than_a_fast_one() {
    let grain =
        (0..3 * 96 * 80u32).map(|i| (i / 900) as u8 + (i.wrapping_mul(2_654_435_761) >> 29) as u8).collect();
    for image in [RgbImage::new(96, 80, grain).unwrap(), pattern(96, 80)] {
        let fast = encode(&image, Format::Png, Some("{}")).unwrap();
        let small = Encoding { small: true, ..Format::Png.into() };
        let small = encode_with(&image, small, Some("{}")).unwrap();
        assert!(small.len() <= fast.len(), "{} of {}", small.len(), fast.len());
        assert_eq!(from_bytes("x", &small).unwrap(), image);
        assert_eq!(read_recipe(&small).unwrap().as_deref(), Some("{}"));
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_file() {
    let image: RgbImage = pattern(500, 700);
    for format in FORMATS {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| encode(&image, format, Some("{}")).unwrap())
        };
        assert_eq!(with(1), with(3), "{format}");
    }
}

/// Mean square of the differences.
fn error(a: &RgbImage, b: &RgbImage) -> f64 {
    let squares = a.pixels().iter().zip(b.pixels()).map(|(a, b)| f64::from(a.abs_diff(*b)).powi(2));
    squares.sum::<f64>() / a.pixels().len() as f64
}

/// Against the encoder of the `image` crate: sizes that leave a part of a block, many strips, every range of qualities.
#[test]
fn jpeg_is_as_close_and_as_small_as_another_encoder_s() {
    for (width, height, quality) in [
        (1, 1, 95),
        (8, 8, 50),
        (17, 9, 95),
        (9, 1000, 80),
        (4099, 16, 95),
        (333, 500, 100),
        (640, 512, 10),
        (64, 64, 1),
    ] {
        let image: RgbImage = pattern(width, height);
        let encoding = Encoding { quality: Some(quality), ..Format::Jpeg.into() };
        let ours = encode_with(&image, encoding, None).unwrap();
        let mut theirs = Vec::new();
        image::codecs::jpeg::JpegEncoder::new_with_quality(&mut theirs, quality)
            .encode(image.pixels(), width, height, image::ExtendedColorType::Rgb8)
            .unwrap();
        let [our_error, their_error] =
            [&ours, &theirs].map(|file| error(&from_bytes("x", file).unwrap(), &image));
        assert!(our_error <= 1.01 * their_error + 0.01, "{width}x{height}: {our_error} for {their_error}");
        let limit = theirs.len() + theirs.len() / 100 + 8;
        assert!(ours.len() <= limit, "{width}x{height}: {} for {}", ours.len(), theirs.len());
    }
}

#[test]
fn jpeg_stays_close() {
    let image = open(&data("rgb.png")).unwrap();
    let bytes = encode(&image, Format::Jpeg, Some("{}")).unwrap();
    let found = from_bytes("x", &bytes).unwrap();
    let largest = image.pixels().iter().zip(found.pixels()).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    assert!(largest <= 12, "{largest}");
}

#[test]
fn lossy_webp_is_small_stays_close_and_keeps_its_recipe() {
    let image = open(&data("rgb.png")).unwrap();
    let encode = |quality, recipe| {
        let encoding = Encoding { quality: Some(quality), ..Format::Webp.into() };
        encode_with(&image, encoding, recipe).unwrap()
    };
    let (good, bad) = (encode(90, Some("{\"seed\":1}")), encode(10, None));
    assert!(bad.len() < good.len());
    assert_eq!(read_recipe(&good).unwrap().as_deref(), Some("{\"seed\":1}"));
    assert_eq!(read_recipe(&bad).unwrap(), None);
    let found = from_bytes("x", &good).unwrap();
    assert_eq!((found.width(), found.height()), (image.width(), image.height()));
    let sum: u64 = image.pixels().iter().zip(found.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
    let mean = sum as f64 / image.pixels().len() as f64;
    assert!(mean < 8.0, "{mean}");
}

#[test]
fn a1111_parameters_are_in_every_format() {
    let image: RgbImage = pattern(16, 16);
    let unicode = |text: &str| -> Vec<u8> {
        b"UNICODE\0".iter().copied().chain(text.encode_utf16().flat_map(u16::to_be_bytes)).collect()
    };
    let text = "a fox\nSteps: 4, Seed: 7";
    for (format, expected) in [
        (Format::Png, [b"parameters\0", text.as_bytes()].concat()),
        (Format::Jpeg, unicode(text)),
        (Format::Webp, unicode(text)),
    ] {
        let bytes = encode_with_metadata(
            &image,
            format.into(),
            &Metadata { recipe: Some("{}"), parameters: Some(text), ai_mark: None },
        )
        .unwrap();
        assert!(bytes.windows(expected.len()).any(|found| found == expected), "{format}");
        assert_eq!(read_recipe(&bytes).unwrap().as_deref(), Some("{}"), "{format}");
        assert!(from_bytes("x", &bytes).is_ok(), "{format}");
    }
}

#[test]
fn recipes_of_any_length_and_language_are_read_back() {
    let image: RgbImage = pattern(16, 16);
    let long = "桜 🌸 \"quoted\" \n".repeat(20_000);
    for format in FORMATS {
        for recipe in ["{}", r#"{"prompt":"Grüße, 桜 🌸","seed":18446744073709551615}"#, &long] {
            let bytes = encode(&image, format, Some(recipe)).unwrap();
            assert_eq!(read_recipe(&bytes).unwrap().as_deref(), Some(recipe), "{format}");
            assert!(from_bytes("x", &bytes).is_ok(), "{format}");
        }
    }
}

#[test]
fn an_image_without_a_recipe_has_none() {
    let image: RgbImage = pattern(16, 16);
    for format in FORMATS {
        assert_eq!(read_recipe(&encode(&image, format, None).unwrap()).unwrap(), None, "{format}");
    }
    for name in ["rgb.bmp", "lzw.tif", "palette_transparent.gif", "exif_6.jpg", "exif_6.webp", "xmp_8.png"] {
        assert_eq!(read_recipe(&std::fs::read(data(name)).unwrap()).unwrap(), None, "{name}");
    }
    assert!(read_recipe(b"no image").is_err());
}

#[test]
fn a_recipe_behind_the_pixels_of_a_png_is_found() {
    let bytes = encode(&pattern(16, 16), Format::Png, Some("{\"seed\":7}")).unwrap();
    // Signature and header are 33 bytes, the text chunk is next.
    let length = 12 + u32::from_be_bytes(bytes[33..37].try_into().unwrap()) as usize;
    assert_eq!(&bytes[37..41], b"iTXt");
    let (text, end) = (&bytes[33..33 + length], bytes.len() - 12);
    let moved = [&bytes[..33], &bytes[33 + length..end], text, &bytes[end..]].concat();
    assert_eq!(read_recipe(&moved).unwrap().as_deref(), Some("{\"seed\":7}"));
}

#[test]
fn the_same_image_gives_the_same_bytes() {
    for format in FORMATS {
        let write = || encode(&pattern(64, 48), format, Some("{}")).unwrap();
        assert_eq!(write(), write(), "{format}");
    }
}

#[test]
fn the_format_comes_from_the_file_name() {
    for (name, format) in [
        ("a.png", Format::Png),
        ("b/A.JPG", Format::Jpeg),
        ("a.b.jpeg", Format::Jpeg),
        ("a.WebP", Format::Webp),
    ] {
        assert_eq!(Format::from_path(Path::new(name)).unwrap(), format);
    }
    let message = Format::from_path(Path::new("out.tiff")).unwrap_err().to_string();
    assert!(message.contains("`out.tiff`") && message.contains(".png, .jpg, .jpeg or .webp"), "{message}");
    assert!(message.ends_with("found .tiff"), "{message}");
    let message = Format::from_path(Path::new("out")).unwrap_err().to_string();
    assert!(message.ends_with("no extension"), "{message}");
}
