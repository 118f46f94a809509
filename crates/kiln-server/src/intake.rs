//! Images that come with a request: decoded once, kept by their content.

use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_engine::{FileRef, Request};
use kiln_image::{Format, GrayPicture, Picture};

use crate::Server;
use crate::generator::{InputImage, JobError, name};
use crate::store::{Inputs, StoreError};

const INPUT: &str = "input:";
const OWN: &str = "picture:";

impl Server {
    /// Checks a request, and keeps the images that it brings. Takes as long as decoding them does.
    pub(crate) fn take_in(&self, mut request: Request) -> Result<Request, JobError> {
        self.config.limits.check(&request, self.catalogue.as_ref())?;
        for file in &mut request.references {
            self.take_in_image(file, "reference")?;
        }
        for (file, role) in [(&mut request.init, "init"), (&mut request.mask, "mask")] {
            if let Some(file) = file {
                self.take_in_image(file, role)?;
            }
        }
        Ok(request)
    }

    /// Replaces an image in a request by the input that it is.
    fn take_in_image(&self, file: &mut FileRef, role: &str) -> Result<(), JobError> {
        let source = name(&file.path);
        let missing =
            |what: &str| JobError::request("input_not_found", format!("{role}: there is no such {what}"));
        let input = if source.starts_with(INPUT) {
            let known = self.store.inputs().path(source).is_some();
            known.then(|| source.to_owned()).ok_or_else(|| missing("input"))?
        } else if let Some(id) = source.strip_prefix(OWN) {
            let row = self.store.picture(id).map_err(storage)?.ok_or_else(|| missing("picture"))?;
            let bytes = std::fs::read(self.store.picture_path(&row.file)).map_err(|_| missing("picture"))?;
            self.keep_input(&bytes, role)?
        } else {
            self.keep_input(&decode(source, role)?, role)?
        };
        *file = input.into();
        Ok(())
    }

    /// Keeps an image file, if it is one.
    pub(crate) fn keep_input(&self, bytes: &[u8], role: &str) -> Result<String, JobError> {
        let input = Inputs::name(bytes);
        // What is there was checked when it came.
        if self.decoded.get(&input).is_none() {
            self.check_pixels(bytes, role)?;
            let picture = kiln_image::from_bytes(role, bytes).map_err(unreadable)?;
            self.metrics.decoded();
            self.decoded.keep(&input, Arc::new(picture));
        }
        self.store.inputs().keep(&input, bytes).map_err(storage)?;
        Ok(input)
    }

    /// Keeps a mask in OpenAI's form, transparent where to change; one without such places is white where to change.
    pub(crate) fn keep_mask(&self, bytes: &[u8]) -> Result<String, JobError> {
        self.check_pixels(bytes, "mask")?;
        let (picture, transparency) = kiln_image::with_transparency("mask", bytes).map_err(unreadable)?;
        self.metrics.decoded();
        let (picture, png) = match transparency {
            None => (picture, None),
            Some(mask) => {
                let mask = gray(&mask)?;
                let png = kiln_image::encode(&mask, Format::Png, None).map_err(unreadable)?;
                (mask, Some(png))
            }
        };
        let bytes = png.as_deref().unwrap_or(bytes);
        let input = Inputs::name(bytes);
        self.decoded.keep(&input, Arc::new(picture));
        self.store.inputs().keep(&input, bytes).map_err(storage)?;
        Ok(input)
    }

    /// [`Server::keep_mask`] of a data URL or base64; a name stays as it is.
    pub(crate) fn keep_mask_source(&self, source: String) -> Result<String, JobError> {
        match source.starts_with(INPUT) || source.starts_with(OWN) {
            true => Ok(source),
            false => self.keep_mask(&decode(&source, "mask")?),
        }
    }

    fn check_pixels(&self, bytes: &[u8], role: &str) -> Result<(), JobError> {
        let (width, height) = kiln_image::dimensions(role, bytes).map_err(unreadable)?;
        let most = self.config.limits.input_pixels;
        if u64::from(width) * u64::from(height) > most {
            let message = format!("{role} has {width}x{height} pixels, at most {most} are read");
            return Err(JobError::request("picture_too_large", message));
        }
        Ok(())
    }

    /// An input with its pixels: those from when it came, or decoded from its file.
    pub(crate) fn input_image(&self, input: &str) -> Result<InputImage, JobError> {
        let gone = || JobError::request("input_not_found", format!("the image `{input}` is no longer there"));
        let path = self.store.inputs().path(input).ok_or_else(gone)?;
        let picture = match self.decoded.get(input) {
            Some(picture) => picture,
            None => {
                let picture = kiln_image::open(&path).map_err(unreadable)?;
                self.metrics.decoded();
                let picture = Arc::new(picture);
                self.decoded.keep(input, Arc::clone(&picture));
                picture
            }
        };
        let sha256 = input.strip_prefix(INPUT).unwrap_or(input).to_owned();
        Ok(InputImage { picture, path, sha256 })
    }
}

fn gray(mask: &GrayPicture) -> Result<Picture, JobError> {
    let pixels = mask.pixels().iter().flat_map(|value| [*value; 3]).collect();
    Picture::new(mask.width(), mask.height(), pixels).map_err(unreadable)
}

fn unreadable(error: kiln_image::Error) -> JobError {
    JobError::request("invalid_picture", error.to_string())
}

fn storage(error: StoreError) -> JobError {
    JobError::server("storage", error.to_string())
}

/// The bytes of a data URL or of base64.
fn decode(source: &str, role: &str) -> Result<Vec<u8>, JobError> {
    let wrong = |what: &str| JobError::request("invalid_picture", format!("{role}: {what}"));
    let text = match source.strip_prefix("data:") {
        Some(rest) => rest.split_once(";base64,").ok_or_else(|| wrong("a data URL must be base64"))?.1,
        None if source.starts_with("http:") || source.starts_with("https:") => {
            return Err(wrong("images are not fetched from elsewhere: send them as a data URL"));
        }
        None => source,
    };
    let text: std::borrow::Cow<'_, str> = if text.contains(char::is_whitespace) {
        text.split_whitespace().collect::<String>().into()
    } else {
        text.into()
    };
    BASE64_STANDARD.decode(text.as_bytes()).map_err(|error| wrong(&format!("not base64: {error}")))
}
