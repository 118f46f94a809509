//! Asks a program or an HTTP service of the user's whether a generated image may be shown.
//!
//! ```
//! use std::time::Duration;
//! use kiln_filters::ImageCheck;
//! use kiln_image::RgbImage;
//!
//! let image = RgbImage::new(1, 1, vec![255, 0, 0])?;
//! # #[cfg(unix)] {
//! let check = ImageCheck::new("grep -q never", Duration::from_secs(10))?;
//! let refusal = check.check(&image, "a red pixel", &|| false).unwrap_err();
//! assert!(refusal.is_verdict());
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A **program** gets the image as PNG on standard input and the prompt in the variable `KILN_PROMPT`, or,
//! if it has more than 32000 bytes, in the file that `KILN_PROMPT_FILE` names. Exit status 0 accepts the image, 1 refuses
//! it, with the first line of standard output as the reason. The command is split into words here; no shell sees it, and
//! the prompt is never an argument.
//!
//! A **service** gets a POST of `multipart/form-data` with the parts `image` (PNG) and `prompt`, and answers with status
//! 200 and `{"allow": true}` or `{"allow": false, "reason": "…"}`.
//!
//! Everything else refuses the image, too: another exit status, a signal, no answer in time, an answer of another form or
//! of more than 64 KiB. An image that is not checked is never shown.
#![forbid(unsafe_code)]

mod command;
mod service;

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kiln_base::printable_line;
use kiln_image::{Encoding, Format, RgbImage};

use command::CommandCheck;
use service::ServiceCheck;

/// The largest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 << 10;
/// The longest reason that is passed on, in characters.
const MAX_REASON: usize = 500;
/// How often a waiting check looks whether it is cancelled.
const POLL: Duration = Duration::from_millis(20);

/// A program or a service that accepts or refuses images.
#[derive(Clone, Debug)]
pub struct ImageCheck {
    target: Target,
    timeout: Duration,
}

#[derive(Clone, Debug)]
enum Target {
    Command(CommandCheck),
    Service(ServiceCheck),
}

/// An option that names no usable check.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct InvalidCheck {
    /// What is wrong.
    pub what: String,
    /// What to do about it.
    pub hint: &'static str,
}

/// Why an image may not be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The check refused the image, for this reason if it gave one.
    Refused(Option<String>),
    /// The check failed or gave no valid answer.
    Failed(String),
    /// The caller cancelled the check.
    Cancelled,
}

impl Refusal {
    /// Whether the check itself refused the image.
    pub fn is_verdict(&self) -> bool {
        matches!(self, Refusal::Refused(_))
    }

    /// Describes the refusal to whoever asked for the image. How a check failed is for the operator's log alone.
    pub fn message(&self) -> String {
        match self {
            Refusal::Refused(Some(reason)) => format!("the image was refused: {reason}"),
            Refusal::Refused(None) => "the image was refused".into(),
            Refusal::Failed(_) => "the image was refused: the check gave no valid answer".into(),
            Refusal::Cancelled => "cancelled".into(),
        }
    }
}

impl ImageCheck {
    /// Creates a check from an option: an `http://` or `https://` URL, or a command. It has `timeout` for each image.
    pub fn new(option: &str, timeout: Duration) -> Result<ImageCheck, InvalidCheck> {
        let is_url = ["http://", "https://"]
            .iter()
            .any(|scheme| option.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)));
        let target = if is_url {
            Target::Service(ServiceCheck::new(option)?)
        } else {
            Target::Command(CommandCheck::new(option)?)
        };
        Ok(ImageCheck { target, timeout })
    }

    /// Asks whether an image may be shown. Waits for the answer, at most as long as the timeout, and stops early when
    /// `cancelled` returns true.
    pub fn check(&self, image: &RgbImage, prompt: &str, cancelled: &dyn Fn() -> bool) -> Result<(), Refusal> {
        let encoding = Encoding { format: Format::Png, quality: None, small: false };
        let png = kiln_image::encode_with(image, encoding, None)
            .map_err(|error| Refusal::Failed(format!("can't encode the image: {error}")))?;
        let waiting = Waiting { deadline: Instant::now() + self.timeout, timeout: self.timeout, cancelled };
        match &self.target {
            Target::Command(command) => command.check(png, prompt, &waiting),
            Target::Service(service) => service.check(&png, prompt, &waiting),
        }
    }
}

/// How long a check may take, and whether it is cancelled.
struct Waiting<'a> {
    deadline: Instant,
    timeout: Duration,
    cancelled: &'a dyn Fn() -> bool,
}

impl Waiting<'_> {
    /// Fails if the time is over or the check is cancelled.
    fn proceed(&self) -> Result<(), Refusal> {
        if (self.cancelled)() {
            return Err(Refusal::Cancelled);
        }
        if Instant::now() >= self.deadline { Err(self.no_answer()) } else { Ok(()) }
    }

    fn no_answer(&self) -> Refusal {
        let seconds = self.timeout.as_secs_f32();
        Refusal::Failed(format!("the check gave no answer within {seconds} s"))
    }

    /// Waits for a message of another thread.
    fn receive<T>(&self, from: &Receiver<T>) -> Result<T, Refusal> {
        loop {
            match from.recv_timeout(POLL) {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Timeout) => self.proceed()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Refusal::Failed("the check's thread ended early".into()));
                }
            }
        }
    }
}

/// A reason as one short line of printable text; `None` if nothing is left of it.
fn reason(text: &str) -> Option<String> {
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    let line: String = line.chars().take(MAX_REASON).collect();
    Some(printable_line(&line).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_short_printable_line() {
        assert_eq!(reason(""), None);
        assert_eq!(reason(" \n\t\n"), None);
        assert_eq!(reason("\n nudity (0.97) \nmore"), Some("nudity (0.97)".into()));
        assert_eq!(reason(&"x".repeat(9000)).unwrap().len(), MAX_REASON);
        assert!(!reason("a\u{1b}[31mred").unwrap().contains('\u{1b}'));
    }

    #[test]
    fn how_a_check_failed_is_not_told_to_clients() {
        let failed = Refusal::Failed("`/opt/secret/check.py` exited with 7".into());
        assert!(!failed.message().contains("secret") && !failed.is_verdict());
        assert_eq!(Refusal::Refused(Some("too red".into())).message(), "the image was refused: too red");
    }
}
