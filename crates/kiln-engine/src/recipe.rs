//! How an image was made, as JSON inside it: the request with every default filled in, and what made it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result, While};
use crate::inputs;
use crate::model::{Parts, Variant};
use crate::plan::Plan;
use crate::request::{BatchPart, Request};

/// Everything that decides the pixels of one image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The version of Kiln that made it.
    pub kiln: String,
    /// What was asked for, without the model: the prompt and the seed are this image's own, files have their hashes.
    #[serde(flatten)]
    pub request: Request,
    /// Which of the embeddings in the file, from 0, where there is no prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeds_row: Option<usize>,
    /// Which image of the batch it is, from 0.
    pub index: usize,
    /// Images whose noise was drawn together.
    pub batch: usize,
    /// The model, and the fingerprints of its parts.
    pub model: ModelRecord,
    /// The size is the initial image's own: asking for the same numbers would resize it another way.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub size_of_init: bool,
    /// What it was computed in.
    pub dtype: String,
    /// What computed it.
    pub backend: String,
}

/// A model and the fingerprints of its parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Where it is, or its name where it needs no path: built in, or in the models folder.
    pub path: String,
    /// Its kind.
    pub variant: String,
    /// Fingerprint of the transformer.
    pub transformer: String,
    /// Fingerprint of the text encoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_encoder: Option<String>,
    /// Fingerprint of the autoencoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vae: Option<String>,
    /// Parts that are not the model's own.
    #[serde(default, skip_serializing_if = "PartsRecord::is_empty")]
    pub parts: PartsRecord,
}

/// Where parts of a model come from that were named, and what it was said to be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartsRecord {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    transformer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text_encoder: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokenizer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    variant: Option<Variant>,
}

impl PartsRecord {
    fn new(parts: &Parts) -> PartsRecord {
        let path = |path: &Option<PathBuf>| path.as_deref().map(inputs::absolute);
        PartsRecord {
            transformer: path(&parts.transformer),
            text_encoder: path(&parts.text_encoder),
            tokenizer: path(&parts.tokenizer),
            variant: parts.variant,
        }
    }

    fn is_empty(&self) -> bool {
        *self == PartsRecord::default()
    }

    /// These parts, for what `parts` doesn't name.
    pub fn fill(&self, parts: &mut Parts) {
        let path = |path: &Option<String>| path.as_ref().map(PathBuf::from);
        parts.transformer = parts.transformer.take().or_else(|| path(&self.transformer));
        parts.text_encoder = parts.text_encoder.take().or_else(|| path(&self.text_encoder));
        parts.tokenizer = parts.tokenizer.take().or_else(|| path(&self.tokenizer));
        parts.variant = parts.variant.or(self.variant);
    }
}

impl Recipe {
    /// The recipe of image `index` of a plan, computed in `dtype` by `backend`.
    pub fn new(plan: &Plan, index: usize, dtype: &str, backend: &str) -> Result<Recipe> {
        let (model, image) = (&plan.model, plan.image(index));
        let embeds = plan.request.embeds.is_some();
        let text_encoder = model.text_encoder.as_ref().filter(|_| !embeds);
        let vae = model.vae.as_ref().filter(|_| plan.vae.is_none());
        let own = |text: Result<&str>| text.map(str::to_owned);
        Ok(Recipe {
            kiln: env!("CARGO_PKG_VERSION").into(),
            request: Request {
                prompts: image.prompt.into_iter().collect(),
                negative_prompts: image.negative.into_iter().collect(),
                seed: image.seed.into_iter().collect(),
                model: None,
                n: None,
                part: None,
                output_format: None,
                output_compression: None,
                png: None,
                ..plan.request.clone()
            },
            embeds_row: embeds.then_some(image.row),
            index: image.part.0,
            batch: image.part.1,
            model: ModelRecord {
                path: model.recorded_name(),
                variant: model.variant.to_string(),
                transformer: own(model.transformer.fingerprint())?,
                text_encoder: text_encoder.map(|part| own(part.fingerprint())).transpose()?,
                vae: vae.map(|part| own(part.fingerprint())).transpose()?,
                parts: PartsRecord::new(&model.parts),
            },
            size_of_init: plan.size_of_init,
            dtype: dtype.to_owned(),
            backend: backend.to_owned(),
        })
    }

    /// The recipe inside an image file.
    pub fn read(path: &Path) -> Result<Recipe> {
        let reading = || format!("reading the recipe of `{}`", path.display());
        let bytes = inputs::read_image_bytes(path).while_doing(reading)?;
        let name = path.display().to_string();
        let text = kiln_image::read_recipe(&bytes).map_err(|e| e.named(&name)).while_doing(reading)?;
        let text = text.ok_or_else(|| {
            Error::request(format!("there is no recipe in `{}`", path.display())).hint(
                "only images that Kiln made have one, and other programs drop it when they save an image",
            )
        })?;
        Recipe::parse(&text).while_doing(reading)
    }

    /// A recipe's text.
    pub fn parse(text: &str) -> Result<Recipe> {
        let wrong = |e: serde_json::Error| {
            Error::request(format!("the recipe makes no sense: {e}"))
                .hint("it may come from another version of Kiln; `kiln info` shows it as it is")
        };
        let mut value: Value = serde_json::from_str(text).map_err(wrong)?;
        // Older recipes have the row beside the file's hash.
        if let Some(row) = value.pointer("/embeds/row").cloned() {
            value["embeds_row"] = row;
        }
        serde_json::from_value(value).map_err(wrong)
    }

