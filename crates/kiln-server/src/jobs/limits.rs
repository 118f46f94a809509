//! Limits on requests, and the check of a request against them.

use kiln_engine::{Field, LoraRef, Request, check_range, check_request, text};

use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::generator::{Catalogue, name};

/// Limits on requests and connections.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum bytes of an HTTP request body.
    pub body: usize,
    /// Maximum bytes of all large request bodies in memory; one client gets half of it.
    pub bodies: usize,
    /// Maximum bytes of all small request bodies in memory; one client gets half of it.
    pub small_bodies: usize,
    /// Least speed of a request body, in bytes per second.
    pub body_speed: usize,
    /// Maximum pixels of an uploaded image.
    pub input_pixels: u64,
    /// Maximum pixels of all input images of a job.
    pub job_pixels: u64,
    /// Maximum bytes of memory that decoding one image may take.
    pub decoding: u64,
    /// Maximum bytes of memory for decoding, all images at one time.
    pub all_decoding: u64,
    /// Maximum input images of a job: references, initial image and mask.
    pub references: usize,
    /// Maximum bytes of a prompt.
    pub prompt: usize,
    /// Maximum of `max_tokens`, the length a prompt is padded to.
    pub tokens: u32,
    /// Maximum number of steps.
    pub steps: u32,
    /// Maximum width and height in pixels.
    pub side: u32,
    /// Maximum pixels of a generated image.
    pub pixels: u64,
    /// Maximum pixels of an upscaled image.
    pub upscaled_pixels: u64,
    /// Maximum images of one job.
    pub images: u32,
    /// Maximum LoRAs of one job.
    pub loras: usize,
    /// Maximum number of queued jobs.
    pub queue: usize,
    /// Maximum bytes of the input images that are kept for one client.
    pub inputs: u64,
    /// Maximum number of open connections.
    pub connections: usize,
    /// Maximum number of open connections from one address; proxies that the configuration names have no such limit.
    pub connections_per_address: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body: 64 << 20,
            bodies: 256 << 20,
            small_bodies: 16 << 20,
            body_speed: 16 << 10,
            input_pixels: 64 << 20,
            job_pixels: 160 << 20,
            decoding: 768 << 20,
            all_decoding: 1 << 30,
            references: 10,
            prompt: 8000,
            tokens: 1024,
            steps: 200,
            side: 4096,
            pixels: 4 << 20,
            upscaled_pixels: 16 << 20,
            images: 10,
            loras: 8,
            queue: 64,
            inputs: 4 << 30,
            connections: 512,
            connections_per_address: 256,
        }
    }
}

/// The factors that images can be upscaled by.
pub(crate) const UPSCALE_FACTORS: [u32; 2] = [2, 4];
/// Largest weight of a LoRA, largest guidance and largest exponent of a schedule.
const MAX_FACTOR: f32 = 100.0;

impl Limits {
    /// Checks the values and names of a request. Its input images are checked when they are read.
    pub fn check(&self, request: &Request, catalogue: &dyn Catalogue) -> Result<(), JobError> {
        self.check_texts(request)?;
        let check = || {
            check_request(request)?;
            check_range(Field::Steps, request.steps, 1..=self.steps)?;
            check_range(Field::Width, request.width, 16..=self.side)?;
            check_range(Field::Height, request.height, 16..=self.side)?;
            check_range(Field::MaxTokens, request.max_tokens, 1..=self.tokens)?;
            check_range(Field::MaskPadding, request.mask_padding, 0..=self.side)?;
            check_range(Field::Guidance, request.guidance, 0.0..=MAX_FACTOR)?;
            check_range(Field::Rho, request.rho, 0.01..=MAX_FACTOR)
        };
        check().map_err(|error| JobError::explained(&error))?;
        if let (Some(width), Some(height)) = (request.width, request.height) {
            self.check_size(width, height)?;
        }
        let counts = [
            (Field::Sigmas, request.sigmas.len(), self.steps as usize, "values"),
            (Field::References, request.images().count(), self.references, "input images"),
            (Field::Loras, request.loras.len(), self.loras, "LoRAs"),
        ];
        if let Some((field, count, max, what)) = counts.into_iter().find(|(_, count, max, _)| count > max) {
            return Err(JobError::value(text![field, format!(": found {count} {what}, the limit is {max}")]));
        }
        self.check_names(request, catalogue)
    }

