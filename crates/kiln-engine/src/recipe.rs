//! Recipes: JSON inside an image file that says how it was generated: the resolved request, the model and the backend.

mod paths;

use std::path::{Path, PathBuf};

use kiln_family::Variant;
use kiln_image::{Encoding, RgbImage};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::embedded::{Embedded, ImageOrigin};
use crate::error::{Error, ErrorContext, Result};
use crate::inputs;
use crate::model::ComponentPaths;
use crate::plan::Plan;
use crate::request::{BatchPosition, Request};

/// Everything that determines the pixels of one image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The version of Kiln that generated it.
    pub kiln: String,
    /// The request without the model: prompt and seed are this image's own, files have hashes.
    #[serde(flatten)]
    pub request: Request,
    /// Index of the prompt in the file of embeddings, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeds_row: Option<usize>,
    /// Index of the image in its batch, from 0.
    pub index: usize,
    /// Number of images whose noise was drawn together.
    pub batch: usize,
    /// The model.
    pub model: ModelRecord,
    /// Whether the size was taken from the initial image: requesting the same numbers would resize it differently.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub size_of_init: bool,
    /// Steps that reused the step cache, if it was on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reused_steps: Option<usize>,
    /// The precision, such as `bf16`.
    pub dtype: String,
    /// The backend, such as `cpu (avx512)`.
    pub backend: String,
}

/// A model and the fingerprints of its components.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Its path, or its name if it is built in or in the models folder.
    pub path: String,
    /// What kind of model it is, such as `FLUX.2 klein 4B`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Its variant.
    pub variant: String,
    /// Fingerprint of the transformer.
    pub transformer: String,
    /// Fingerprint of the text encoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_encoder: Option<String>,
    /// Fingerprint of the VAE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vae: Option<String>,
    /// Components that replaced the model's own.
    #[serde(rename = "parts", default, skip_serializing_if = "ComponentPathsRecord::is_empty")]
    pub overrides: ComponentPathsRecord,
}

impl ModelRecord {
    /// Returns what kind of model it is.
    pub fn title(&self) -> &str {
        self.title.as_ref().unwrap_or(&self.variant)
    }

    /// Returns its name without folders and extension.
    fn file_name(&self) -> String {
        let name = Path::new(&self.path).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let stem = name.strip_suffix(".safetensors").or_else(|| name.strip_suffix(".gguf"));
        stem.map(str::to_owned).unwrap_or(name)
    }
}

/// The paths of named components, and the named variant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ComponentPathsRecord {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    transformer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text_encoder: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokenizer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    variant: Option<Variant>,
}

impl ComponentPathsRecord {
    fn new(paths: &ComponentPaths) -> ComponentPathsRecord {
        let path = |path: &Option<PathBuf>| path.as_deref().map(inputs::absolute);
        ComponentPathsRecord {
            transformer: path(&paths.transformer),
            text_encoder: path(&paths.text_encoder),
            tokenizer: path(&paths.tokenizer),
            variant: paths.variant,
        }
    }

    fn is_empty(&self) -> bool {
        *self == ComponentPathsRecord::default()
    }

    /// Adds the recorded paths to `paths` where it names none.
    pub fn fill_missing(&self, paths: &mut ComponentPaths) {
        let path = |path: &Option<String>| path.as_ref().map(PathBuf::from);
        paths.transformer = paths.transformer.take().or_else(|| path(&self.transformer));
        paths.text_encoder = paths.text_encoder.take().or_else(|| path(&self.text_encoder));
        paths.tokenizer = paths.tokenizer.take().or_else(|| path(&self.tokenizer));
        paths.variant = paths.variant.or(self.variant);
    }
}

impl Recipe {
    /// Creates the recipe of a plan's image, computed in `dtype` by `backend`.
    pub fn new(plan: &Plan, index: usize, dtype: &str, backend: &str) -> Result<Recipe> {
        let (model, image) = (&plan.model, plan.image(index));
        let embeds = plan.request.embeds.is_some();
        let text_encoder = model.text_encoder.as_ref().filter(|_| !embeds);
        let vae = model.vae.as_ref().filter(|_| plan.vae.is_none());
        let owned = |text: Result<&str>| text.map(str::to_owned);
        let position = plan.request.prompts.iter().position(|prompt| image.prompt.as_ref() == Some(prompt));
        let original = position.and_then(|i| plan.request.original_prompts.get(i)).cloned();
        Ok(Recipe {
            kiln: env!("CARGO_PKG_VERSION").into(),
            request: Request {
                prompts: image.prompt.into_iter().collect(),
                original_prompts: original.into_iter().collect(),
                negative_prompts: image.negative.into_iter().collect(),
                seed: image.seed.into_iter().collect(),
                model: None,
                n: None,
                one_generator: plan.request.one_generator && image.batch > 1,
                batch_position: None,
                output_format: None,
                output_compression: None,
                png: None,
                ..plan.request.clone()
            },
            embeds_row: embeds.then_some(image.embeds_row),
            index: image.batch_index,
            batch: image.batch,
            model: ModelRecord {
                path: model.recorded_name(),
                title: Some(model.title()),
                variant: model.variant.to_string(),
                transformer: owned(model.transformer.fingerprint())?,
                text_encoder: text_encoder.map(|c| owned(c.fingerprint())).transpose()?,
                vae: vae.map(|c| owned(c.fingerprint())).transpose()?,
                overrides: ComponentPathsRecord::new(&model.overrides),
            },
            size_of_init: plan.size_of_init,
            reused_steps: None,
            dtype: dtype.to_owned(),
            backend: backend.to_owned(),
        })
    }