    /// As text.
    pub fn to_json(&self) -> String {
        // Strings, numbers and lists: there is nothing in it that JSON can't hold.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The request that makes the image again, with what `asked` names in place of the recipe's own.
    pub fn request(&self, asked: &Request) -> Result<Request> {
        let mut own = fields(&self.request);
        let asked_for = fields(asked);
        let has = |name: &str| asked_for.contains_key(name);
        // Alternatives replace each other, and what belongs to them.
        let words = has("prompt") || has("embeds");
        if words {
            forget(&mut own, &["prompt", "embeds"]);
        }
        if has("embeds") || (!words && own.contains_key("embeds")) {
            forget(&mut own, &["negative_prompt"]);
        }
        let noise = has("seed") || has("noise");
        if noise {
            forget(&mut own, &["seed", "noise"]);
        }
        if has("sigmas") || has("steps") {
            let same = asked_for.get("sigmas").is_none_or(|sigmas| own.get("sigmas") == Some(sigmas));
            if !same || !has("sigmas") {
                forget(&mut own, &["sigmas"]);
            }
            if !same {
                forget(&mut own, &["steps"]);
            }
        }
        if has("mask") || own.contains_key("mask") || self.size_of_init {
            forget(&mut own, &["width", "height"]);
        }
        if asked_for.get("schedule").is_some_and(|kind| kind != "power") {
            forget(&mut own, &["rho"]);
        }
        if has("loras") {
            forget(&mut own, &["lora_partial"]);
        }
        own.extend(asked_for);
        let mut request: Request = serde_json::from_value(Value::Object(own))
            .map_err(|e| Error::request(format!("the recipe makes no sense: {e}")))?;
        // The hashes are of the files as they were.
        request.images_mut().for_each(|file| file.sha256 = None);
        request.loras.iter_mut().for_each(|lora| lora.sha256 = None);
        let part = !noise && asked.n.is_none() && asked.prompts.len() <= 1;
        let row = self.embeds_row.filter(|_| !words);
        request.part = (part || row.is_some()).then_some(BatchPart {
            index: if part { self.index } else { 0 },
            of: if part { self.batch } else { 1 },
            row,
        });
        Ok(request)
    }

    /// Why `made`, made after this recipe, may look different: files that are no longer the same.
    pub fn differences(&self, made: &Recipe) -> Vec<String> {
        let mut differences = Vec::new();
        let ours: Vec<_> = self.files().collect();
        for (path, sha256) in made.files() {
            if ours.iter().any(|(p, hash)| *p == path && *hash != sha256) {
                differences.push(format!("`{}` has changed since the image was made", path.display()));
            }
        }
        let parts = [
            ("transformer", Some(&self.model.transformer), Some(&made.model.transformer)),
            ("text encoder", self.model.text_encoder.as_ref(), made.model.text_encoder.as_ref()),
            ("vae", self.model.vae.as_ref(), made.model.vae.as_ref()),
        ];
        for (part, before, now) in parts {
            if before.is_some() && before != now {
                let path = &made.model.path;
                differences.push(format!("the {part} of `{path}` is not the one the image was made with"));
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

/// What a request says, field by field.
fn fields(request: &Request) -> Map<String, Value> {
    match serde_json::to_value(request) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

fn forget(fields: &mut Map<String, Value>, names: &[&str]) {
    names.iter().for_each(|name| drop(fields.remove(*name)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::FileRef;

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
    fn fields_given_beside_a_recipe_win() {
        let request = recipe().request(&Request { width: Some(128), ..Request::default() }).unwrap();
        assert_eq!((request.width, request.height), (Some(128), Some(96)));
        assert_eq!((request.prompts, request.seed), (vec!["a fox".into()], vec![u64::MAX]));
        assert_eq!(request.part, Some(BatchPart { index: 1, of: 2, row: None }));
        assert_eq!(request.references, [FileRef::from("/r.png")]);
    }

    /// Above a megapixel the initial image is shrunk in two goes; asking for the resulting size would be one.
    #[test]
    fn a_size_that_is_the_initial_images_own_is_not_asked_for() {
        let recipe = Recipe { size_of_init: true, ..recipe() };
        let request = recipe.request(&Request::default()).unwrap();
        assert_eq!((request.width, request.height), (None, None));
    }

    #[test]
    fn a_new_seed_or_batch_is_a_batch_of_its_own() {
        let request = recipe().request(&Request { seed: vec![7], ..Request::default() }).unwrap();
        assert_eq!((request.part, request.seed), (None, vec![7]));
        let request = recipe().request(&Request { n: Some(3), ..Request::default() }).unwrap();
        assert_eq!(request.part, None);
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
        assert_eq!(request.part.and_then(|part| part.row), Some(3));
    }

    #[test]
    fn changed_files_and_another_model_are_named() {
        let mut made = recipe();
        assert!(recipe().differences(&made).is_empty());
        made.request.references[0].sha256 = Some("cc".into());
        made.model.transformer = "dd".into();
        let found = recipe().differences(&made);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("/r.png") && found[1].contains("transformer"), "{found:?}");
    }
}
