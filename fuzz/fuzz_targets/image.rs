//! Arbitrary bytes as an image: an error, or an image that can be prepared and encoded.
#![no_main]

use kiln_image::{Format, encode, from_bytes, prepare_reference, read_recipe};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = read_recipe(data);
    let Ok(image) = from_bytes("fuzz", data) else { return };
    // Larger ones only cost time.
    if image.area() > 1 << 16 {
        return;
    }
    let _ = prepare_reference(&image);
    let png = encode(&image, Format::Png, Some("{}")).expect("every image can be encoded as PNG");
    assert_eq!(from_bytes("fuzz", &png).expect("an image that was just encoded"), image);
    assert_eq!(read_recipe(&png).expect("a recipe that was just written").as_deref(), Some("{}"));
});
