//! What a request may ask for, and how it is refused.

use kiln_engine::{LoraRef, Request, ScheduleKind};

use crate::generator::{Catalogue, JobError, name};

/// What is allowed.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of an HTTP request.
    pub body: usize,
    /// Bytes of all HTTP requests that are read at the same time.
    pub bodies: usize,
    /// Pixels of an image that is sent.
    pub input_pixels: u64,
    /// Images that a job may work from.
    pub references: usize,
    /// Bytes of a prompt.
    pub prompt: usize,
    /// Tokens that a prompt may be padded to.
    pub tokens: u32,
    /// Steps.
    pub steps: u32,
    /// The longest side, in pixels.
    pub side: u32,
    /// Pixels of an image to generate.
    pub pixels: u64,
    /// Images of one job.
    pub pictures: u32,
    /// LoRAs of one job.
    pub loras: usize,
    /// Jobs that wait.
    pub queue: usize,
    /// Connections at the same time.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body: 64 << 20,
            bodies: 256 << 20,
            input_pixels: 64 << 20,
            references: 10,
            prompt: 8000,
            tokens: 1024,
            steps: 200,
            side: 4096,
            pixels: 4 << 20,
            pictures: 10,
            loras: 8,
            queue: 64,
            connections: 512,
        }
    }
}

fn invalid(message: impl Into<String>) -> JobError {
    JobError::request("invalid_value", message)
}

impl Limits {
    /// Checks the values and names of a request; its images are checked when they are read.
    pub fn check(&self, request: &Request, catalogue: &dyn Catalogue) -> Result<(), JobError> {
        self.texts(request)?;
        self.count(request)?;
        let numbers = [
            ("steps", request.steps, 1, self.steps),
            ("width", request.width, 16, self.side),
            ("height", request.height, 16, self.side),
            ("max_tokens", request.max_tokens, 1, self.tokens),
            ("mask_padding", request.mask_padding, 0, self.side),
            ("output_compression", request.output_compression.map(u32::from), 0, 100),
        ];
        for (name, number, least, most) in numbers {
            if let Some(found) = number.filter(|n| *n < least || *n > most) {
                return Err(invalid(format!("{name} must lie between {least} and {most}, found {found}")));
            }
        }
        if let (Some(width), Some(height)) = (request.width, request.height)
            && u64::from(width) * u64::from(height) > self.pixels
        {
            let most = self.pixels;
            return Err(invalid(format!(
                "an image of {width}x{height} is too large: at most {most} pixels are generated"
            )));
        }
        if request.guidance.is_some_and(|g| !(0.0..=100.0).contains(&g)) {
            return Err(invalid("guidance must lie between 0 and 100"));
        }
        self.schedule(request)?;
        self.images(request)?;
        self.names(request, catalogue)
    }

    fn texts(&self, request: &Request) -> Result<(), JobError> {
        let texts = [("prompt", &request.prompts), ("negative_prompt", &request.negative_prompts)];
        for (name, texts) in texts {
            if let Some(bytes) = texts.iter().map(String::len).find(|bytes| *bytes > self.prompt) {
                let message = format!("{name} has {bytes} bytes, at most {} are read", self.prompt);
                return Err(JobError::request("prompt_too_long", message));
            }
        }
        if request.prompts.is_empty() {
            return Err(JobError::request("invalid_request", "prompt is missing: say what to show"));
        }
        if request.prompts.iter().any(|prompt| prompt.trim().is_empty()) {
            return Err(invalid("prompt is empty: say what to show"));
        }
        let (prompts, negatives) = (request.prompts.len(), request.negative_prompts.len());
        if negatives > 1 && negatives != prompts {
            return Err(invalid(format!(
                "negative_prompt has {negatives} texts for {prompts} prompts: give one for all, or one for each"
            )));
        }
        let file = [
            ("embeds", request.embeds.is_some()),
            ("noise", request.noise.is_some()),
            ("lora_partial", request.lora_partial),
        ];
        match file.iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                Err(invalid(format!("{name} can't be used over HTTP: it is about files on the server")))
            }
            None => Ok(()),
        }
    }

    /// How many images there are, and whether the seeds fit.
    fn count(&self, request: &Request) -> Result<(), JobError> {
        let most = self.pictures;
        if let Some(n) = request.n.filter(|n| *n < 1 || *n > most) {
            return Err(invalid(format!("n must lie between 1 and {most}, found {n}")));
        }
        let images = request.image_count();
        if images > most as usize {
            return Err(invalid(format!("a job makes {most} images at most, found {images}")));
        }
        let (seeds, prompts) = (request.seed.len(), request.prompts.len());
        if seeds > 1 && (seeds != images || !images.is_multiple_of(prompts)) {
            return Err(invalid(format!(
                "seed has {seeds} seeds for {images} images of {prompts} prompts: give one for all, or one for each image"
            )));
        }
        Ok(())
    }

    fn schedule(&self, request: &Request) -> Result<(), JobError> {
        if request.sigmas.len() > self.steps as usize {
            return Err(invalid(format!(
                "sigmas has {} noise levels, at most {} are taken",
                request.sigmas.len(),
                self.steps
            )));
        }
        // NaN is in no range.
        if request.sigmas.iter().any(|sigma| !(0.0..=1.0).contains(sigma)) {
            return Err(invalid("sigmas must lie between 0 and 1"));
        }
        if request.rho.is_some_and(|rho| !(0.01..=100.0).contains(&rho)) {
            return Err(invalid("rho must lie between 0.01 and 100"));
        }
        if request.rho.is_some() && request.schedule != Some(ScheduleKind::Power) {
            return Err(invalid("rho needs schedule `power`"));
        }
        Ok(())
    }

    fn images(&self, request: &Request) -> Result<(), JobError> {
        if request.strength.is_some_and(|s| !(0.0..=1.0).contains(&s)) {
            return Err(invalid("strength must lie between 0 and 1"));
        }
        if request.images().count() > self.references {
            return Err(invalid(format!("a job may work from {} images at most", self.references)));
        }
        if request.init.is_none() && (request.mask.is_some() || request.strength.is_some()) {
            return Err(invalid("mask and strength need an image to start from"));
        }
        if request.mask.is_none() && request.mask_padding.is_some() {
            return Err(invalid("mask_padding needs a mask"));
        }
        Ok(())
    }

    /// A name is one of the list, so it can't lead out of a folder.
    fn names(&self, request: &Request, catalogue: &dyn Catalogue) -> Result<(), JobError> {
        if request.loras.len() > self.loras {
            return Err(invalid(format!("at most {} LoRAs act together", self.loras)));
        }
        if let Some(model) = &request.model {
            let models = catalogue.models().into_iter().map(|model| model.name).collect::<Vec<_>>();
            known("model", "model_not_found", name(model), &models)?;
        }
        if let Some(vae) = &request.vae {
            known("VAE", "vae_not_found", name(&vae.path), &catalogue.vaes())?;
        }
        if request.loras.is_empty() {
            return Ok(());
        }
        let loras = catalogue.loras();
        for LoraRef { path, weight, .. } in &request.loras {
            known("LoRA", "lora_not_found", name(path), &loras)?;
            if !weight.is_finite() || weight.abs() > 100.0 {
                return Err(invalid(format!(
                    "the weight of LoRA `{}` must lie between -100 and 100",
                    name(path)
                )));
            }
        }
        Ok(())
    }
}