    /// Reads the recipe inside an image file. Its relative paths become absolute.
    pub fn read(path: &Path) -> Result<Recipe> {
        let reading = || format!("reading the recipe of `{}`", path.display());
        let bytes = inputs::read_image_bytes(path).with_context(reading)?;
        let name = path.display().to_string();
        let text = kiln_image::read_recipe(&bytes).map_err(|e| e.named(&name)).with_context(reading)?;
        let text = text.ok_or_else(|| {
            Error::request(format!("there is no recipe in `{}`", path.display())).with_hint(
                "only images that Kiln generated have one, and other programs drop it when they save an image",
            )
        })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        Ok(Recipe::parse(&text).with_context(reading)?.found_from(folder))
    }

    /// Parses a recipe.
    pub fn parse(text: &str) -> Result<Recipe> {
        let invalid = |e: serde_json::Error| {
            // It may repeat a value of any length.
            let problem: String = e.to_string().chars().take(200).collect();
            Error::request(format!("invalid recipe: {problem}"))
                .with_hint("it may come from another version of Kiln; `kiln info` shows it as it is")
        };
        let mut value: Value = serde_json::from_str(text).map_err(invalid)?;
        // Older recipes store the row next to the file's hash.
        if let Some(row) = value.pointer("/embeds/row").cloned() {
            value["embeds_row"] = row;
        }
        serde_json::from_value(value).map_err(invalid)
    }

