//! A picture in the terminal: kitty's protocol, iTerm2's, sixel, or half blocks in 24-bit colour.

mod blocks;
mod inline;
mod sixel;

use std::io::Write;

use kiln_image::{Filter, Picture, resize};

use crate::args::PreviewArg;

/// Shows a picture on standard output or standard error. A terminal that went away is no reason to fail.
pub fn show(picture: &Picture, how: PreviewArg, on_stdout: bool) {
    let Some(text) = draw(picture, if how == PreviewArg::Auto { guess() } else { how }) else { return };
    let _ = match on_stdout {
        true => std::io::stdout().lock().write_all(text.as_bytes()),
        false => std::io::stderr().lock().write_all(text.as_bytes()),
    };
}

/// What the terminal understands, from what it says of itself in the environment.
///
/// Asking it would be surer, but an answer may come late or not at all, and would end up in the user's next command.
pub fn guess() -> PreviewArg {
    guess_from(|name| std::env::var(name).unwrap_or_default())
}

fn guess_from(var: impl Fn(&str) -> String) -> PreviewArg {
    let (term, program) = (var("TERM"), var("TERM_PROGRAM"));
    // Multiplexers swallow what they don't know.
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

fn draw(picture: &Picture, how: PreviewArg) -> Option<String> {
    Some(match how {
        PreviewArg::Kitty => inline::kitty(&png(picture)?),
        PreviewArg::Iterm2 => inline::iterm2(&png(picture)?),
        PreviewArg::Sixel => sixel::draw(&within(picture, 800, 600)),
        PreviewArg::Blocks | PreviewArg::Auto => {
            let (columns, rows) = terminal();
            blocks::draw(&within(picture, columns, 2 * rows))
        }
    })
}

/// Columns and rows to draw in: all but the line of the prompt.
fn terminal() -> (u32, u32) {
    let size = terminal_size::terminal_size().map(|(columns, rows)| (columns.0, rows.0));
    let (columns, rows) = size.unwrap_or((80, 25));
    (u32::from(columns.max(2)), u32::from(rows.max(3) - 1))
}

fn png(picture: &Picture) -> Option<Vec<u8>> {
    kiln_image::encode(picture, kiln_image::Format::Png, None).ok()
}

/// The picture, or a smaller copy that fits.
fn within(picture: &Picture, width: u32, height: u32) -> Picture {
    let scale =
        (f64::from(width) / f64::from(picture.width())).min(f64::from(height) / f64::from(picture.height()));
    if scale >= 1.0 {
        return picture.clone();
    }
    let side = |n: u32| ((f64::from(n) * scale) as u32).max(1);
    resize(picture, side(picture.width()), side(picture.height()), Filter::Lanczos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradient(width: u32, height: u32) -> Picture {
        let pixel = |i: u32| [(i % width * 255 / width) as u8, (i / width * 255 / height) as u8, 128];
        Picture::new(width, height, (0..width * height).flat_map(pixel).collect()).unwrap()
    }

    #[test]
    fn the_terminal_is_guessed_from_its_variables() {
        let guess = |set: &[(&str, &str)]| {
            guess_from(|name| {
                set.iter().find(|(n, _)| *n == name).map_or(String::new(), |(_, v)| (*v).into())
            })
        };
        assert_eq!(guess(&[]), PreviewArg::Blocks);
        assert_eq!(guess(&[("TERM", "xterm-kitty")]), PreviewArg::Kitty);
        assert_eq!(guess(&[("TERM_PROGRAM", "iTerm.app")]), PreviewArg::Iterm2);
        assert_eq!(guess(&[("TERM", "foot")]), PreviewArg::Sixel);
        assert_eq!(guess(&[("TERM", "foot"), ("TMUX", "/tmp/x")]), PreviewArg::Blocks);
    }

    #[test]
    fn a_picture_is_made_to_fit_and_never_enlarged() {
        let picture = gradient(64, 32);
        assert_eq!(within(&picture, 100, 100), picture);
        let small = within(&picture, 16, 100);
        assert_eq!((small.width(), small.height()), (16, 8));
        assert_eq!(within(&gradient(300, 1), 10, 10).height(), 1);
    }

    #[test]
    fn every_way_of_drawing_draws() {
        let picture = gradient(20, 14);
        let starts = [
            (PreviewArg::Kitty, "\x1b_G"),
            (PreviewArg::Iterm2, "\x1b]1337;File="),
            (PreviewArg::Sixel, "\x1bP"),
            (PreviewArg::Blocks, "\x1b[38;2;"),
        ];
        for (how, start) in starts {
            assert!(draw(&picture, how).unwrap().starts_with(start), "{how:?}");
        }
    }
}
