//! Where previews appear: a place on the terminal that each new image of a run replaces.

use std::io::{IsTerminal, Write};

use kiln_image::{Filter, RgbImage, resize};

use super::{Drawing, detect, draw, erase};
use crate::args::PreviewArg;
use crate::terminal;

/// More pixels than a terminal shows of a preview.
const MAX_SIDE: u32 = 2048;

/// The terminal that shows the image in progress.
pub struct Screen {
    protocol: PreviewArg,
    terminal: Terminal,
    /// Rows of the preview that the next one replaces.
    shown: Option<u32>,
}

#[derive(Clone, Copy)]
enum Terminal {
    Stdout,
    Stderr,
}

impl Screen {
    /// Chooses the terminal: standard output unless it is taken, else standard error. `None` if that is a pipe or a file,
    /// or shows no images.
    pub fn open(protocol: PreviewArg, stdout_taken: bool) -> Option<Screen> {
        let terminal = if !stdout_taken && std::io::stdout().is_terminal() {
            Terminal::Stdout
        } else if std::io::stderr().is_terminal() {
            Terminal::Stderr
        } else {
            return None;
        };
        let protocol = if protocol == PreviewArg::Auto { detect()? } else { protocol };
        Some(Screen { protocol, terminal, shown: None })
    }

    /// Shows an unfinished image, as large as the image will be, in place of the preview before it. `lines` have been
    /// printed since. Returns whether it was drawn below them instead.
    pub fn preview(&mut self, image: &RgbImage, [width, height]: [u32; 2], lines: u32) -> bool {
        let longest = width.max(height).max(1);
        let side =
            |side: u32| (u64::from(side) * u64::from(longest.min(MAX_SIDE)) / u64::from(longest)) as u32;
        let image = resize(image, side(width), side(height), Filter::Bilinear);
        let Some(drawing) = draw(&image, self.protocol) else { return false };
        let is_new = self.write(&drawing, lines);
        self.shown = drawing.rows;
        is_new
    }

    /// Shows a finished image, which stays. As [`Screen::preview`].
    pub fn finish(&mut self, image: &RgbImage, lines: u32) -> bool {
        let Some(drawing) = draw(image, self.protocol) else { return false };
        let is_new = self.write(&drawing, lines);
        self.shown = None;
        is_new
    }

    fn write(&self, drawing: &Drawing, lines: u32) -> bool {
        // Only what is still on the screen can be replaced.
        let above =
            self.shown.filter(|rows| drawing.rows == Some(*rows) && rows + lines < terminal::size().1);
        let text = match above {
            Some(rows) => {
                let up = rows + lines;
                let down = if lines > 0 { format!("\x1b[{lines}B") } else { String::new() };
                format!("\r\x1b[{up}A{}{}{down}\r", erase(self.protocol), drawing.text)
            }
            None => drawing.text.clone(),
        };
        // A closed terminal is not an error.
        let _ = match self.terminal {
            Terminal::Stdout => write(&mut std::io::stdout().lock(), &text),
            Terminal::Stderr => write(&mut std::io::stderr().lock(), &text),
        };
        above.is_none()
    }
}

fn write(out: &mut dyn Write, text: &str) -> std::io::Result<()> {
    out.write_all(text.as_bytes())?;
    out.flush()
}
