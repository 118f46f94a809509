use std::fmt::Write;

use kiln_image::Picture;

/// Two rows of pixels a line: the upper one in the colour of `▀`, the lower one behind it.
pub(super) fn draw(picture: &Picture) -> String {
    let mut out = String::new();
    for y in (0..picture.height()).step_by(2) {
        let upper = picture.row(y).chunks_exact(3);
        let lower = (y + 1 < picture.height()).then(|| picture.row(y + 1));
        for (x, above) in upper.enumerate() {
            // Writing to a string can't fail.
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
        let picture = Picture::new(1, 3, vec![1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
        assert_eq!(draw(&picture), "\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m▀\x1b[0m\n\x1b[38;2;7;8;9m▀\x1b[0m\n");
    }
}
