//! Input images of requests: decoded once, stored under the hash of their file.

use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_engine::{FileRef, FoundWatermark, Request};
use kiln_image::{Format, GrayImage, RgbImage};

use crate::jobs::Jobs;
use crate::jobs::caller::Caller;
use crate::jobs::decode_budget::DecodePermit;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::generator::{InputImage, InputSource, name};
use crate::jobs::intake::Intake;
use crate::jobs::store::{Claim, FileKind, INPUT_PREFIX, ImageRow, InputFiles, StoreError};

/// Prefixes of generated images in a request: the one that is documented, and its earlier name.
const GENERATED_PREFIXES: [&str; 2] = ["image:", "picture:"];

/// The id of a generated image that a request names.
fn generated(source: &str) -> Option<&str> {
    GENERATED_PREFIXES.iter().find_map(|prefix| source.strip_prefix(prefix))
}

impl Intake {
    /// Checks a request and stores the images it brings. Blocks while they are decoded.
    pub(crate) fn accept_request(&self, mut request: Request, caller: &Caller) -> Result<Request, JobError> {
        let alias = |model: &std::path::PathBuf| {
            let known = self.config.model_aliases.iter().find(|(alias, _)| alias == name(model));
            known.map(|(_, model)| model.into())
        };
        if let Some(model) = request.model.as_ref().and_then(alias) {
            request.model = Some(model);
        }
        self.config.limits.check(&request, self.catalogue.as_ref())?;
        let mut pixels = 0;
        for file in &mut request.references {
            pixels += self.store_input_image(file, "reference", caller)?;
        }
        for (file, role) in [(&mut request.init, "init"), (&mut request.mask, "mask")] {
            if let Some(file) = file {
                pixels += self.store_input_image(file, role, caller)?;
            }
        }
        let limit = self.config.limits.job_pixels;
        if pixels > limit {
            let message = format!("the input images have {pixels} pixels together, the limit is {limit}");
            return Err(JobError::new(ErrorCode::ImageTooLarge, message));
        }
        // The last of them may have pushed out the first.
        if request.images().any(|file| self.input_file(name(&file.path)).is_none()) {
            let message = "the images of the request are more than what is kept for you";
            return Err(JobError::new(ErrorCode::InputsFull, message));
        }
        self.prepare_upscale(&mut request)?;
        Ok(request)
    }

    /// Checks the size of an upscaled image; takes its prompt from its recipe if the request has none.
    fn prepare_upscale(&self, request: &mut Request) -> Result<(), JobError> {
        let (Some(scale), Some(init)) = (request.upscale, &request.init) else { return Ok(()) };
        let input = name(&init.path);
        self.config.limits.check_upscaled_pixels(scale, self.input_pixels(input, "init")?)?;
        if request.prompts.is_empty() {
            let bytes = self.input_file(input).and_then(|path| std::fs::read(path).ok());
            let recipe = bytes.and_then(|bytes| kiln_image::read_recipe(&bytes).ok()?);
            let recipe = recipe.and_then(|recipe| serde_json::from_str::<serde_json::Value>(&recipe).ok());
            let prompt = recipe.as_ref().and_then(|recipe| recipe["prompt"].as_str());
            let fits = |prompt: &&str| prompt.len() <= self.config.limits.prompt;
            request.prompts = prompt.filter(fits).map(str::to_owned).into_iter().collect();
        }
        Ok(())
    }

    /// Stores an image of a request and replaces it with its input name; returns its number of pixels.
    pub(crate) fn store_input_image(
        &self,
        file: &mut FileRef,
        role: &str,
        caller: &Caller,
    ) -> Result<u64, JobError> {
        let source = name(&file.path);
        let missing =
            |what: &str| JobError::not_found(ErrorCode::InputNotFound, &format!("{role}: {what}"), source);
        let input = if source.starts_with(INPUT_PREFIX) {
            let path = self.input_path(source, caller)?;
            path.ok_or_else(|| missing("input"))?;
            self.keeping.touch_input(source, &caller.client)?;
            source.to_owned()
        } else if let Some(id) = generated(source) {
            let row = self.image(id, caller)?.ok_or_else(|| missing("image"))?;
            let path = self.files.path(FileKind::Image, &row.file)?;
            let bytes = path.and_then(|path| std::fs::read(path).ok()).ok_or_else(|| missing("image"))?;
            self.store_input(&bytes, role, caller)?
        } else {
            self.store_input(&decode(source, role)?, role, caller)?
        };
        let pixels = self.input_pixels(&input, role)?;
        *file = input.into();
        Ok(pixels)
    }

