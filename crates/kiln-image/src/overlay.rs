//! Pasting an inpainted region back into its image, in Pillow's integer arithmetic.

use crate::prepare::centre_crop;
use crate::{InpaintInputs, RgbImage};

/// Pastes `result` into the image that the region was cropped from, through the mask. Without padding nothing was
/// cropped, and `result` is returned unchanged.
///
/// As diffusers' `apply_overlay` with the FLUX.2 processor, this does not scale the result down to the region, but crops
/// the region's size out of its centre. The mask is soft here: grey blends.
pub fn paste_back(inpaint: &InpaintInputs, result: &RgbImage) -> RgbImage {
    let Some(paste) = &inpaint.paste else { return result.clone() };
    let region = &paste.region;
    let cropped = centre_crop(result, region.width(), region.height());
    let mut image = RgbImage::black(paste.original.width(), paste.original.height());
    image.paste(&cropped, i64::from(region.left), i64::from(region.top));

    let mut pixels = image.into_pixels();
    let originals = paste.original.pixels().as_chunks::<3>().0;
    let masks = paste.mask.pixels();
    for ((pixel, original), &mask) in pixels.as_chunks_mut::<3>().0.iter_mut().zip(originals).zip(masks) {
        blend(pixel, original, 255 - mask);
    }
    RgbImage::from_parts(paste.original.width(), paste.original.height(), pixels)
}

/// Draws `over` on an opaque `pixel` with opacity `alpha`.
///
/// Follows Pillow's steps, each of which rounds: the colour is premultiplied by its opacity, divided by it again, and
/// then mixed with weights of 7 fraction bits.
fn blend(pixel: &mut [u8; 3], over: &[u8; 3], alpha: u8) {
    let alpha = u32::from(alpha);
    if alpha == 0 {
        return;
    }
    let weight = alpha * 128;
    let other = 255 * 128 - weight;
    for (pixel, &over) in pixel.iter_mut().zip(over) {
        let premultiplied = div255(u32::from(over) * alpha + 128);
        let over = if alpha == 255 { premultiplied } else { (255 * premultiplied / alpha).min(255) };
        let mixed = over * weight + u32::from(*pixel) * other;
        *pixel = (div255(mixed + (128 << 7)) >> 7) as u8;
    }
}

/// Divides by 255, rounded down; the caller has added half of it to round to nearest.
fn div255(value: u32) -> u32 {
    ((value >> 8) + value) >> 8
}
