//! Half blocks in 24-bit colour.

use std::fmt::Write;

use kiln_image::RgbImage;

/// Draws two rows of pixels per line: the upper one as the foreground of `▀`, the lower one as its background.
pub(super) fn draw(image: &RgbImage) -> String {
    let mut out = String::new();
    for y in (0..image.height()).step_by(2) {
        let upper = image.row(y).chunks_exact(3);
        let lower = (y + 1 < image.height()).then(|| image.row(y + 1));
        for (x, above) in upper.enumerate() {
            // Writing to a string does not fail.
            let _ = write!(out, "\x1b[38;2;{};{};{}m", above[0], above[1], above[2]);
            if let Some(below) = lower.map(|row| &row[3 * x..][..3]) {
                let _ = write!(out, "\x1b[48;2;{};{};{}m", below[0], below[1], below[2]);
            }
            out.push('▀');
        }
        out.push_str("\x1b[0m\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_odd_last_row_has_nothing_below_it() {
        let image = RgbImage::new(1, 3, vec![1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
        assert_eq!(draw(&image), "\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m▀\x1b[0m\n\x1b[38;2;7;8;9m▀\x1b[0m\n");
    }
}
