//! Resizing and preparing, byte-exact with Pillow 13.0.0 and diffusers 0.42.1 (see make_data.py).

use crate::common::{disc, golden, pattern, sha};
use kiln_image::{
    Error, Filter, GrayImage, RgbImage, paste_back, prepare_init, prepare_inpaint, prepare_inpaint_sized,
    prepare_reference, resize,
};

/// Pixels along a side of one of FLUX.2's tokens.
const UNIT: u32 = 16;

fn number(field: &str) -> u32 {
    field.parse().unwrap()
}

#[test]
fn resizing_gives_pillows_bytes() {
    for case in golden("resize") {
        let filter = match case[0].as_str() {
            "lanczos" => Filter::Lanczos,
            "bicubic" => Filter::Bicubic,
            "bilinear" => Filter::Bilinear,
            other => panic!("{other}"),
        };
        let [channels, width, height, to_width, to_height] = [1, 2, 3, 4, 5].map(|i| number(&case[i]));
        let found = match channels {
            1 => sha(resize(&pattern::<1>(width, height), to_width, to_height, filter).pixels()),
            3 => sha(resize(&pattern::<3>(width, height), to_width, to_height, filter).pixels()),
            other => panic!("{other}"),
        };
        assert_eq!(found, case[6], "{case:?}");
    }
}

#[test]
fn resizing_to_the_same_size_changes_nothing() {
    let image = pattern::<3>(37, 23);
    assert_eq!(resize(&image, 37, 23, Filter::Lanczos), image);
}

#[test]
fn references_are_shrunk_and_cropped_as_diffusers_does() {
    for case in golden("reference") {
        let [width, height, to_width, to_height] = [0, 1, 2, 3].map(|i| number(&case[i]));
        let reference = prepare_reference(&pattern(width, height), UNIT).unwrap();
        assert_eq!((reference.width(), reference.height()), (to_width, to_height), "{case:?}");
        assert_eq!(sha(reference.pixels()), case[4], "{case:?}");
    }
}

#[test]
fn references_that_are_too_small_or_too_thin_are_rejected_with_their_size() {
    for (width, height) in [(63, 80), (80, 63), (1, 1)] {
        let error = prepare_reference(&RgbImage::black(width, height), UNIT).unwrap_err();
        assert!(matches!(error, Error::TooSmall { .. }), "{error}");
        assert!(error.to_string().contains(&format!("{width}x{height}")), "{error}");
    }
    for (width, height) in [(800, 96), (96, 769)] {
        let error = prepare_reference(&RgbImage::black(width, height), UNIT).unwrap_err();
        assert!(matches!(error, Error::AspectRatio { .. }), "{error}");
        assert!(error.to_string().contains(&format!("{width}x{height}")), "{error}");
    }
    assert!(prepare_reference(&RgbImage::black(64, 512), UNIT).is_ok());
}

#[test]
fn inpainting_prepares_and_pastes_back_as_diffusers_does() {
    for case in golden("inpaint") {
        let [width, height, mask_width, mask_height, cx, cy, radius] =
            [0, 1, 2, 3, 4, 5, 6].map(|i| number(&case[i]));
        let mask = disc(mask_width, mask_height, cx.into(), cy.into(), radius.into());
        let inpaint = prepare_inpaint(&pattern(width, height), &mask, case[7].parse().ok(), UNIT).unwrap();

        assert_eq!([inpaint.width, inpaint.height].map(|v| v.to_string())[..], case[9..11], "{case:?}");
        let region = inpaint.paste.as_ref().map(|paste| paste.region);
        let region = region.map(|r| format!("{},{},{},{}", r.left, r.top, r.right, r.bottom));
        assert_eq!(region.as_deref().unwrap_or("-"), case[11], "{case:?}");
        assert_eq!(sha(inpaint.source.pixels()), case[12], "source of {case:?}");
        let mask: Vec<u8> = inpaint.mask.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(sha(&mask), case[13], "mask of {case:?}");

        let result = paste_back(&inpaint, &upside_down(&pattern(inpaint.width, inpaint.height)));
        assert_eq!([result.width(), result.height()].map(|v| v.to_string())[..], case[14..16], "{case:?}");
        assert_eq!(sha(result.pixels()), case[16], "result of {case:?}");
    }
}

