//! Shows an image in the terminal: kitty's protocol, iTerm2's, sixel, or half blocks in 24-bit colour.

mod blocks;
mod inline;
mod sixel;

use std::io::Write;

use kiln_image::{Filter, RgbImage, resize};

use crate::args::PreviewArg;

/// Shows an image on standard output or standard error. A closed terminal is not an error.
pub fn show(image: &RgbImage, protocol: PreviewArg, on_stdout: bool) {
    let protocol = if protocol == PreviewArg::Auto { detect() } else { protocol };
    let Some(text) = draw(image, protocol) else { return };
    let _ = if on_stdout {
        std::io::stdout().lock().write_all(text.as_bytes())
    } else {
        std::io::stderr().lock().write_all(text.as_bytes())
    };
}

/// Detects the terminal's protocol from environment variables.
///
/// A query to the terminal would be more reliable, but its answer may come late and end up in the user's next command.
pub fn detect() -> PreviewArg {
    detect_from(|name| std::env::var(name).unwrap_or_default())
}

fn detect_from(var: impl Fn(&str) -> String) -> PreviewArg {
    let (term, program) = (var("TERM"), var("TERM_PROGRAM"));
    // Multiplexers drop sequences they don't know.
    if !var("TMUX").is_empty() || term.starts_with("screen") || term.starts_with("tmux") {
        return PreviewArg::Blocks;
    }
    match (term.as_str(), program.as_str()) {
        _ if !var("KITTY_WINDOW_ID").is_empty() => PreviewArg::Kitty,
        ("xterm-kitty" | "xterm-ghostty", _) | (_, "ghostty") => PreviewArg::Kitty,
        (_, "iTerm.app" | "WezTerm" | "mintty") => PreviewArg::Iterm2,
        _ if !var("KONSOLE_VERSION").is_empty() => PreviewArg::Kitty,
        ("mlterm" | "yaft-256color" | "contour", _) => PreviewArg::Sixel,
        (name, _) if name.starts_with("foot") || name.contains("sixel") => PreviewArg::Sixel,
        _ => PreviewArg::Blocks,
    }
}

fn draw(image: &RgbImage, protocol: PreviewArg) -> Option<String> {
    Some(match protocol {
        PreviewArg::Kitty => inline::kitty(&png(image)?),
        PreviewArg::Iterm2 => inline::iterm2(&png(image)?),
        PreviewArg::Sixel => sixel::draw(&fit(image, 800, 600)),
        PreviewArg::Blocks | PreviewArg::Auto => {
            let (columns, rows) = drawing_area();
            blocks::draw(&fit(image, columns, 2 * rows))
        }
    })
}

/// Returns the columns and rows to draw in: all but the shell prompt's line.
fn drawing_area() -> (u32, u32) {
    let size = terminal_size::terminal_size().map(|(columns, rows)| (columns.0, rows.0));
    let (columns, rows) = size.unwrap_or((80, 25));
    (u32::from(columns.max(2)), u32::from(rows.max(3) - 1))
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
        assert_eq!(detect(&[]), PreviewArg::Blocks);
        assert_eq!(detect(&[("TERM", "xterm-kitty")]), PreviewArg::Kitty);
        assert_eq!(detect(&[("TERM_PROGRAM", "iTerm.app")]), PreviewArg::Iterm2);
        assert_eq!(detect(&[("TERM", "foot")]), PreviewArg::Sixel);
        assert_eq!(detect(&[("TERM", "foot"), ("TMUX", "/tmp/x")]), PreviewArg::Blocks);
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
            assert!(draw(&image, protocol).unwrap().starts_with(start), "{protocol:?}");
        }
    }
}
