//! Colour analysis of images that show one object on a plain background.

use kiln_image::RgbImage;

type Pixel = [u8; 3];

fn pixels(image: &RgbImage) -> impl Iterator<Item = Pixel> {
    image.pixels().chunks_exact(3).map(|p| [p[0], p[1], p[2]])
}

/// The median of the outermost rows, per channel.
pub fn background(image: &RgbImage) -> Pixel {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let edge = |i: &usize| i / width < 8 || i / width >= height - 8;
    let border: Vec<Pixel> = pixels(image).enumerate().filter(|(i, _)| edge(i)).map(|(_, p)| p).collect();
    [0, 1, 2].map(|c| {
        let mut values: Vec<u8> = border.iter().map(|p| p[c]).collect();
        values.sort_unstable();
        values[values.len() / 2]
    })
}

fn apart(a: Pixel, b: Pixel) -> u8 {
    a.iter().zip(b).map(|(a, b)| a.abs_diff(b)).max().unwrap_or(0)
}

/// Distance from the background above which a pixel belongs to the object.
const OBJECT: u8 = 60;

/// The pixels that are not background.
pub fn object(image: &RgbImage) -> Vec<Pixel> {
    let ground = background(image);
    pixels(image).filter(|p| apart(*p, ground) > OBJECT).collect()
}

/// The share of the object's pixels in `before` that have about the same colour in `after`.
pub fn unchanged_share(before: &RgbImage, after: &RgbImage) -> f64 {
    const ABOUT: u8 = 48;
    let ground = background(before);
    let pairs: Vec<_> =
        pixels(before).zip(pixels(after)).filter(|(p, _)| apart(*p, ground) > OBJECT).collect();
    pairs.iter().filter(|(a, b)| apart(*a, *b) < ABOUT).count() as f64 / pairs.len().max(1) as f64
}

/// The hue in degrees; `None` for nearly grey or black pixels.
pub fn hue_of(pixel: Pixel) -> Option<f64> {
    let [r, g, b] = pixel.map(f64::from);
    let (top, low) = (r.max(g).max(b), r.min(g).min(b));
    if top < 51.0 || top - low < 0.25 * top {
        return None;
    }
    let chroma = top - low;
    let sixth = match top {
        _ if top == r => ((g - b) / chroma).rem_euclid(6.0),
        _ if top == g => (b - r) / chroma + 2.0,
        _ => (r - g) / chroma + 4.0,
    };
    Some(60.0 * sixth)
}

pub fn red(pixel: Pixel) -> bool {
    hue_of(pixel).is_some_and(|hue| !(25.0..330.0).contains(&hue))
}

/// The strongest hue of an image, in a window of 55 degrees; `None` if hardly any pixel is coloured.
pub fn dominant_hue(image: &RgbImage) -> Option<f64> {
    let mut histogram = [0.0; 72];
    for pixel in pixels(image) {
        if let Some(hue) = hue_of(pixel) {
            let [top, low] = [pixel.iter().max(), pixel.iter().min()].map(|v| f64::from(*v.unwrap()));
            histogram[(hue / 5.0) as usize % 72] += (top - low) / top;
        }
    }
    let around = |i: usize| -> f64 { (0..11).map(|k| histogram[(i + 67 + k) % 72]).sum() };
    let best = (0..72).max_by(|a, b| around(*a).total_cmp(&around(*b))).unwrap();
    (histogram.iter().sum::<f64>() >= 10.0).then_some(5.0 * best as f64 + 2.5)
}

/// Averages boxes down to `side` × `side`, which must divide the image's size.
pub fn shrink(image: &RgbImage, side: u32) -> RgbImage {
    let (width, step) = (image.width(), image.width() / side);
    assert_eq!((step * side, image.height()), (width, width));
    let mut sums = vec![0u32; (3 * side * side) as usize];
    for (i, pixel) in (0..).zip(pixels(image)) {
        let at = 3 * (i / width / step * side + i % width / step) as usize;
        (0..3).for_each(|c| sums[at + c] += u32::from(pixel[c]));
    }
    let mean = |sum: &u32| ((sum + step * step / 2) / (step * step)) as u8;
    RgbImage::new(side, side, sums.iter().map(mean).collect()).unwrap()
}
