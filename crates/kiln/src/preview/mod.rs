//! Draws an image in the terminal: kitty's protocol, iTerm2's, sixel, or half blocks in 24-bit colour.

mod blocks;
mod inline;
mod screen;
mod sixel;

use kiln_image::{Filter, RgbImage, resize};

use crate::args::PreviewArg;
use crate::terminal;
pub use screen::Screen;

/// Lines of the terminal that an image leaves free, for progress bars and the shell.
const FREE_LINES: u32 = 6;
/// Pixels that a cell of a terminal has, about: no terminal tells.
const CELL: [u32; 2] = [8, 16];

/// An image as terminal sequences.
struct Drawing {
    text: String,
    /// Lines that it takes, if the protocol tells.
    rows: Option<u32>,
}

/// Detects the terminal's protocol from environment variables; `None` for a terminal that shows no images.
///
/// A query to the terminal would be more reliable, but its answer may come late and end up in the user's next command.
pub fn detect() -> Option<PreviewArg> {
    detect_from(|name| std::env::var(name).unwrap_or_default())
}

fn detect_from(var: impl Fn(&str) -> String) -> Option<PreviewArg> {
    let (term, program) = (var("TERM"), var("TERM_PROGRAM"));
    // Such as a shell in Emacs: it prints escape sequences.
    if term == "dumb" || !terminal::has_escapes() {
        return None;
    }
    // macOS's terminal shows 24-bit colours as others, up to the version that says otherwise.
    if program == "Apple_Terminal" && var("COLORTERM").is_empty() {
        return None;
    }
    // Multiplexers drop sequences they don't know.
    if !var("TMUX").is_empty() || term.starts_with("screen") || term.starts_with("tmux") {
        return Some(PreviewArg::Blocks);
    }
    Some(match (term.as_str(), program.as_str()) {
        _ if !var("KITTY_WINDOW_ID").is_empty() => PreviewArg::Kitty,
        ("xterm-kitty" | "xterm-ghostty", _) | (_, "ghostty") => PreviewArg::Kitty,
        (_, "iTerm.app" | "WezTerm" | "mintty") => PreviewArg::Iterm2,
        // Over SSH, where `TERM_PROGRAM` does not arrive.
        _ if var("LC_TERMINAL") == "iTerm2" => PreviewArg::Iterm2,
        _ if !var("KONSOLE_VERSION").is_empty() => PreviewArg::Kitty,
        ("mlterm" | "yaft-256color" | "contour", _) => PreviewArg::Sixel,
        (name, _) if name.starts_with("foot") || name.contains("sixel") => PreviewArg::Sixel,
        _ => PreviewArg::Blocks,
    })
}

fn draw(image: &RgbImage, protocol: PreviewArg) -> Option<Drawing> {
    let (columns, rows) = cells(image);
    let text = match protocol {
        PreviewArg::Kitty => inline::kitty(&png(image)?, columns, rows),
        PreviewArg::Iterm2 => inline::iterm2(&png(image)?, columns, rows),
        PreviewArg::Sixel => {
            return Some(Drawing { text: sixel::draw(&fit(image, 800, 600)), rows: None });
        }
        PreviewArg::Blocks | PreviewArg::Auto => {
            let (columns, rows) = drawing_area();
            let image = fit(image, columns, 2 * rows);
            let rows = Some(image.height().div_ceil(2));
            return Some(Drawing { text: blocks::draw(&image), rows });
        }
    };
    Some(Drawing { text, rows: Some(rows) })
}

/// Returns what removes an image before another is drawn in its place.
fn erase(protocol: PreviewArg) -> &'static str {
    if protocol == PreviewArg::Kitty { inline::KITTY_ERASE } else { "" }
}

/// Returns the columns and rows that an image takes: about its size, at most the drawing area.
fn cells(image: &RgbImage) -> (u32, u32) {
    let (columns, rows) = drawing_area();
    let area = fit(image, columns * CELL[0], rows * CELL[1]);
    (area.width().div_ceil(CELL[0]), area.height().div_ceil(CELL[1]))
}

