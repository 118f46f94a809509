//! Sixel: a palette, then bands of six rows, one colour at a time.

use std::fmt::Write;

use color_quant::NeuQuant;
use kiln_image::RgbImage;

const COLOURS: usize = 256;

pub(super) fn draw(image: &RgbImage) -> String {
    let rgba: Vec<u8> = image.pixels().chunks_exact(3).flat_map(|p| [p[0], p[1], p[2], 255]).collect();
    // Every tenth pixel is enough to find the palette.
    let palette = NeuQuant::new(10, COLOURS, &rgba);
    let indices: Vec<usize> = rgba.chunks_exact(4).map(|pixel| palette.index_of(pixel)).collect();

    let (width, height) = (image.width() as usize, image.height() as usize);
    // Pixels are square (1;1), and undrawn ones stay as they are (P2 = 1).
    let mut out = format!("\x1bP0;1q\"1;1;{width};{height}");
    for (i, colour) in palette.color_map_rgb().chunks_exact(3).enumerate() {
        let [r, g, b] = [colour[0], colour[1], colour[2]].map(|v| u32::from(v) * 100 / 255);
        let _ = write!(out, "#{i};2;{r};{g};{b}");
    }
    for top in (0..height).step_by(6) {
        band(&mut out, &indices[top * width..width * height.min(top + 6)], width);
    }
    out.push_str("\x1b\\\n");
    out
}

/// Writes a band: a line of bit patterns per colour, `$` to return to its start, `-` for the next band.
fn band(out: &mut String, indices: &[usize], width: usize) {
    let mut patterns = vec![None; COLOURS];
    for (row, line) in indices.chunks_exact(width).enumerate() {
        for (x, &colour) in line.iter().enumerate() {
            patterns[colour].get_or_insert_with(|| vec![0u8; width])[x] |= 1 << row;
        }
    }
    for (colour, pattern) in patterns.iter().enumerate() {
        if let Some(pattern) = pattern {
            let _ = write!(out, "#{colour}");
            for run in pattern.chunk_by(|a, b| a == b) {
                let sixel = char::from(b'?' + run[0]);
                match run.len() {
                    // A repeat count would not be shorter.
                    1..=3 => out.extend(std::iter::repeat_n(sixel, run.len())),
                    n => drop(write!(out, "!{n}{sixel}")),
                }
            }
            out.push('$');
        }
    }
    out.push('-');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_band_lists_each_colour_with_its_runs() {
        let mut out = String::new();
        // Two rows of five: colour 1 above, below it colour 2 after two of colour 1.
        band(&mut out, &[1, 1, 1, 1, 1, 1, 1, 2, 2, 2], 5);
        assert_eq!(out, "#1BB@@@$#2??AAA$-");
    }

    #[test]
    fn long_runs_are_counted() {
        let mut out = String::new();
        band(&mut out, &[0; 9], 9);
        assert_eq!(out, "#0!9@$-");
    }
}
