//! Where an image file comes from: its credentials, its AI mark and its watermark.

use std::path::Path;

use kiln_credentials::{Report, Trust, verify};
use kiln_engine::{FoundWatermark, read_watermark};
use kiln_image::{FoundAiMark, read_ai_mark};
use serde::Serialize;

use crate::error::{Error, Result};

/// What an image file tells of its origin.
#[derive(Clone, Debug, Serialize)]
pub struct FileOrigin {
    /// The signed statement (C2PA).
    #[serde(flatten)]
    pub credentials: Report,
    /// What its metadata say, which anybody may have written.
    pub ai_mark: Option<MarkOrigin>,
    /// What its pixels say.
    pub watermark: Option<WatermarkOrigin>,
    /// Whether its pixels can be decoded, and so were looked at.
    #[serde(skip)]
    pub is_decoded: bool,
}

/// The AI mark of a file: IPTC's properties.
#[derive(Clone, Debug, Serialize)]
pub struct MarkOrigin {
    /// IPTC's term, such as `trainedAlgorithmicMedia`.
    pub source: String,
    /// Whether a model made the image, or a part of it.
    pub is_ai: bool,
    /// The program or model.
    pub system: Option<String>,
    /// Its version.
    pub version: Option<String>,
    /// All of it in a line.
    #[serde(skip)]
    pub summary: String,
}

/// The invisible watermark of a file.
#[derive(Clone, Debug, Serialize)]
pub struct WatermarkOrigin {
    /// Its bits, as hexadecimal digits: 8 for those of Kiln.
    pub bits: String,
    /// Whose they are, such as `Kiln`, if they are known. Up to three of Kiln's may be wrong.
    pub owner: Option<&'static str>,
    /// How sure its reader is: above 4, or above 0.75 for those of other programs.
    pub certainty: f32,
    /// All of it in a line.
    #[serde(skip)]
    pub summary: String,
}

impl FileOrigin {
    /// Checks a file, which errors call `name`. Credentials of an image that can't be decoded are checked nevertheless.
    pub fn of(name: &str, file: Vec<u8>, trust: &Trust) -> Result<FileOrigin> {
        let ai_mark = match read_ai_mark(&file) {
            Ok(found) => found.map(MarkOrigin::from),
            // A packet that is damaged says nothing.
            Err(kiln_image::Error::Text { .. }) => None,
            Err(error) => return Err(Error::engine(error.named(name))),
        };
        let image = kiln_image::from_bytes(name, &file).ok();
        let is_decoded = image.is_some();
        let watermark =
            image.map(|image| read_watermark(&image)).transpose().map_err(Error::engine)?.flatten();
        Ok(FileOrigin {
            ai_mark,
            watermark: watermark.map(WatermarkOrigin::from),
            is_decoded,
            credentials: verify(file, trust),
        })
    }

    /// That of a file that can't be read.
    pub fn unreadable() -> FileOrigin {
        let credentials = Report::not_checked("kiln.unreadable", "the file can't be read");
        FileOrigin { credentials, ai_mark: None, watermark: None, is_decoded: false }
    }

    /// Reads a file and checks it.
    pub fn of_file(path: &Path, trust: &Trust) -> Result<FileOrigin> {
        let file = kiln_engine::read_image_bytes(path).map_err(Error::engine)?;
        FileOrigin::of(&path.display().to_string(), file, trust)
    }

    /// The AI mark in a line.
    pub fn mark_summary(&self) -> &str {
        self.ai_mark.as_ref().map_or("none", |mark| &mark.summary)
    }

    /// The watermark in a line.
    pub fn watermark_summary(&self) -> &str {
        let without = if self.is_decoded { "none" } else { "not checked" };
        self.watermark.as_ref().map_or(without, |found| &found.summary)
    }
}

impl From<FoundAiMark> for MarkOrigin {
    fn from(mark: FoundAiMark) -> MarkOrigin {
        MarkOrigin {
            summary: mark.summary(),
            is_ai: mark.is_ai(),
            source: mark.source,
            system: mark.system,
            version: mark.version,
        }
    }
}

impl From<FoundWatermark> for WatermarkOrigin {
    fn from(found: FoundWatermark) -> WatermarkOrigin {
        WatermarkOrigin {
            bits: found.bits(),
            owner: found.owner(),
            certainty: found.certainty(),
            summary: found.summary(),
        }
    }
}