    /// Checks the size of an image to generate.
    pub(crate) fn check_size(&self, width: u32, height: u32) -> Result<(), JobError> {
        let (side, pixels) = (self.side, self.pixels);
        if u64::from(width) * u64::from(height) <= pixels && width.max(height) <= side {
            return Ok(());
        }
        let message =
            format!("size {width}x{height} is too large: the limit is {pixels} pixels, {side} a side");
        Err(JobError::new(ErrorCode::InvalidValue, message).param("size"))
    }

    /// Checks the texts, the number of images, and that the request names no files of the server.
    pub(crate) fn check_texts(&self, request: &Request) -> Result<(), JobError> {
        let texts = [
            (Field::Prompt, &request.prompts),
            (Field::NegativePrompt, &request.negative_prompts),
            (Field::OriginalPrompt, &request.original_prompts),
        ];
        for (field, texts) in texts {
            if let Some(bytes) = texts.iter().map(String::len).find(|bytes| *bytes > self.prompt) {
                let message = format!("{} has {bytes} bytes, the limit is {}", field.name(), self.prompt);
                return Err(JobError::new(ErrorCode::PromptTooLong, message).param(field.name()));
            }
        }
        if request.prompts.iter().any(|prompt| prompt.trim().is_empty()) {
            return Err(JobError::value(text![Field::Prompt, " is empty"]));
        }
        let (originals, prompts) = (request.original_prompts.len(), request.prompts.len());
        if originals != 0 && originals != prompts {
            let counts = format!(" for {}", kiln_base::plural(prompts, "prompt"));
            return Err(JobError::value(text![
                format!("found {originals} values of "),
                Field::OriginalPrompt,
                counts
            ]));
        }
        if let Some(name) = request.local_field() {
            let message = format!("{name} is not supported over HTTP: it needs files on the server");
            return Err(JobError::new(ErrorCode::InvalidValue, message).param(name));
        }
        let max = self.images;
        check_range(Field::N, request.n, 1..=max).map_err(|error| JobError::explained(&error))?;
        match request.image_count() {
            count if count > max as usize => {
                let counts = format!(": the request asks for {count} images, the limit is {max}");
                Err(JobError::value(text![Field::N, counts]))
            }
            _ => Ok(()),
        }
    }

    /// Refuses to upscale an image of so many pixels to more than allowed.
    pub(crate) fn check_upscaled_pixels(&self, scale: u32, pixels: u64) -> Result<(), JobError> {
        let (pixels, max) = (pixels.saturating_mul(u64::from(scale).pow(2)), self.upscaled_pixels);
        if pixels <= max {
            return Ok(());
        }
        let message = format!("upscaled by {scale} the image has {pixels} pixels, the limit is {max}");
        Err(JobError::new(ErrorCode::ImageTooLarge, message).param("upscale"))
    }

    /// Checks that a model is in the catalogue, or an alias of one.
    pub(crate) fn check_model(
        &self,
        model: &str,
        catalogue: &dyn Catalogue,
        aliases: &[(String, String)],
    ) -> Result<(), JobError> {
        let models = catalogue.models().into_iter().map(|model| model.name);
        let aliases = aliases.iter().map(|(alias, _)| alias.clone());
        check_known(
            "model",
            "model",
            ErrorCode::ModelNotFound,
            model,
            &models.chain(aliases).collect::<Vec<_>>(),
        )
    }

