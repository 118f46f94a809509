//! Limits on requests, and the check of a request against them.

use kiln_engine::{LoraRef, Request, ScheduleKind};

use crate::jobs::generator::{Catalogue, JobError, name};

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

fn invalid(param: &'static str, message: impl Into<String>) -> JobError {
    JobError::request("invalid_value", message).param(param)
}

impl Limits {
    /// Checks the values and names of a request. Its input images are checked when they are read.
    pub fn check(&self, request: &Request, catalogue: &dyn Catalogue) -> Result<(), JobError> {
        self.check_texts(request)?;
        let numbers = [
            ("steps", request.steps, 1, self.steps),
            ("width", request.width, 16, self.side),
            ("height", request.height, 16, self.side),
            ("max_tokens", request.max_tokens, 1, self.tokens),
            ("mask_padding", request.mask_padding, 0, self.side),
            ("tile_size", request.tile_size, 64, 2048),
            ("output_compression", request.output_compression.map(u32::from), 0, 100),
        ];
        for (name, number, min, max) in numbers {
            if let Some(found) = number.filter(|n| *n < min || *n > max) {
                return Err(invalid(name, format!("{name} must be between {min} and {max}, found {found}")));
            }
        }
        if let (Some(width), Some(height)) = (request.width, request.height) {
            self.check_size(width, height)?;
        }
        if request.guidance.is_some_and(|g| !(0.0..=100.0).contains(&g)) {
            return Err(invalid("guidance", "guidance must be between 0 and 100"));
        }
        if let Some(found) = request.cache.filter(|threshold| !(0.0..=1.0).contains(threshold)) {
            return Err(invalid("cache", format!("cache must be between 0 and 1, found {found}")));
        }
        self.check_schedule(request)?;
        self.check_inputs(request)?;
        Self::check_upscale(request)?;
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
        Err(invalid("size", message))
    }

    /// Checks the prompts and the number of images.
    pub(crate) fn check_texts(&self, request: &Request) -> Result<(), JobError> {
        self.check_prompts(request)?;
        self.check_image_count(request)
    }

