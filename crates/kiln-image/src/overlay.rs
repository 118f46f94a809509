//! Putting a worked-on region back into its picture, in Pillow's integer arithmetic.

use crate::prepare::centre_crop;
use crate::{Inpaint, Picture};

/// `result` inside the picture it was cut from, through the mask. Without padding nothing was cut, and the result
/// is returned as it is.
///
/// This is diffusers' `apply_overlay` with the FLUX.2 processor, which does not scale the result down to the region
/// but takes the region's size out of its middle. The mask is soft here: grey blends.
pub fn paste_back(inpaint: &Inpaint, result: &Picture) -> Picture {
    let Some(paste) = &inpaint.paste else { return result.clone() };
    let region = &paste.region;
    let part = centre_crop(result, region.width(), region.height());
    let mut picture = Picture::black(paste.original.width(), paste.original.height());
    picture.paste(&part, i64::from(region.left), i64::from(region.top));

    let mut pixels = picture.into_pixels();
    let originals = paste.original.pixels().as_chunks::<3>().0;
    let masks = paste.mask.pixels();
    for ((pixel, original), &mask) in pixels.as_chunks_mut::<3>().0.iter_mut().zip(originals).zip(masks) {
        blend(pixel, original, 255 - mask);
    }
    Picture::from_parts(paste.original.width(), paste.original.height(), pixels)
}

/// Draws `over` on an opaque `pixel` with opacity `alpha`.
///
/// The detours are Pillow's, each with a rounding of its own: the colour is multiplied by its opacity, divided by
/// it again, and then mixed with weights of 7 fraction bits.
fn blend(pixel: &mut [u8; 3], over: &[u8; 3], alpha: u8) {
    let alpha = u32::from(alpha);
    if alpha == 0 {
        return;
    }
    let weight = alpha * 128;
    let other = 255 * 128 - weight;
    for (pixel, &over) in pixel.iter_mut().zip(over) {
        let multiplied = div255(u32::from(over) * alpha + 128);
        let over = if alpha == 255 { multiplied } else { (255 * multiplied / alpha).min(255) };
        let mixed = over * weight + u32::from(*pixel) * other;
        *pixel = (div255(mixed + (128 << 7)) >> 7) as u8;
    }
}

/// A division by 255 of what has half of that added already.
fn div255(value: u32) -> u32 {
    ((value >> 8) + value) >> 8
}