    /// Checks that models, VAEs and LoRAs are in the catalogue. So a name can't lead out of a folder.
    fn check_names(&self, request: &Request, catalogue: &dyn Catalogue) -> Result<(), JobError> {
        if let Some(model) = &request.model {
            let models = catalogue.models().into_iter().map(|model| model.name).collect::<Vec<_>>();
            check_known("model", "model", ErrorCode::ModelNotFound, name(model), &models)?;
        }
        if let Some(vae) = &request.vae {
            check_known("vae", "VAE", ErrorCode::VaeNotFound, name(&vae.path), &catalogue.vaes())?;
        }
        if request.loras.is_empty() {
            return Ok(());
        }
        let loras = catalogue.loras();
        for LoraRef { path, weight, .. } in &request.loras {
            check_known("loras", "LoRA", ErrorCode::LoraNotFound, name(path), &loras)?;
            if weight.abs() > MAX_FACTOR {
                let name = name(path);
                let range =
                    format!(": the weight of `{name}` must be between -{MAX_FACTOR} and {MAX_FACTOR}");
                return Err(JobError::value(text![Field::Loras, range]));
            }
        }
        Ok(())
    }
}

fn check_known(
    param: &'static str,
    what: &str,
    code: ErrorCode,
    name: &str,
    known: &[String],
) -> Result<(), JobError> {
    if known.iter().any(|known| known == name) {
        return Ok(());
    }
    let available = if known.is_empty() { "none".into() } else { known.join(", ") };
    let mut error = JobError::not_found(code, what, name).param(param);
    error.message += &format!("; available: {available}");
    Err(error)
}

#[cfg(test)]
mod tests {
    use kiln_engine::ScheduleKind;

    use super::*;
    use crate::jobs::generator::ModelInfo;

    struct TestCatalogue;

    impl Catalogue for TestCatalogue {
        fn models(&self) -> Vec<ModelInfo> {
            vec![ModelInfo {
                name: "ember".into(),
                default: true,
                size: 256,
                unit: 16,
                sides: None,
                steps: 4,
                guidance: None,
                negative: false,
                rewrites: false,
            }]
        }

        fn loras(&self) -> Vec<String> {
            vec!["ink".into()]
        }

        fn vaes(&self) -> Vec<String> {
            vec!["taef2".into()]
        }
    }

    fn fox() -> Request {
        Request::new("a fox")
    }

    fn prompts(n: usize) -> Request {
        Request { prompts: vec!["a".into(); n], ..Request::default() }
    }

    fn check(request: &Request) -> Option<(&'static str, String)> {
        Limits::default().check(request, &TestCatalogue).err().map(|error| (error.code.name(), error.message))
    }

