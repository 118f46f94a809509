//! Sizes that images are resized to: about as many pixels as a square of the resolution, in the image's own shape.

use kiln_family::FAMILIES;
use kiln_image::{Filter, RgbImage, resize};

/// Width and height in pixels, whole tokens of every family.
pub type Bucket = [u32; 2];

/// Largest ratio of the sides of a bucket: images beyond it are cropped.
const MAX_RATIO: f64 = 3.0;

/// Sides differ by a sixteenth of the resolution between buckets, so that there are few sizes.
const STEPS: u32 = 16;

/// Returns the size for an image of this width and height at a resolution, which is the side of a square.
pub fn bucket([width, height]: [u32; 2], resolution: u32) -> Bucket {
    let ratio = (f64::from(width) / f64::from(height)).clamp(1.0 / MAX_RATIO, MAX_RATIO);
    // All are powers of two.
    let units = FAMILIES.iter().map(|family| family.latent.pixels_per_token() as u32);
    let unit = units.max().unwrap_or(1);
    let step = (resolution / STEPS).next_multiple_of(unit).max(unit);
    let side = |exact: f64| ((exact / f64::from(step)).round() as u32).max(1) * step;
    let resolution = f64::from(resolution);
    [side(resolution * ratio.sqrt()), side(resolution / ratio.sqrt())]
}

/// Scales an image with Lanczos until it covers the bucket, and cuts off what is beyond, equally on both sides.
pub(crate) fn fit(image: &RgbImage, [width, height]: Bucket) -> RgbImage {
    let scale = |to: u32, from: u32| f64::from(to) / f64::from(from);
    let factor = scale(width, image.width()).max(scale(height, image.height()));
    let scaled = |side: u32, at_least: u32| ((f64::from(side) * factor).round() as u32).max(at_least);
    let (to_width, to_height) = (scaled(image.width(), width), scaled(image.height(), height));
    let image = resize(image, to_width, to_height, Filter::Lanczos);
    image.crop(i64::from((to_width - width) / 2), i64::from((to_height - height) / 2), width, height)
}

/// Mirrors an image, left to right.
pub(crate) fn flip(image: &RgbImage) -> RgbImage {
    let mut flipped = image.clone();
    for y in 0..image.height() {
        let (from, to) = (image.row(y).as_chunks::<3>().0, flipped.row_mut(y).as_chunks_mut::<3>().0);
        to.iter_mut().zip(from.iter().rev()).for_each(|(to, from)| *to = *from);
    }
    flipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_keep_the_shape_and_about_the_area() {
        assert_eq!(bucket([3000, 3000], 1024), [1024, 1024]);
        assert_eq!(bucket([1920, 1080], 1024), [1344, 768]);
        assert_eq!(bucket([1080, 1920], 512), [384, 672]);
        assert_eq!(bucket([640, 480], 256), [288, 224]);
        for (width, height) in [(100, 900), (900, 100), (733, 512), (512, 733), (1000, 997)] {
            for resolution in [256u32, 512, 768, 1024] {
                let [w, h] = bucket([width, height], resolution);
                let area = f64::from(w * h) / f64::from(resolution * resolution);
                assert!((0.9..1.1).contains(&area) && w % 16 == 0 && h % 16 == 0, "{w}x{h} at {resolution}");
            }
        }
    }

    #[test]
    fn an_image_is_cut_to_its_bucket_around_the_centre() {
        // Black, with a white stripe in the middle that remains, and red edges that don't.
        let pixel = |x: u32| if x == 0 || x == 7 { [255, 0, 0] } else { [255; 3] };
        let pixels = (0..4).flat_map(|_| (0..8).flat_map(pixel)).collect();
        let image = RgbImage::new(8, 4, pixels).unwrap();
        let square = fit(&image, [4, 4]);
        assert_eq!((square.width(), square.height()), (4, 4));
        assert_eq!(square.pixels(), [255; 48]);
    }

    #[test]
    fn flipping_twice_is_the_image_itself() {
        let image = RgbImage::new(3, 1, vec![1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
        assert_eq!(flip(&image).pixels(), [7, 8, 9, 4, 5, 6, 1, 2, 3]);
        assert_eq!(flip(&flip(&image)), image);
    }
}