    /// Stores an image file under its hash and returns its input name; fails if it is not an image.
    pub(crate) fn store_input(&self, bytes: &[u8], role: &str, caller: &Caller) -> Result<String, JobError> {
        let input = InputFiles::name(bytes);
        // A cached image was checked when it arrived.
        if self.decoded.get(&input).is_none() {
            let _memory = self.reserve_decoding(bytes, role)?;
            let image = kiln_image::from_bytes(role, bytes)?;
            self.metrics.input_decoded();
            self.decoded.insert(&input, Arc::new(image));
        }
        self.keep_input(&input, bytes, caller)?;
        Ok(input)
    }

    /// Stores a mask and returns its input name. Transparent areas mark what to change, as in OpenAI's API; in a mask
    /// without transparency, white areas do.
    pub(crate) fn store_mask(&self, bytes: &[u8], caller: &Caller) -> Result<String, JobError> {
        self.store_mask_of(bytes, caller, |_, transparency| Ok(transparency))
    }

    /// Stores a mask as A1111's clients send it and returns its input name: white areas are regenerated, or if it is
    /// `invert`ed black ones. Of a mask with transparency, the opaque areas count as white.
    pub(crate) fn store_painted_mask(
        &self,
        source: &str,
        invert: bool,
        caller: &Caller,
    ) -> Result<String, JobError> {
        if source.starts_with(INPUT_PREFIX) && !invert {
            return Ok(source.to_owned());
        }
        self.store_mask_of(&decode(source, "mask")?, caller, |image, transparency| {
            let negative = |mask: &GrayImage| {
                let pixels = mask.pixels().iter().map(|value| 255 - value).collect();
                GrayImage::new(mask.width(), mask.height(), pixels)
            };
            Ok(match (transparency, invert) {
                (None, false) => None,
                (None, true) => Some(negative(&GrayImage::from(image))?),
                (Some(transparency), false) => Some(negative(&transparency)?),
                (Some(transparency), true) => Some(transparency),
            })
        })
    }

    /// Stores the mask that `make` makes of a file's image and transparency, white where the image changes; `None` stores
    /// the file as it is.
    fn store_mask_of(
        &self,
        bytes: &[u8],
        caller: &Caller,
        make: impl FnOnce(&RgbImage, Option<GrayImage>) -> Result<Option<GrayImage>, JobError>,
    ) -> Result<String, JobError> {
        // Also for the mask that is made of it.
        let _memory = self.reserve_decoding(bytes, "mask")?;
        let (image, transparency) = kiln_image::from_bytes_with_mask("mask", bytes)?;
        self.metrics.input_decoded();
        let Some(mask) = make(&image, transparency)? else { return self.store_decoded(bytes, image, caller) };
        let pixels = mask.pixels().iter().flat_map(|value| [*value; 3]).collect();
        let mask = RgbImage::new(mask.width(), mask.height(), pixels)?;
        let png = kiln_image::encode(&mask, Format::Png, None)?;
        self.store_decoded(&png, mask, caller)
    }

    /// Stores the file of a decoded image and returns its input name.
    fn store_decoded(&self, bytes: &[u8], image: RgbImage, caller: &Caller) -> Result<String, JobError> {
        let input = InputFiles::name(bytes);
        self.decoded.insert(&input, Arc::new(image));
        self.keep_input(&input, bytes, caller)?;
        Ok(input)
    }

    /// [`Intake::store_mask`] for a data URL or base64; an input name is returned as it is.
    pub(crate) fn store_mask_source(&self, source: String, caller: &Caller) -> Result<String, JobError> {
        if source.starts_with(INPUT_PREFIX) || generated(&source).is_some() {
            Ok(source)
        } else {
            self.store_mask(&decode(&source, "mask")?, caller)
        }
    }

    /// Writes the file of an input, within what the caller may keep.
    fn keep_input(&self, input: &str, bytes: &[u8], caller: &Caller) -> Result<(), JobError> {
        let size = bytes.len() as u64;
        let quota = caller.quotas.inputs.unwrap_or(self.config.limits.inputs);
        match self.keeping.claim_input(input, &caller.client, size, quota)? {
            Claim::Granted { evicted } => evicted.iter().for_each(|input| self.decoded.remove(input)),
            Claim::QuotaFull => {
                let message = format!(
                    "the image has {size} bytes; beside the images of your unfinished jobs there is no room for it \
                     within {quota} bytes"
                );
                return Err(JobError::new(ErrorCode::InputsFull, message));
            }
        }
        Ok(self.files.put(FileKind::Input, InputFiles::hash(input), bytes)?)
    }