    #[test]
    fn errors_name_the_value_that_is_out_of_range() {
        let invalid = [
            ("prompt", Request::new("   ")),
            ("prompt", Request { prompts: vec!["a".into(), String::new()], ..fox() }),
            ("negative_prompt", Request { negative_prompts: vec!["a".into(); 2], ..prompts(3) }),
            ("\"n\" must", Request { n: Some(0), ..fox() }),
            ("\"n\" must", Request { n: Some(11), ..fox() }),
            ("images", Request { n: Some(4), ..prompts(3) }),
            ("images", prompts(11)),
            ("images", Request { seed: (0..11).collect(), ..fox() }),
            ("seed", Request { seed: vec![1, 2], n: Some(3), ..fox() }),
            ("seed", Request { seed: vec![1, 2, 3], ..prompts(2) }),
            ("seed", Request { seed: vec![1, 2], ..prompts(3) }),
            ("steps", Request { steps: Some(201), ..fox() }),
            ("width", Request { width: Some(15), ..fox() }),
            ("too large", Request { width: Some(4096), height: Some(4096), ..fox() }),
            ("max_tokens", Request { max_tokens: Some(0), ..fox() }),
            ("max_tokens", Request { max_tokens: Some(1025), ..fox() }),
            ("guidance", Request { guidance: Some(f32::NAN), ..fox() }),
            ("cache", Request { cache: Some(f32::NAN), ..fox() }),
            ("cache", Request { cache: Some(1.5), ..fox() }),
            ("sigmas", Request { sigmas: vec![0.5; 201], ..fox() }),
            ("sigmas", Request { sigmas: vec![1.0, f32::NAN], ..fox() }),
            ("sigmas", Request { sigmas: vec![1.5], ..fox() }),
            ("rho", Request { rho: Some(0.0), schedule: Some(ScheduleKind::Power), ..fox() }),
            ("rho", Request { rho: Some(f32::NAN), schedule: Some(ScheduleKind::Power), ..fox() }),
            ("rho", Request { rho: Some(2.0), ..fox() }),
            ("strength", Request { strength: Some(0.5), ..fox() }),
            ("strength", Request { init: Some("a".into()), strength: Some(1.5), ..fox() }),
            ("mask_padding", Request { init: Some("a".into()), mask_padding: Some(8), ..fox() }),
            ("input images", Request { references: vec!["a".into(); 11], ..fox() }),
            ("\"upscale\" must", Request { init: Some("a".into()), upscale: Some(3), ..fox() }),
            ("needs \"init\"", Request { upscale: Some(2), ..fox() }),
            ("combined", Request { init: Some("a".into()), upscale: Some(2), width: Some(64), ..fox() }),
            ("strength", Request { init: Some("a".into()), upscale: Some(2), strength: Some(0.0), ..fox() }),
            ("tile_size", Request { tile_size: Some(256), ..fox() }),
            ("embeds", Request { embeds: Some("/etc/passwd".into()), ..fox() }),
            ("noise", Request { noise: Some("/etc/passwd".into()), ..fox() }),
            ("lora_partial", Request { lora_partial: true, ..fox() }),
            ("weight", Request { loras: vec![lora("ink", f32::INFINITY)], ..fox() }),
        ];
        for (word, request) in invalid {
            let (code, message) = check(&request).unwrap_or_else(|| panic!("{request:?}"));
            assert_eq!(code, "invalid_value", "{message}");
            assert!(message.contains(word), "{message}");
        }
        assert_eq!(check(&Request::new("a".repeat(8001))).unwrap().0, "prompt_too_long");
        assert_eq!(
            check(&Request::default()).unwrap(),
            (
                "invalid_value",
                "\"prompt\" is missing; describe the image: \"prompt\": \"a red apple on a blue background\""
                    .into()
            )
        );
    }

    #[test]
    fn lists_of_prompts_seeds_and_sigmas_are_accepted() {
        let valid = [
            fox(),
            Request { negative_prompts: vec!["a".into()], ..prompts(3) },
            Request { negative_prompts: vec!["a".into(); 3], ..prompts(3) },
            Request { n: Some(3), seed: (0..9).collect(), ..prompts(3) },
            Request { seed: (0..4).collect(), ..prompts(2) },
            Request { seed: vec![u64::MAX], n: Some(10), ..fox() },
            Request { sigmas: vec![1.0, 0.75, 0.5, 0.25], max_tokens: Some(1024), ..fox() },
            Request { rho: Some(2.0), schedule: Some(ScheduleKind::Power), ..fox() },
            Request { vae: Some("taef2".into()), ..fox() },
            Request { init: Some("a".into()), upscale: Some(4), tile_size: Some(256), ..Request::default() },
        ];
        for request in valid {
            assert_eq!(check(&request), None, "{request:?}");
        }
    }

    fn lora(name: &str, weight: f32) -> LoraRef {
        LoraRef { path: name.into(), weight, sha256: None }
    }

    #[test]
    fn names_outside_the_catalogue_are_rejected() {
        let code = |request| check(&request).map(|(code, _)| code);
        for name in ["../ember", "/etc/passwd", "ember/", "./ember", "EMBER", "", "ember\0", "C:\\ember"] {
            let request = Request { model: Some(name.into()), ..fox() };
            assert_eq!(code(request), Some("model_not_found"));
            let vae = if name.is_empty() { "invalid_value" } else { "vae_not_found" };
            assert_eq!(code(Request { vae: Some(name.into()), ..fox() }), Some(vae));
            let loras = vec![lora(name, 1.0)];
            assert_eq!(code(Request { loras, ..fox() }), Some("lora_not_found"));
        }
        for name in ["ink/", "./ink"] {
            let loras = vec![lora(name, 1.0)];
            assert_eq!(code(Request { loras, ..fox() }), Some("lora_not_found"));
        }
        assert_eq!(code(Request { model: Some("ember".into()), ..fox() }), None);
    }
}
