//! Decoding compared with Pillow 13.0.0 (see make_data.py), and rejected files.

use std::path::Path;

use crate::common::{data, golden, sha};
use kiln_image::{Error, GrayImage, RgbImage, from_bytes, open, open_gray, to_signed_f32};

#[test]
fn lossless_formats_decode_to_pillows_bytes() {
    for case in golden("decode") {
        let [name, width, height, rgb, luma] = &case[..] else { panic!("{case:?}") };
        let image = open(&data(name)).unwrap();
        let size = (image.width().to_string(), image.height().to_string());
        assert_eq!((&size.0, &size.1), (width, height), "{name}");
        assert_eq!(&sha(image.pixels()), rgb, "{name}");
        assert_eq!(&sha(open_gray(&data(name)).unwrap().pixels()), luma, "{name}");
    }
}

/// The inverse DCTs of two JPEG decoders differ by a level here and there. Chroma upsampling differs too, by up to 4
/// levels of blue.
#[test]
fn jpeg_images_decode_to_pillows_within_a_few_levels() {
    for (name, max, mean) in [
        ("gray.jpg", 1, 0.02),
        ("full_color.jpg", 2, 0.05),
        ("half_color.jpg", 4, 0.5),
        ("progressive.jpg", 4, 0.5),
        ("cmyk.jpg", 2, 0.05),
        ("exif_2.jpg", 2, 0.05),
        ("exif_3.jpg", 2, 0.05),
        ("exif_4.jpg", 2, 0.05),
        ("exif_5.jpg", 2, 0.05),
        ("exif_6.jpg", 2, 0.05),
        ("exif_7.jpg", 2, 0.05),
        ("exif_8.jpg", 2, 0.05),
    ] {
        let expected = open(&data(&format!("expected/{name}.png"))).unwrap();
        let found = open(&data(name)).unwrap();
        assert_eq!((found.width(), found.height()), (expected.width(), expected.height()), "{name}");
        let differences = found.pixels().iter().zip(expected.pixels()).map(|(a, b)| a.abs_diff(*b));
        let largest = differences.clone().max().unwrap();
        let average = differences.map(f64::from).sum::<f64>() / found.pixels().len() as f64;
        assert!(largest <= max && average <= mean, "{name}: at most {largest}, on average {average}");
    }
}

#[test]
fn the_format_is_recognized_by_content_and_not_by_name() {
    let bytes = std::fs::read(data("rgb.bmp")).unwrap();
    assert_eq!(from_bytes("image.png", &bytes).unwrap(), open(&data("rgb.png")).unwrap());
}

#[test]
fn files_that_are_no_images_are_named_and_described() {
    for (bytes, found) in [
        (&b""[..], "an empty file"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML, XML or SVG text"),
        (b"{\"error\": \"not found\"}", "text"),
        (b"\x89PN", "unknown binary data"),
    ] {
        let error = from_bytes("cat.png", bytes).unwrap_err();
        assert!(matches!(error, Error::NotAnImage { .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains("`cat.png`") && message.ends_with(found), "{message}");
    }
}

#[test]
fn a_missing_file_and_a_folder_are_errors_that_name_the_path() {
    for path in ["no/such/file.png", env!("CARGO_MANIFEST_DIR")] {
        let message = open(Path::new(path)).unwrap_err().to_string();
        assert!(message.contains(path), "{message}");
    }
}

#[test]
fn a_truncated_file_is_rejected_wherever_it_is_cut() {
    for name in ["rgb.png", "full_color.jpg", "progressive.jpg", "lossy.webp", "rgba_lossless.webp"] {
        let bytes = std::fs::read(data(name)).unwrap();
        // A PNG may lose the 12 bytes of its end chunk: the pixels are complete.
        let end = bytes.len() - if name == "rgb.png" { 20 } else { 1 };
        for cut in 1..end {
            assert!(
                from_bytes(name, &bytes[..cut]).is_err(),
                "{name} cut after {cut} of {} bytes",
                bytes.len()
            );
        }
        let message = from_bytes(name, &bytes[..bytes.len() / 2]).unwrap_err().to_string();
        assert!(message.contains(&format!("`{name}` is damaged")), "{message}");
    }
}

#[test]
fn a_decompression_bomb_is_rejected_by_its_header() {
    // The first exceeds the longest side, the second only the memory limit.
    for (width, height) in [(60_000, 60_000), (16_384, 16_384), (1, 16_385)] {
        let error = from_bytes("bomb.png", &empty_png(width, height)).unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
        let message = error.to_string();
        assert!(
            message.contains("`bomb.png`") && message.contains(&format!("{width}x{height}")),
            "{message}"
        );
    }
}

/// A header, and no pixels.
fn empty_png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    drop(encoder.write_header().unwrap());
    // Without pixels the end chunk would be another error; the data chunk's header is enough here.
    bytes.truncate(33);
    bytes.extend([0, 0, 0, 0, b'I', b'D', b'A', b'T', 0x35, 0xaf, 0x06, 0x1e]);
    bytes
}

#[test]
fn masks_are_the_luma_of_the_image_without_alpha() {
    let rgba = open(&data("rgba.png")).unwrap();
    assert_eq!(open_gray(&data("rgba.png")).unwrap(), GrayImage::from(&rgba));
    assert_eq!(rgba, open(&data("rgb.png")).unwrap());
}

#[test]
fn an_image_becomes_values_row_by_row() {
    let image = RgbImage::new(1, 2, vec![0, 255, 51, 102, 153, 204]).unwrap();
    let rounded = |v: &f32| (v * 10.0).round() / 10.0;
    let values: Vec<f32> = to_signed_f32(&image).iter().map(rounded).collect();
    assert_eq!(values, [-1.0, 1.0, -0.6, -0.2, 0.2, 0.6]);
}