fn upside_down(image: &RgbImage) -> RgbImage {
    let rows = (0..image.height()).rev().flat_map(|y| image.row(y)).copied().collect();
    RgbImage::new(image.width(), image.height(), rows).unwrap()
}

#[test]
fn the_mask_threshold_is_half_brightness() {
    let source = RgbImage::black(32, 16);
    let mask = |left: u8, right: u8| {
        let pixels = (0..16 * 32).map(|i| if i % 32 < 16 { left } else { right }).collect();
        prepare_inpaint(&source, &GrayImage::new(32, 16, pixels).unwrap(), None, UNIT).unwrap().mask
    };
    assert_eq!(mask(128, 127), [1.0, 0.0]);
    assert_eq!(mask(0, 255), [0.0, 1.0]);
}

#[test]
fn a_mask_of_another_size_is_stretched_over_the_source_with_padding_too() {
    let small = disc(100, 72, 61, 25, 12);
    let inpaint = prepare_inpaint(&pattern(100, 72), &small, Some(8), UNIT).unwrap();
    let large = resize(&small, 300, 216, Filter::Bilinear);
    let other = prepare_inpaint(&pattern(100, 72), &large, Some(8), UNIT).unwrap();
    let (region, other) = (inpaint.paste.unwrap().region, other.paste.unwrap().region);
    assert!(
        region.left.abs_diff(other.left) <= 3 && region.bottom.abs_diff(other.bottom) <= 3,
        "{region:?} {other:?}"
    );
}

#[test]
fn an_empty_mask_is_an_error_only_with_padding() {
    let (source, mask) = (pattern(64, 64), GrayImage::black(64, 64));
    assert!(matches!(prepare_inpaint(&source, &mask, Some(8), UNIT), Err(Error::EmptyMask { .. })));
    assert!(prepare_inpaint(&source, &mask, None, UNIT).unwrap().mask.iter().all(|&v| v == 0.0));
}

#[test]
fn a_source_smaller_than_a_token_is_rejected() {
    let error = prepare_inpaint(&pattern(40, 15), &GrayImage::black(40, 15), None, UNIT).unwrap_err();
    assert!(error.to_string().contains("40x15"), "{error}");
    assert!(prepare_init(&pattern(40, 15), None, None, UNIT).is_err());
}

#[test]
fn an_initial_image_takes_the_given_size_or_keeps_its_own() {
    let size = |width, height, w, h| {
        let init = prepare_init(&pattern(width, height), w, h, UNIT).unwrap();
        (init.width(), init.height())
    };
    assert_eq!(size(100, 72, None, None), (96, 64));
    assert_eq!(size(1400, 1001, None, None), (1200, 864));
    assert_eq!(size(100, 72, Some(256), Some(100)), (256, 96));
    assert_eq!(size(100, 75, Some(200), None), (192, 144));
    assert_eq!(size(100, 75, None, Some(150)), (192, 144));
    assert!(prepare_init(&pattern(100, 72), Some(0), None, UNIT).is_err());
    for (width, height) in [(Some(u32::MAX), None), (None, Some(20_000)), (Some(16), Some(u32::MAX))] {
        let error = prepare_init(&pattern(100, 72), width, height, UNIT).unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }), "{error}");
    }
    let (source, mask) = (pattern(100, 72), GrayImage::black(9, 9));
    let sized = |w, h| prepare_inpaint_sized(&source, &mask, w, h, UNIT).unwrap();
    let large = sized(Some(256), None);
    assert_eq!((large.width, large.height, large.mask.len()), (256, 176, 16 * 11));
    assert_eq!(large.source, prepare_init(&source, Some(256), None, UNIT).unwrap());
    assert_eq!(sized(Some(96), Some(64)).source, prepare_inpaint(&source, &mask, None, UNIT).unwrap().source);
    let whole = prepare_inpaint(&pattern(100, 72), &GrayImage::black(9, 9), None, UNIT).unwrap().source;
    assert_eq!(prepare_init(&pattern(100, 72), None, None, UNIT).unwrap(), whole);
}