    /// The file of an input that the caller may use.
    pub(crate) fn input_path(&self, input: &str, caller: &Caller) -> Result<Option<PathBuf>, StoreError> {
        let inputs = self.store.inputs();
        let Some(path) = self.input_file(input) else { return Ok(None) };
        Ok(Some(path)
            .filter(|_| caller.admin || inputs.is_claimed_by(input, &caller.client).unwrap_or(false)))
    }

    /// A generated image that the caller may see.
    pub(crate) fn image(&self, id: &str, caller: &Caller) -> Result<Option<ImageRow>, StoreError> {
        let Some(row) = self.store.image(id)? else { return Ok(None) };
        let visible =
            caller.admin || self.store.client_of(&row.job)?.is_some_and(|client| caller.sees(&client));
        Ok(visible.then_some(row))
    }

    /// Reads the watermark of an image of anybody's, if it may be decoded.
    pub(crate) fn read_watermark(&self, bytes: &[u8]) -> Result<Option<FoundWatermark>, JobError> {
        let _memory = self.reserve_decoding(bytes, "image")?;
        let image = kiln_image::from_bytes("image", bytes)?;
        kiln_engine::read_watermark(&image).map_err(|error| JobError::of_file(&error))
    }

    /// Checks the size of an image and reserves the memory for decoding it.
    fn reserve_decoding(&self, bytes: &[u8], role: &str) -> Result<DecodePermit<'_>, JobError> {
        let (width, height) = kiln_image::dimensions(role, bytes)?;
        let limits = &self.config.limits;
        let too_large = |limit: String| {
            let message = format!("{role} is {width}x{height}, which exceeds the limit of {limit}");
            Err(JobError::new(ErrorCode::ImageTooLarge, message))
        };
        if u64::from(width) * u64::from(height) > limits.input_pixels {
            return too_large(format!("{} pixels", limits.input_pixels));
        }
        let memory = kiln_image::decoding_bytes(role, bytes)?;
        if memory > limits.decoding {
            return too_large(format!(
                "{} MiB for decoding: it needs {} MiB for its pixels and what lies beside them",
                limits.decoding >> 20,
                memory >> 20
            ));
        }
        self.decode_budget.reserve(memory).map_err(|_| {
            JobError::new(ErrorCode::Busy, "too many large images are being decoded; try again later")
        })
    }
}

impl Jobs {
    /// The number of pixels of a stored input, from the decoded image or the header of its file.
    pub(crate) fn input_pixels(&self, input: &str, role: &str) -> Result<u64, JobError> {
        let size = match self.decoded.get(input) {
            Some(image) => (image.width(), image.height()),
            None => {
                let bytes = self.input_file(input).and_then(|path| std::fs::read(path).ok());
                let bytes = bytes.ok_or_else(|| gone(input))?;
                kiln_image::dimensions(role, &bytes)?
            }
        };
        Ok(u64::from(size.0) * u64::from(size.1))
    }

    /// The file of an input, if there is one.
    pub(crate) fn input_file(&self, input: &str) -> Option<PathBuf> {
        let file = self.files.path(FileKind::Input, InputFiles::hash(input));
        file.inspect_err(|error| tracing::warn!(%error, input, "can't read an input")).ok().flatten()
    }
}

impl InputSource for Jobs {
    /// Returns an input image, from the cache or decoded from its file.
    fn input_image(&self, input: &str) -> Result<InputImage, JobError> {
        let path = self.files.path(FileKind::Input, InputFiles::hash(input))?;
        let path = path.ok_or_else(|| gone(input))?;
        let image = match self.decoded.get(input) {
            Some(image) => image,
            None => {
                let bytes = std::fs::read(&path).map_err(|_| gone(input))?;
                let memory = kiln_image::decoding_bytes(input, &bytes)?;
                let _memory = self.decode_budget.reserve_patiently(memory);
                let image = Arc::new(kiln_image::from_bytes(input, &bytes)?);
                self.metrics.input_decoded();
                self.decoded.insert(input, Arc::clone(&image));
                image
            }
        };
        let sha256 = input.strip_prefix(INPUT_PREFIX).unwrap_or(input).to_owned();
        Ok(InputImage { image, path, sha256 })
    }

    fn check_size(&self, width: u32, height: u32) -> Result<(), JobError> {
        self.config.limits.check_size(width, height)
    }
}

fn gone(input: &str) -> JobError {
    JobError::new(ErrorCode::InputNotFound, format!("the image `{input}` no longer exists"))
}

/// Decodes a data URL or base64.
pub(crate) fn decode(source: &str, role: &str) -> Result<Vec<u8>, JobError> {
    let invalid = |what: &str| JobError::new(ErrorCode::InvalidImage, format!("{role}: {what}"));
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
