//! Any bytes as a picture: an error, or a picture that can be prepared and written.
#![no_main]

use kiln_image::{Format, encode, from_bytes, prepare_reference, read_recipe};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = read_recipe(data);
    let Ok(picture) = from_bytes("fuzz", data) else { return };
    // Larger ones cost time and show nothing new.
    if picture.area() > 1 << 16 {
        return;
    }
    let _ = prepare_reference(&picture);
    let png = encode(&picture, Format::Png, Some("{}")).expect("every picture can be a PNG");
    assert_eq!(from_bytes("fuzz", &png).expect("a picture that was just written"), picture);
    assert_eq!(read_recipe(&png).expect("a recipe that was just written").as_deref(), Some("{}"));
});
