//! The cases of a golden set, read from JSON and converted to requests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kiln_engine::{FileRef, LoraRef, Plan, Request};
use kiln_image::RgbImage;
use kiln_weights::WeightSource;
use serde::Deserialize;
use serde_json::Value;

/// One value or a list of them.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> OneOrMany<T> {
    fn to_vec(&self) -> Vec<T> {
        match self {
            OneOrMany::One(one) => vec![one.clone()],
            OneOrMany::Many(many) => many.clone(),
        }
    }
}

/// A case's JSON file: the call of the diffusers pipeline.
#[derive(Deserialize)]
pub(crate) struct Case {
    pipeline: String,
    model: Option<String>,
    prompts: Option<OneOrMany<String>>,
    /// Where the embeddings of a case without prompts are: `FILE: TENSOR`.
    #[serde(default)]
    prompt_embeds: Vec<String>,
    negative_prompt: Option<String>,
    seed: OneOrMany<u64>,
    width: usize,
    height: usize,
    call_kwargs: CallArguments,
    #[serde(default)]
    reference_images: Vec<String>,
    source_image: Option<String>,
    mask: Option<String>,
    image_reference: Option<String>,
    lora: Option<OneOrMany<String>>,
    lora_weight: Option<OneOrMany<f32>>,
    sigmas: Vec<f32>,
    images: Vec<String>,
    note: Option<String>,
    #[serde(skip)]
    texts: BTreeMap<String, PromptText>,
}

#[derive(Deserialize)]
struct CallArguments {
    width: Option<usize>,
    height: Option<usize>,
    num_inference_steps: usize,
    guidance_scale: Option<f32>,
    sigmas: Option<Vec<f32>>,
    max_sequence_length: Option<usize>,
    num_images_per_prompt: Option<usize>,
    strength: Option<f64>,
    padding_mask_crop: Option<u32>,
    caption_upsample_temperature: Option<f32>,
}

#[derive(Deserialize)]
struct PromptText {
    prompt: String,
}

/// The JSON files of a set's cases.
pub(crate) fn list(set: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(set.join("reference")).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|e| e.path()).filter(|p| is_case(p)).collect();
    files.sort();
    files
}

fn is_case(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let shared = ["prompts.json", "oracles.json", "tolerance.json", "upsample.json"];
    let dump = path.with_extension("safetensors");
    name.ends_with(".json")
        && !shared.contains(&name.as_ref())
        && !name.starts_with("taef2")
        && dump.is_file()
}

/// The text that greedy or sampled upsampling gave, by its name `CASE KIND`.
fn upsampled_text(json: &[u8], name: &str) -> Option<String> {
    let json: Value = serde_json::from_slice(json).ok()?;
    let (case, kind) = name.split_once(' ')?;
    Some(json["cases"][case][format!("{case}.{kind}")]["decoded"].as_str()?.to_owned())
}

/// The file name at the start of a field; some fields have a remark after it.
fn file_name(field: &str) -> &str {
    field.split_whitespace().next().unwrap_or(field)
}

impl Case {
    pub(crate) fn read(set: &Path, file: &Path) -> Result<Case, String> {
        let json = |path: &Path| fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
        let mut case: Case =
            serde_json::from_slice(&json(file)?).map_err(|e| format!("{}: {e}", file.display()))?;
        let texts = json(&set.join("reference/prompts.json"))?;
        let mut texts: BTreeMap<String, Value> = serde_json::from_slice(&texts).map_err(|e| e.to_string())?;
        if let Some(Value::Object(prompts)) = texts.remove("prompts") {
            texts = prompts.into_iter().collect();
        }
        if let Some(name) = case.upsampled() {
            let upsampled = upsampled_text(&json(&set.join("reference/upsample.json"))?, &name);
            let text = upsampled.ok_or_else(|| format!("no upsampled prompt `{name}`"))?;
            case.prompts = Some(OneOrMany::One(name.clone()));
            texts.insert(name, serde_json::json!({ "prompt": text }));
        }
        let read = |(name, value)| Some((name, serde_json::from_value::<PromptText>(value).ok()?));
        case.texts = texts.into_iter().filter_map(read).collect();
        Ok(case)
    }

    /// The checkpoint of the set that it runs on.
    pub(crate) fn model(&self) -> &str {
        let guided = self.call_kwargs.guidance_scale.is_some_and(|g| g > 1.0);
        match (&self.model, self.pipeline.as_str()) {
            (Some(model), _) => model,
            (None, "Flux2Pipeline") => "dev",
            (None, "Flux2KleinKVPipeline") => "klein-kv",
            (None, _) if guided => "klein-base",
            (None, _) => "klein",
        }
    }