/// Returns the columns and rows to draw in.
fn drawing_area() -> (u32, u32) {
    let (columns, rows) = terminal::size();
    (columns.max(2), rows.saturating_sub(FREE_LINES).max(2))
}

fn png(image: &RgbImage) -> Option<Vec<u8>> {
    kiln_image::encode(image, kiln_image::Format::Png, None).ok()
}

/// Scales an image down to fit.
fn fit(image: &RgbImage, width: u32, height: u32) -> RgbImage {
    let scale =
        (f64::from(width) / f64::from(image.width())).min(f64::from(height) / f64::from(image.height()));
    if scale >= 1.0 {
        return image.clone();
    }
    let side = |n: u32| ((f64::from(n) * scale) as u32).max(1);
    resize(image, side(image.width()), side(image.height()), Filter::Lanczos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradient(width: u32, height: u32) -> RgbImage {
        let pixel = |i: u32| [(i % width * 255 / width) as u8, (i / width * 255 / height) as u8, 128];
        RgbImage::new(width, height, (0..width * height).flat_map(pixel).collect()).unwrap()
    }

    #[test]
    fn the_protocol_is_detected_from_environment_variables() {
        let detect = |set: &[(&str, &str)]| {
            detect_from(|name| {
                set.iter().find(|(n, _)| *n == name).map_or(String::new(), |(_, v)| (*v).into())
            })
        };
        assert_eq!(detect(&[]), Some(PreviewArg::Blocks));
        assert_eq!(detect(&[("TERM", "xterm-kitty")]), Some(PreviewArg::Kitty));
        assert_eq!(detect(&[("TERM_PROGRAM", "iTerm.app")]), Some(PreviewArg::Iterm2));
        assert_eq!(detect(&[("TERM", "xterm"), ("LC_TERMINAL", "iTerm2")]), Some(PreviewArg::Iterm2));
        assert_eq!(detect(&[("TERM", "foot")]), Some(PreviewArg::Sixel));
        assert_eq!(detect(&[("TERM_PROGRAM", "Apple_Terminal")]), None);
        let newer = [("TERM_PROGRAM", "Apple_Terminal"), ("COLORTERM", "truecolor")];
        assert_eq!(detect(&newer), Some(PreviewArg::Blocks));
        assert_eq!(detect(&[("TERM", "foot"), ("TMUX", "/tmp/x")]), Some(PreviewArg::Blocks));
        assert_eq!(detect(&[("TERM", "dumb")]), None, "it would print the sequences");
    }

    #[test]
    fn an_image_is_scaled_to_fit_but_never_enlarged() {
        let image = gradient(64, 32);
        assert_eq!(fit(&image, 100, 100), image);
        let small = fit(&image, 16, 100);
        assert_eq!((small.width(), small.height()), (16, 8));
        assert_eq!(fit(&gradient(300, 1), 10, 10).height(), 1);
    }

    #[test]
    fn every_protocol_draws() {
        let image = gradient(20, 14);
        let starts = [
            (PreviewArg::Kitty, "\x1b_G"),
            (PreviewArg::Iterm2, "\x1b]1337;File="),
            (PreviewArg::Sixel, "\x1bP"),
            (PreviewArg::Blocks, "\x1b[38;2;"),
        ];
        for (protocol, start) in starts {
            let drawing = draw(&image, protocol).unwrap();
            assert!(drawing.text.starts_with(start), "{protocol:?}");
            assert_eq!(drawing.rows.is_none(), protocol == PreviewArg::Sixel);
        }
        assert_eq!(draw(&image, PreviewArg::Blocks).unwrap().rows, Some(7));
        assert_eq!(draw(&image, PreviewArg::Kitty).unwrap().rows, Some(1));
    }
}