fn known(what: &str, code: &'static str, name: &str, known: &[String]) -> Result<(), JobError> {
    if known.iter().any(|known| known == name) {
        return Ok(());
    }
    // A foreign name in a message: not endless.
    let name: String = name.chars().take(80).collect();
    let there = if known.is_empty() { "none".into() } else { known.join(", ") };
    Err(JobError::request(code, format!("there is no {what} `{name}`; there are: {there}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generator::ModelInfo;

    struct Names;

    impl Catalogue for Names {
        fn models(&self) -> Vec<ModelInfo> {
            vec![ModelInfo {
                name: "ember".into(),
                default: true,
                size: 256,
                sides: None,
                steps: 4,
                guidance: None,
                negative: false,
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

    fn refused(request: &Request) -> Option<(&'static str, String)> {
        Limits::default().check(request, &Names).err().map(|error| (error.code, error.message))
    }

    #[test]
    fn values_outside_the_limits_are_refused_by_name() {
        let wrong = [
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
            ("embeds", Request { embeds: Some("/etc/passwd".into()), ..fox() }),
            ("noise", Request { noise: Some("/etc/passwd".into()), ..fox() }),
            ("lora_partial", Request { lora_partial: true, ..fox() }),
            ("weight", Request { loras: vec![lora("ink", f32::INFINITY)], ..fox() }),
        ];
        for (part, request) in wrong {
            let (code, message) = refused(&request).unwrap_or_else(|| panic!("{request:?}"));
            assert_eq!(code, "invalid_value", "{message}");
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(refused(&Request::new("a".repeat(8001))).unwrap().0, "prompt_too_long");
        assert_eq!(refused(&Request::default()).unwrap().0, "invalid_request");
    }

    #[test]
    fn lists_of_prompts_seeds_and_levels_are_taken() {
        let right = [
            fox(),
            Request { negative_prompts: vec!["a".into()], ..prompts(3) },
            Request { negative_prompts: vec!["a".into(); 3], ..prompts(3) },
            Request { n: Some(3), seed: (0..9).collect(), ..prompts(3) },
            Request { seed: (0..4).collect(), ..prompts(2) },
            Request { seed: vec![u64::MAX], n: Some(10), ..fox() },
            Request { sigmas: vec![1.0, 0.75, 0.5, 0.25], max_tokens: Some(1024), ..fox() },
            Request { rho: Some(2.0), schedule: Some(ScheduleKind::Power), ..fox() },
            Request { vae: Some("taef2".into()), ..fox() },
        ];
        for request in right {
            assert_eq!(refused(&request), None, "{request:?}");
        }
    }

    fn lora(name: &str, weight: f32) -> LoraRef {
        LoraRef { path: name.into(), weight, sha256: None }
    }

    #[test]
    fn names_that_are_not_in_the_list_are_refused_whatever_they_look_like() {
        let code = |request| refused(&request).map(|(code, _)| code);
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
