//! Input images of requests: decoded once, stored under the hash of their file.

use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_engine::{FileRef, Request};
use kiln_image::{Format, GrayImage, RgbImage};

use crate::Server;
use crate::generator::{InputImage, JobError, name};
use crate::store::{INPUT_PREFIX, InputFiles, StoreError};

/// Prefix of generated images in a request.
const GENERATED_PREFIX: &str = "picture:";

impl Server {
    /// Checks a request and stores the images it brings. Blocks while they are decoded.
    pub(crate) fn accept_request(&self, mut request: Request) -> Result<Request, JobError> {
        self.config.limits.check(&request, self.catalogue.as_ref())?;
        for file in &mut request.references {
            self.store_input_image(file, "reference")?;
        }
        for (file, role) in [(&mut request.init, "init"), (&mut request.mask, "mask")] {
            if let Some(file) = file {
                self.store_input_image(file, role)?;
            }
        }
        Ok(request)
    }

    /// Stores an image of a request and replaces it with its input name.
    fn store_input_image(&self, file: &mut FileRef, role: &str) -> Result<(), JobError> {
        let source = name(&file.path);
        let missing = |what: &str| {
            // The name comes from the client: limit its length.
            let name: String = source.chars().take(80).collect();
            JobError::request("input_not_found", format!("{role}: {what} `{name}` not found"))
        };
        let input = if source.starts_with(INPUT_PREFIX) {
            let exists = self.store.inputs().path(source).is_some();
            exists.then(|| source.to_owned()).ok_or_else(|| missing("input"))?
        } else if let Some(id) = source.strip_prefix(GENERATED_PREFIX) {
            let row = self.store.image(id).map_err(storage)?.ok_or_else(|| missing("image"))?;
            let bytes = std::fs::read(self.store.image_path(&row.file)).map_err(|_| missing("image"))?;
            self.store_input(&bytes, role)?
        } else {
            self.store_input(&decode(source, role)?, role)?
        };
        *file = input.into();
        Ok(())
    }

    /// Stores an image file under its hash and returns its input name; fails if it is not an image.
    pub(crate) fn store_input(&self, bytes: &[u8], role: &str) -> Result<String, JobError> {
        let input = InputFiles::name(bytes);
        // A cached image was checked when it arrived.
        if self.decoded.get(&input).is_none() {
            self.check_pixels(bytes, role)?;
            let image = kiln_image::from_bytes(role, bytes).map_err(unreadable)?;
            self.metrics.input_decoded();
            self.decoded.insert(&input, Arc::new(image));
        }
        self.store.inputs().insert(&input, bytes).map_err(storage)?;
        Ok(input)
    }

    /// Stores a mask and returns its input name. Transparent areas mark what to change, as in OpenAI's API; in a mask
    /// without transparency, white areas do.
    pub(crate) fn store_mask(&self, bytes: &[u8]) -> Result<String, JobError> {
        self.check_pixels(bytes, "mask")?;
        let (image, transparency) = kiln_image::from_bytes_with_mask("mask", bytes).map_err(unreadable)?;
        self.metrics.input_decoded();
        let (image, png) = match transparency {
            None => (image, None),
            Some(mask) => {
                let mask = gray_to_rgb(&mask)?;
                let png = kiln_image::encode(&mask, Format::Png, None).map_err(unreadable)?;
                (mask, Some(png))
            }
        };
        let bytes = png.as_deref().unwrap_or(bytes);
        let input = InputFiles::name(bytes);
        self.decoded.insert(&input, Arc::new(image));
        self.store.inputs().insert(&input, bytes).map_err(storage)?;
        Ok(input)
    }

    /// [`Server::store_mask`] for a data URL or base64; an input name is returned as it is.
    pub(crate) fn store_mask_source(&self, source: String) -> Result<String, JobError> {
        if source.starts_with(INPUT_PREFIX) || source.starts_with(GENERATED_PREFIX) {
            Ok(source)
        } else {
            self.store_mask(&decode(&source, "mask")?)
        }
    }

    fn check_pixels(&self, bytes: &[u8], role: &str) -> Result<(), JobError> {
        let (width, height) = kiln_image::dimensions(role, bytes).map_err(unreadable)?;
        let limit = self.config.limits.input_pixels;
        if u64::from(width) * u64::from(height) > limit {
            let message = format!("{role} is {width}x{height}, which exceeds the limit of {limit} pixels");
            return Err(JobError::request("picture_too_large", message));
        }
        Ok(())
    }

    /// Returns an input image, from the cache or decoded from its file.
    pub(crate) fn input_image(&self, input: &str) -> Result<InputImage, JobError> {
        let gone = || JobError::request("input_not_found", format!("the image `{input}` no longer exists"));
        let path = self.store.inputs().path(input).ok_or_else(gone)?;
        let image = match self.decoded.get(input) {
            Some(image) => image,
            None => {
                let image = Arc::new(kiln_image::open(&path).map_err(unreadable)?);
                self.metrics.input_decoded();
                self.decoded.insert(input, Arc::clone(&image));
                image
            }
        };
        let sha256 = input.strip_prefix(INPUT_PREFIX).unwrap_or(input).to_owned();
        Ok(InputImage { image, path, sha256 })
    }
}

fn gray_to_rgb(mask: &GrayImage) -> Result<RgbImage, JobError> {
    let pixels = mask.pixels().iter().flat_map(|value| [*value; 3]).collect();
    RgbImage::new(mask.width(), mask.height(), pixels).map_err(unreadable)
}

fn unreadable(error: kiln_image::Error) -> JobError {
    JobError::request("invalid_picture", error.to_string())
}

fn storage(error: StoreError) -> JobError {
    JobError::server("storage", error.to_string())
}

/// Decodes a data URL or base64.
fn decode(source: &str, role: &str) -> Result<Vec<u8>, JobError> {
    let invalid = |what: &str| JobError::request("invalid_picture", format!("{role}: {what}"));
    let text = match source.strip_prefix("data:") {
        Some(rest) => {
            rest.split_once(";base64,").ok_or_else(|| invalid("a data URL must be base64-encoded"))?.1
        }
        None if source.starts_with("http:") || source.starts_with("https:") => {
            return Err(invalid("images are not fetched from URLs; send a data URL or base64"));
        }
        None => source,
    };
    let text: std::borrow::Cow<'_, str> = if text.contains(char::is_whitespace) {
        text.split_whitespace().collect::<String>().into()
    } else {
        text.into()
    };
    BASE64_STANDARD.decode(text.as_bytes()).map_err(|error| invalid(&format!("invalid base64: {error}")))
}
