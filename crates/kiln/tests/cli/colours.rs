//! What a picture of one thing on one colour shows: its background, its object, and their hues.

use kiln_image::Picture;

type Pixel = [u8; 3];

fn pixels(picture: &Picture) -> impl Iterator<Item = Pixel> {
    picture.pixels().chunks_exact(3).map(|p| [p[0], p[1], p[2]])
}

/// The middle value of the outermost rows, channel by channel.
pub fn background(picture: &Picture) -> Pixel {
    let (width, height) = (picture.width() as usize, picture.height() as usize);
    let edge = |i: &usize| i / width < 8 || i / width >= height - 8;
    let border: Vec<Pixel> = pixels(picture).enumerate().filter(|(i, _)| edge(i)).map(|(_, p)| p).collect();
    [0, 1, 2].map(|c| {
        let mut values: Vec<u8> = border.iter().map(|p| p[c]).collect();
        values.sort_unstable();
        values[values.len() / 2]
    })
}

fn apart(a: Pixel, b: Pixel) -> u8 {
    a.iter().zip(b).map(|(a, b)| a.abs_diff(b)).max().unwrap_or(0)
}

/// Far enough from the background to be no shade of it.
const OBJECT: u8 = 60;

/// The pixels that are not background.
pub fn object(picture: &Picture) -> Vec<Pixel> {
    let ground = background(picture);
    pixels(picture).filter(|p| apart(*p, ground) > OBJECT).collect()
}

/// How much of the object of `before` has about the same colour in `after`.
pub fn same(before: &Picture, after: &Picture) -> f64 {
    const ABOUT: u8 = 48;
    let ground = background(before);
    let pairs: Vec<_> =
        pixels(before).zip(pixels(after)).filter(|(p, _)| apart(*p, ground) > OBJECT).collect();
    pairs.iter().filter(|(a, b)| apart(*a, *b) < ABOUT).count() as f64 / pairs.len().max(1) as f64
}

/// Degrees on the colour circle; `None` for what is nearly grey or black.
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

/// The strongest hue of a picture, in a window of 55 degrees; `None` if hardly anything has a colour.
pub fn dominant_hue(picture: &Picture) -> Option<f64> {
    let mut histogram = [0.0; 72];
    for pixel in pixels(picture) {
        if let Some(hue) = hue_of(pixel) {
            let [top, low] = [pixel.iter().max(), pixel.iter().min()].map(|v| f64::from(*v.unwrap()));
            histogram[(hue / 5.0) as usize % 72] += (top - low) / top;
        }
    }
    let around = |i: usize| -> f64 { (0..11).map(|k| histogram[(i + 67 + k) % 72]).sum() };
    let best = (0..72).max_by(|a, b| around(*a).total_cmp(&around(*b))).unwrap();
    (histogram.iter().sum::<f64>() >= 10.0).then_some(5.0 * best as f64 + 2.5)
}

/// Box average to `side` × `side`, which must divide the picture.
pub fn shrink(picture: &Picture, side: u32) -> Picture {
    let (width, step) = (picture.width(), picture.width() / side);
    assert_eq!((step * side, picture.height()), (width, width));
    let mut sums = vec![0u32; (3 * side * side) as usize];
    for (i, pixel) in (0..).zip(pixels(picture)) {
        let at = 3 * (i / width / step * side + i % width / step) as usize;
        (0..3).for_each(|c| sums[at + c] += u32::from(pixel[c]));
    }
    let mean = |sum: &u32| ((sum + step * step / 2) / (step * step)) as u8;
    Picture::new(side, side, sums.iter().map(mean).collect()).unwrap()
}