    /// Serializes the recipe.
    pub fn to_json(&self) -> String {
        // Strings, numbers and lists: serializing can't fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Encodes the image with what `embedded` names: the recipe is also written as A1111's `parameters`.
    pub fn encode(&self, image: &RgbImage, encoding: Encoding, embedded: &Embedded) -> Result<Vec<u8>> {
        let (json, parameters) = (self.to_json(), self.parameters());
        let origin = ImageOrigin {
            request: &self.request,
            model: self.model.title(),
            recipe: &json,
            parameters: Some(&parameters),
            inputs: &inputs::unchanged_file,
        };
        embedded.encode(image, encoding, &origin)
    }

    /// Describes the image as A1111 does, for programs that read its `parameters`: prompt, negative prompt, settings.
    pub fn parameters(&self) -> String {
        let request = &self.request;
        let mut text = request.prompts.first().cloned().unwrap_or_default();
        for lora in &request.loras {
            let stem = lora.path.file_stem().unwrap_or_default().to_string_lossy();
            text += &format!(" <lora:{stem}:{}>", lora.weight);
        }
        if let Some(negative) = request.negative_prompts.first() {
            text += &format!("\nNegative prompt: {negative}");
        }
        let mut settings = Vec::new();
        let mut add =
            |name: &str, value: Option<String>| settings.extend(value.map(|v| format!("{name}: {v}")));
        add("Steps", request.steps.map(|steps| steps.to_string()));
        add("Sampler", Some("Euler".into()));
        add("CFG scale", Some(request.guidance.unwrap_or(1.0).to_string()));
        add("Seed", request.seed.first().map(|seed| seed.to_string()));
        add("Size", request.width.zip(request.height).map(|(width, height)| format!("{width}x{height}")));
        add("Model hash", self.model.transformer.get(..10).map(str::to_owned));
        add("Model", Some(self.model.file_name()));
        add("Denoising strength", request.strength.map(|strength| strength.to_string()));
        add("Version", Some(format!("Kiln {}", self.kiln)));
        format!("{text}\n{}", settings.join(", "))
    }

    /// Returns the request that generates the image again; fields of `changes` replace those of the recipe.
    pub fn request(&self, changes: &Request) -> Result<Request> {
        // JSON has no such numbers: they would be left out.
        if let Some((field, found)) = changes.not_finite() {
            return Err(Error::value(format!("`{field}` must be a finite number, found {found}")));
        }
        let mut own = self.request.fields();
        let changed = changes.fields();
        let has = |name: &str| changed.contains_key(name);
        // Alternatives replace each other, with the fields that depend on them.
        let new_prompt = has("prompt") || has("embeds");
        if new_prompt {
            remove(&mut own, &["prompt", "original_prompt", "embeds"]);
        }
        if has("embeds") || (!new_prompt && own.contains_key("embeds")) {
            remove(&mut own, &["negative_prompt"]);
        }
        let new_noise = has("seed") || has("noise");
        if new_noise {
            remove(&mut own, &["seed", "noise"]);
        }
        if has("sigmas") || has("steps") {
            let same = changed.get("sigmas").is_none_or(|sigmas| own.get("sigmas") == Some(sigmas));
            if !same || !has("sigmas") {
                remove(&mut own, &["sigmas"]);
            }
            if !same {
                remove(&mut own, &["steps"]);
            }
        }
        if has("mask") || own.contains_key("mask") || self.size_of_init {
            remove(&mut own, &["width", "height"]);
        }
        if changed.get("schedule").is_some_and(|kind| kind != "power") {
            remove(&mut own, &["rho"]);
        }
        if has("loras") {
            remove(&mut own, &["lora_partial", "dora_rule"]);
        }
        own.extend(changed);
        let mut request: Request =
            serde_json::from_value(own.into()).map_err(|e| Error::request(format!("invalid recipe: {e}")))?;
        // The files may have changed: their hashes are computed again.
        request.images_mut().for_each(|file| file.sha256 = None);
        request.loras.iter_mut().for_each(|lora| lora.sha256 = None);
        let same_noise = !new_noise && changes.n.is_none() && changes.prompts.len() <= 1;
        let embeds_row = self.embeds_row.filter(|_| !new_prompt);
        request.batch_position = (same_noise || embeds_row.is_some()).then_some(BatchPosition {
            index: if same_noise { self.index } else { 0 },
            batch: if same_noise { self.batch } else { 1 },
            embeds_row,
        });
        Ok(request)
    }

    /// Returns why an image with the recipe `new`, generated from this recipe, may look different: files and models that
    /// have changed.
    pub fn differences(&self, new: &Recipe) -> Vec<String> {
        let mut differences = Vec::new();
        let old_files: Vec<_> = self.files().collect();
        for (path, sha256) in new.files() {
            if old_files.iter().any(|(p, hash)| *p == path && *hash != sha256) {
                differences.push(format!("`{}` has changed since the image was generated", path.display()));
            }
        }
        let (old, new) = (&self.model, &new.model);
        let components = [
            ("transformer", Some(&old.transformer), Some(&new.transformer)),
            ("text encoder", old.text_encoder.as_ref(), new.text_encoder.as_ref()),
            ("vae", old.vae.as_ref(), new.vae.as_ref()),
        ];
        for (component, before, now) in components {
            if before.is_some() && before != now {
                let path = &new.path;
                differences
                    .push(format!("the {component} of `{path}` has changed since the image was generated"));
            }
        }
        differences
    }

    fn files(&self) -> impl Iterator<Item = (&Path, Option<&str>)> {
        let request = &self.request;
        let others = [&request.noise, &request.vae, &request.embeds].into_iter().flatten();
        let files = request.images().chain(others).map(|f| (f.path.as_path(), f.sha256.as_deref()));
        files.chain(request.loras.iter().map(|l| (l.path.as_path(), l.sha256.as_deref())))
    }
}

fn remove(fields: &mut Map<String, Value>, names: &[&str]) {
    names.iter().for_each(|name| drop(fields.remove(*name)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{FileRef, LoraRef};

    const OLD: &str = r#"{"kiln":"0.1.0","prompt":"a fox","negative":"rain","seed":18446744073709551615,"rng":"cpu","index":1,"batch":2,
        "model":{"path":"/m","variant":"klein","transformer":"aa"},"width":64,"height":96,"steps":4,
        "schedule":"shifted","references":[{"path":"/r.png","sha256":"bb"}],"max_tokens":512,"dtype":"f32",
        "backend":"cpu","from_the_future":1}"#;

    fn recipe() -> Recipe {
        Recipe::parse(OLD).unwrap()
    }

    #[test]
    fn json_keeps_every_field() {
        assert_eq!(Recipe::parse(&recipe().to_json()).unwrap(), recipe());
        assert_eq!(recipe().request.seed, [u64::MAX]);
        assert_eq!(recipe().request.negative_prompts, ["rain"]);
        assert_eq!(recipe().request.references[0].sha256.as_deref(), Some("bb"));
        assert!(Recipe::parse("{}").unwrap_err().to_string().contains("missing field"));
    }

    #[test]
    fn a_number_that_is_out_of_range_is_an_error_and_not_left_out() {
        let huge = OLD.replace(r#""steps":4"#, r#""steps":4,"guidance":1e99"#);
        let error = Recipe::parse(&huge).unwrap_err().to_string();
        assert!(error.contains("the number 1e99 is out of range"), "{error}");
        let lora = LoraRef { path: "a".into(), weight: f32::INFINITY, sha256: None };
        for (changes, field) in [
            (Request { guidance: Some(f32::INFINITY), ..Request::default() }, "guidance"),
            (Request { strength: Some(f64::NAN), ..Request::default() }, "strength"),
            (Request { sigmas: vec![1.0, f32::NAN], ..Request::default() }, "sigmas"),
            (Request { loras: vec![lora], ..Request::default() }, "loras"),
        ] {
            let error = recipe().request(&changes).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}` must be a finite number")), "{error}");
        }
    }

    #[test]
    fn parameters_are_in_the_format_of_a1111() {
        let mut recipe = recipe();
        recipe.model.transformer = "0123456789abcdef".into();
        recipe.model.path = "/m/klein-4b.gguf".into();
        recipe.request.loras = vec![crate::LoraRef::parse("/l/ink.safetensors:0.5").unwrap()];
        assert_eq!(
            recipe.parameters(),
            "a fox <lora:ink:0.5>\nNegative prompt: rain\nSteps: 4, Sampler: Euler, CFG scale: 1, Seed: \
             18446744073709551615, Size: 64x96, Model hash: 0123456789, Model: klein-4b, Version: Kiln 0.1.0"
        );
    }

    #[test]
    fn changes_replace_fields_of_the_recipe() {
        let request = recipe().request(&Request { width: Some(128), ..Request::default() }).unwrap();
        assert_eq!((request.width, request.height), (Some(128), Some(96)));
        assert_eq!((request.prompts, request.seed), (vec!["a fox".into()], vec![u64::MAX]));
        assert_eq!(request.batch_position, Some(BatchPosition { index: 1, batch: 2, embeds_row: None }));
        assert_eq!(request.references, [FileRef::from("/r.png")]);
    }

    /// Above a megapixel the initial image is resized twice; requesting the resulting size would resize it once.
    #[test]
    fn a_size_taken_from_the_initial_image_is_not_requested() {
        let recipe = Recipe { size_of_init: true, ..recipe() };
        let request = recipe.request(&Request::default()).unwrap();
        assert_eq!((request.width, request.height), (None, None));
    }

    #[test]
    fn a_new_seed_or_count_starts_a_new_batch() {
        let request = recipe().request(&Request { seed: vec![7], ..Request::default() }).unwrap();
        assert_eq!((request.batch_position, request.seed), (None, vec![7]));
        let request = recipe().request(&Request { n: Some(3), ..Request::default() }).unwrap();
        assert_eq!(request.batch_position, None);
    }

    #[test]
    fn noise_levels_and_steps_replace_each_other() {
        let mut own = recipe();
        own.request.sigmas = vec![1.0, 0.5];
        let again = own.request(&Request::default()).unwrap();
        assert_eq!((again.sigmas.len(), again.steps), (2, Some(4)));
        let stepped = own.request(&Request { steps: Some(8), ..Request::default() }).unwrap();
        assert_eq!((stepped.sigmas.len(), stepped.steps), (0, Some(8)));
        let levels = own.request(&Request { sigmas: vec![1.0], ..Request::default() }).unwrap();
        assert_eq!((levels.sigmas.len(), levels.steps), (1, None));
    }

    #[test]
    fn the_row_of_older_recipes_is_found() {
        let old = OLD.replacen(
            r#""prompt":"a fox","negative":"rain""#,
            r#""embeds":{"path":"/e","sha256":"cc","row":3}"#,
            1,
        );
        let request = Recipe::parse(&old).unwrap().request(&Request::default()).unwrap();
        assert_eq!(request.embeds, Some(FileRef { path: "/e".into(), sha256: Some("cc".into()) }));
        assert_eq!(request.batch_position.and_then(|position| position.embeds_row), Some(3));
    }

    #[test]
    fn changed_files_and_another_model_are_named() {
        let mut new = recipe();
        assert!(recipe().differences(&new).is_empty());
        new.request.references[0].sha256 = Some("cc".into());
        new.model.transformer = "dd".into();
        let found = recipe().differences(&new);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("/r.png") && found[1].contains("transformer"), "{found:?}");
    }
}