    fn check_prompts(&self, request: &Request) -> Result<(), JobError> {
        let texts = [
            ("prompt", &request.prompts),
            ("negative_prompt", &request.negative_prompts),
            ("original_prompt", &request.original_prompts),
        ];
        for (name, texts) in texts {
            if let Some(bytes) = texts.iter().map(String::len).find(|bytes| *bytes > self.prompt) {
                let message = format!("{name} has {bytes} bytes, the limit is {}", self.prompt);
                return Err(JobError::request("prompt_too_long", message).param(name));
            }
        }
        if request.prompts.is_empty() && request.upscale.is_none() {
            return Err(JobError::request("invalid_request", "prompt is missing").param("prompt"));
        }
        if request.prompts.iter().any(|prompt| prompt.trim().is_empty()) {
            return Err(invalid("prompt", "prompt is empty"));
        }
        let (prompts, negatives) = (request.prompts.len(), request.negative_prompts.len());
        if negatives > 1 && negatives != prompts.max(1) {
            return Err(invalid(
                "negative_prompt",
                format!(
                    "found {negatives} values of negative_prompt for {prompts} prompts, expected one for all or one per prompt"
                ),
            ));
        }
        let originals = request.original_prompts.len();
        if originals != 0 && originals != prompts {
            let message = format!("found {originals} values of original_prompt for {prompts} prompts");
            return Err(invalid("original_prompt", message));
        }
        let local_only = [
            ("embeds", request.embeds.is_some()),
            ("noise", request.noise.is_some()),
            ("lora_partial", request.lora_partial),
        ];
        match local_only.iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                Err(invalid(name, format!("{name} is not supported over HTTP: it needs files on the server")))
            }
            None => Ok(()),
        }
    }

    /// Checks the number of images, and that the seeds match it.
    fn check_image_count(&self, request: &Request) -> Result<(), JobError> {
        let max = self.images;
        if let Some(n) = request.n.filter(|n| *n < 1 || *n > max) {
            return Err(invalid("n", format!("n must be between 1 and {max}, found {n}")));
        }
        let images = request.image_count();
        if images > max as usize {
            return Err(invalid("n", format!("the request asks for {images} images, the limit is {max}")));
        }
        let (seeds, prompts) = (request.seed.len(), request.prompts.len());
        if seeds > 1 && (seeds != images || !images.is_multiple_of(prompts.max(1))) {
            return Err(invalid(
                "seed",
                format!(
                    "found {seeds} values of seed for {images} images of {prompts} prompts, expected one for all or one per image"
                ),
            ));
        }
        Ok(())
    }

    fn check_schedule(&self, request: &Request) -> Result<(), JobError> {
        if request.sigmas.len() > self.steps as usize {
            return Err(invalid(
                "sigmas",
                format!("sigmas has {} values, the limit is {}", request.sigmas.len(), self.steps),
            ));
        }
        // `contains` is false for NaN.
        if request.sigmas.iter().any(|sigma| !(0.0..=1.0).contains(sigma)) {
            return Err(invalid("sigmas", "sigmas must be between 0 and 1"));
        }
        if request.rho.is_some_and(|rho| !(0.01..=100.0).contains(&rho)) {
            return Err(invalid("rho", "rho must be between 0.01 and 100"));
        }
        if request.rho.is_some() && request.schedule != Some(ScheduleKind::Power) {
            return Err(invalid("rho", "rho requires schedule `power`"));
        }
        Ok(())
    }

    fn check_inputs(&self, request: &Request) -> Result<(), JobError> {
        if request.strength.is_some_and(|s| !(0.0..=1.0).contains(&s)) {
            return Err(invalid("strength", "strength must be between 0 and 1"));
        }
        if request.images().count() > self.references {
            return Err(invalid(
                "references",
                format!("the request has too many input images, the limit is {}", self.references),
            ));
        }
        if request.init.is_none() && (request.mask.is_some() || request.strength.is_some()) {
            return Err(invalid("init", "mask and strength require an initial image (`init`)"));
        }
        if request.mask.is_none() && request.mask_padding.is_some() {
            return Err(invalid("mask_padding", "mask_padding requires a mask"));
        }
        Ok(())
    }

    /// Checks the fields of upscaling. The size of the result is checked when the image is read.
    fn check_upscale(request: &Request) -> Result<(), JobError> {
        let Some(scale) = request.upscale else {
            return match request.tile_size {
                Some(_) => Err(invalid("tile_size", "tile_size requires `upscale`")),
                None => Ok(()),
            };
        };
        if !UPSCALE_FACTORS.contains(&scale) {
            return Err(invalid("upscale", format!("upscale must be 2 or 4, found {scale}")));
        }
        if request.init.is_none() {
            return Err(invalid("init", "upscale requires an image (`init`)"));
        }
        if request.mask.is_some()
            || request.width.is_some()
            || request.height.is_some()
            || !request.sigmas.is_empty()
        {
            return Err(invalid("upscale", "upscale can't be combined with mask, width, height or sigmas"));
        }
        if request.strength == Some(0.0) {
            return Err(invalid("strength", "strength must be above 0 to upscale"));
        }
        Ok(())
    }

    /// Refuses to upscale an image of so many pixels to more than allowed.
    pub(crate) fn check_upscaled_pixels(&self, scale: u32, pixels: u64) -> Result<(), JobError> {
        let (pixels, max) = (pixels.saturating_mul(u64::from(scale).pow(2)), self.upscaled_pixels);
        if pixels <= max {
            return Ok(());
        }
        let message = format!("upscaled by {scale} the image has {pixels} pixels, the limit is {max}");
        Err(JobError::request("image_too_large", message).param("upscale"))
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
        check_known("model", "model", "model_not_found", model, &models.chain(aliases).collect::<Vec<_>>())
    }

    /// Checks that models, VAEs and LoRAs are in the catalogue. So a name can't lead out of a folder.
    fn check_names(&self, request: &Request, catalogue: &dyn Catalogue) -> Result<(), JobError> {
        if request.loras.len() > self.loras {
            return Err(invalid(
                "loras",
                format!("the request has {} LoRAs, the limit is {}", request.loras.len(), self.loras),
            ));
        }
        if let Some(model) = &request.model {
            let models = catalogue.models().into_iter().map(|model| model.name).collect::<Vec<_>>();
            check_known("model", "model", "model_not_found", name(model), &models)?;
        }
        if let Some(vae) = &request.vae {
            check_known("vae", "VAE", "vae_not_found", name(&vae.path), &catalogue.vaes())?;
        }
        if request.loras.is_empty() {
            return Ok(());
        }
        let loras = catalogue.loras();
        for LoraRef { path, weight, .. } in &request.loras {
            check_known("loras", "LoRA", "lora_not_found", name(path), &loras)?;
            if !weight.is_finite() || weight.abs() > 100.0 {
                return Err(invalid(
                    "loras",
                    format!("the weight of LoRA `{}` must be between -100 and 100", name(path)),
                ));
            }
        }
        Ok(())
    }
}

fn check_known(
    param: &'static str,
    what: &str,
    code: &'static str,
    name: &str,
    known: &[String],
) -> Result<(), JobError> {
    if known.iter().any(|known| known == name) {
        return Ok(());
    }
    // The name comes from the client: limit its length.
    let name: String = name.chars().take(80).collect();
    let available = if known.is_empty() { "none".into() } else { known.join(", ") };
    Err(JobError::request(code, format!("{what} `{name}` not found; available: {available}")).param(param))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::generator::ModelInfo;

    struct TestCatalogue;

    impl Catalogue for TestCatalogue {
        fn models(&self) -> Vec<ModelInfo> {
            vec![ModelInfo {
                name: "ember".into(),
                default: true,
                size: 256,
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
        Limits::default().check(request, &TestCatalogue).err().map(|error| (error.code, error.message))
    }

    #[test]
    fn errors_name_the_value_that_is_out_of_range() {
        let invalid = [
            ("prompt", Request::new("   ")),
            ("prompt", Request { prompts: vec!["a".into(), String::new()], ..fox() }),
            ("negative_prompt", Request { negative_prompts: vec!["a".into(); 2], ..prompts(3) }),
            ("n must", Request { n: Some(0), ..fox() }),
            ("n must", Request { n: Some(11), ..fox() }),
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
            ("images", Request { references: vec!["a".into(); 11], ..fox() }),
            ("upscale must", Request { init: Some("a".into()), upscale: Some(3), ..fox() }),
            ("requires an image", Request { upscale: Some(2), ..fox() }),
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
        assert_eq!(check(&Request::default()).unwrap().0, "invalid_request");
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
            assert_eq!(code(Request { vae: Some(name.into()), ..fox() }), Some("vae_not_found"));
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