    /// The rewritten prompt's name in `upsample.json`, `CASE KIND`, if the pipeline rewrote it.
    fn upsampled(&self) -> Option<String> {
        self.call_kwargs.caption_upsample_temperature?;
        Some(self.note.as_ref()?.rsplit_once("upsample.json ")?.1.to_owned())
    }

    /// Whether texts are padded on the left.
    pub(crate) fn is_left_padded(&self) -> bool {
        self.pipeline == "Flux2Pipeline"
    }

    fn loras(&self, set: &Path) -> Vec<(PathBuf, f32)> {
        let files = self.lora.as_ref().map_or_else(Vec::new, OneOrMany::to_vec);
        let weights = self.lora_weight.as_ref().map_or_else(Vec::new, OneOrMany::to_vec);
        files.iter().zip(weights).map(|(file, weight)| (set.join("tiny").join(file), weight)).collect()
    }

    /// The names of the prompts, in order.
    pub(crate) fn prompt_names(&self) -> Vec<String> {
        self.prompts.as_ref().map_or_else(Vec::new, OneOrMany::to_vec)
    }

    fn text(&self, name: &str) -> Result<String, String> {
        self.texts.get(name).map(|t| t.prompt.clone()).ok_or_else(|| format!("no prompt named `{name}`"))
    }

    /// The file with the text embeddings of a case without prompts: its dump, or one that is written to `scratch`.
    pub(crate) fn embeddings(
        &self,
        dump: &Path,
        prompts: &WeightSource,
        scratch: &Path,
    ) -> Result<Option<FileRef>, String> {
        if self.prompts.is_some() {
            return Ok(None);
        }
        let Some((_, tensor)) = self.prompt_embeds.first().and_then(|place| place.split_once(": ")) else {
            return Ok(Some(FileRef::from(dump.to_path_buf())));
        };
        let embeddings = prompts.tensor(tensor).map_err(|e| e.to_string())?;
        let file = scratch.join("embeddings.safetensors");
        kiln_weights::save::save(&file, &[("prompt_embeds", embeddings)], &BTreeMap::new())
            .map_err(|e| e.to_string())?;
        Ok(Some(FileRef::from(file)))
    }

    /// The equivalent Kiln request, with these text embeddings if it has no prompts.
    pub(crate) fn request(&self, set: &Path, embeds: Option<FileRef>) -> Result<Request, String> {
        let k = &self.call_kwargs;
        let file = |field: &String| FileRef::from(set.join("reference").join(file_name(field)));
        let side = |side: Option<usize>| side.map(|pixels| pixels as u32);
        let texts = self.prompt_names().iter().map(|name| self.text(name)).collect::<Result<_, _>>()?;
        let negative = self.negative_prompt.as_deref().map(|n| self.text(file_name(n))).transpose()?;
        let lora = |(path, weight)| LoraRef { path, weight, sha256: None };
        Ok(Request {
            prompts: texts,
            negative_prompts: negative.into_iter().collect(),
            embeds,
            n: Some(k.num_images_per_prompt.unwrap_or(1) as u32),
            width: side(k.width),
            height: side(k.height),
            steps: Some(k.num_inference_steps as u32),
            sigmas: k.sigmas.clone().unwrap_or_default(),
            guidance: k.guidance_scale,
            seed: self.seed.to_vec(),
            one_generator: true,
            references: self.reference_images.iter().chain(&self.image_reference).map(file).collect(),
            init: self.source_image.as_ref().map(file),
            mask: self.mask.as_ref().map(file),
            strength: k.strength,
            mask_padding: k.padding_mask_crop,
            max_tokens: Some(k.max_sequence_length.unwrap_or(512) as u32),
            loras: self.loras(set).into_iter().map(lora).collect(),
            ..Request::default()
        })
    }

    /// Checks that the plan has diffusers' sigmas (bit for bit), size and number of images.
    pub(crate) fn check_plan(&self, plan: &Plan) -> Result<(), String> {
        if plan.schedule.sigmas() != self.sigmas {
            return Err(format!("sigmas {:?}, expected {:?}", plan.schedule.sigmas(), self.sigmas));
        }
        if (plan.width, plan.height) != (self.width, self.height) {
            return Err(format!(
                "size {}×{}, expected {}×{}",
                plan.width, plan.height, self.width, self.height
            ));
        }
        if plan.images != self.images.len() {
            return Err(format!("{} images, expected {}", plan.images, self.images.len()));
        }
        Ok(())
    }

    /// The image that diffusers generated.
    pub(crate) fn image(&self, file: &Path, index: usize) -> Result<RgbImage, String> {
        let name = self.images.get(index).ok_or_else(|| format!("no image {index}"))?;
        kiln_image::open(&file.with_file_name(name)).map_err(|e| e.to_string())
    }
}
