//! Writing pictures, and finding their recipes again.

mod common;

use std::path::Path;

use common::{data, pattern};
use kiln_image::{Format, Picture, encode, from_bytes, open, read_recipe};

const FORMATS: [Format; 3] = [Format::Png, Format::Jpeg, Format::Webp];

#[test]
fn lossless_formats_keep_every_byte() {
    for (width, height) in [(1, 1), (64, 48), (33, 7)] {
        let picture: Picture = pattern(width, height);
        for format in [Format::Png, Format::Webp] {
            for recipe in [None, Some("{}")] {
                let bytes = encode(&picture, format, recipe).unwrap();
                assert_eq!(from_bytes("x", &bytes).unwrap(), picture, "{format} {width}x{height}");
            }
        }
    }
}

#[test]
fn jpeg_stays_close() {
    let picture = open(&data("rgb.png")).unwrap();
    let bytes = encode(&picture, Format::Jpeg, Some("{}")).unwrap();
    let found = from_bytes("x", &bytes).unwrap();
    let largest = picture.pixels().iter().zip(found.pixels()).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    assert!(largest <= 12, "{largest}");
}

#[test]
fn recipes_of_any_length_and_language_come_back() {
    let picture: Picture = pattern(16, 16);
    let long = "桜 🌸 \"quoted\" \n".repeat(20_000);
    for format in FORMATS {
        for recipe in ["{}", r#"{"prompt":"Grüße, 桜 🌸","seed":18446744073709551615}"#, &long] {
            let bytes = encode(&picture, format, Some(recipe)).unwrap();
            assert_eq!(read_recipe(&bytes).unwrap().as_deref(), Some(recipe), "{format}");
            assert!(from_bytes("x", &bytes).is_ok(), "{format}");
        }
    }
}

#[test]
fn a_picture_without_a_recipe_has_none() {
    let picture: Picture = pattern(16, 16);
    for format in FORMATS {
        assert_eq!(read_recipe(&encode(&picture, format, None).unwrap()).unwrap(), None, "{format}");
    }
    for name in ["rgb.bmp", "lzw.tif", "palette_transparent.gif", "exif_6.jpg", "exif_6.webp", "xmp_8.png"] {
        assert_eq!(read_recipe(&std::fs::read(data(name)).unwrap()).unwrap(), None, "{name}");
    }
    assert!(read_recipe(b"no picture").is_err());
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
fn the_same_picture_gives_the_same_bytes() {
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
