//! How a picture was made, as JSON inside it. `kiln generate --from` reads it back.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::args::{DTypeArg, GenerateArgs, RngArg, ScheduleArg, VariantArg};
use crate::failure::{Failure, While};
use crate::files;
use crate::values::LoraArg;

/// Everything that decides the pixels of one picture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The version of Kiln that made it.
    pub kiln: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub negative: Option<String>,
    /// Instead of a prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeds: Option<Row>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    pub rng: RngArg,
    /// Instead of a seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise: Option<Used>,
    /// Which picture of the batch it is, from 0.
    pub index: usize,
    /// Pictures whose noise was drawn together.
    pub batch: usize,
    pub model: Model,
    pub width: usize,
    pub height: usize,
    pub steps: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sigmas: Option<Vec<f32>>,
    pub schedule: ScheduleArg,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rho: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance: Option<f32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub references: Vec<Used>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<Used>,
    /// The size is the initial picture's own: asking for the same numbers would resize it another way.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub size_of_init: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<Used>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strength: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_padding: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loras: Vec<LoraUsed>,
    /// What of them fits no layer was left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lora_partial: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vae: Option<Used>,
    pub max_tokens: usize,
    pub dtype: String,
    /// What computed it.
    pub backend: String,
}

/// A file that went into a picture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Used {
    pub path: String,
    /// SHA-256 of a picture or tensor file, the fingerprint of weights.
    pub sha256: String,
}

/// One entry of a file with several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    #[serde(flatten)]
    pub file: Used,
    pub row: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraUsed {
    #[serde(flatten)]
    pub file: Used,
    pub weight: f32,
}

/// The model and the fingerprints of its parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Where it is, or its name where it needs no path: inside the program or in the models folder.
    pub path: String,
    pub variant: String,
    pub transformer: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_encoder: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vae: Option<String>,
    /// Parts that are not the model's own.
    #[serde(default, skip_serializing_if = "OtherParts::is_empty")]
    pub parts: OtherParts,
}

/// Where parts of a model come from that were named, and what it was said to be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OtherParts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transformer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_encoder: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<VariantArg>,
}

impl OtherParts {
    /// Of the options.
    pub fn new(args: &GenerateArgs) -> OtherParts {
        let path = |path: &Option<PathBuf>| path.as_deref().map(files::absolute);
        OtherParts {
            transformer: path(&args.transformer),
            text_encoder: path(&args.text_encoder),
            tokenizer: path(&args.tokenizer),
            variant: args.variant,
        }
    }

    fn is_empty(&self) -> bool {
        *self == OtherParts::default()
    }

    fn fill(&self, args: &mut GenerateArgs) {
        or_take(&mut args.transformer, &self.transformer.as_ref().map(PathBuf::from));
        or_take(&mut args.text_encoder, &self.text_encoder.as_ref().map(PathBuf::from));
        or_take(&mut args.tokenizer, &self.tokenizer.as_ref().map(PathBuf::from));
        or_take(&mut args.variant, &self.variant);
    }
}

/// What of a recipe no option can say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Replay {
    /// The picture's place in its batch: index and size. Lost when seed, prompt or batch are chosen anew.
    pub part: Option<(usize, usize)>,
    /// Which of the embeddings in the file.
    pub embeds_row: Option<usize>,
    /// The prompt is the recipe's: a `-` is no standard input.
    pub words: bool,
}

impl Recipe {
    /// The recipe inside a picture file.
    pub fn read(path: &Path) -> Result<Recipe, Failure> {
        let reading = || format!("reading the recipe of `{}`", path.display());
        let bytes = files::read_picture_bytes(path).while_doing(reading)?;
        let name = path.display().to_string();
        let text = kiln_image::read_recipe(&bytes).map_err(|e| e.named(&name)).while_doing(reading)?;
        let text = text.ok_or_else(|| {
            Failure::new(format!("there is no recipe in `{}`", path.display())).hint(
                "only pictures that Kiln made have one, and other programs drop it when they save a picture",
            )
        })?;
        Recipe::parse(&text).while_doing(reading)
    }

    pub fn parse(text: &str) -> Result<Recipe, Failure> {
        serde_json::from_str(text).map_err(|e| {
            Failure::new(format!("the recipe makes no sense: {e}"))
                .hint("it may come from another version of Kiln; `kiln info` shows it as it is")
        })
    }

    pub fn to_json(&self) -> String {
        // Strings, numbers and lists: there is nothing in it that JSON can't hold.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Fills the options that were left out.
    pub fn fill(&self, args: &mut GenerateArgs) -> Replay {
        let path = |used: &Used| PathBuf::from(&used.path);
        let mut replay = Replay::default();
        if args.prompts.is_empty() && args.embeds.is_none() {
            replay.words = true;
            args.prompts.extend(self.prompt.clone());
            args.embeds = self.embeds.as_ref().map(|e| path(&e.file));
            replay.embeds_row = self.embeds.as_ref().map(|e| e.row);
        }
        if args.embeds.is_none() {
            or_take(&mut args.negative, &self.negative);
        }
        if args.seed.is_empty() && args.noise.is_none() {
            args.seed.extend(self.seed);
            args.noise = self.noise.as_ref().map(path);
            replay.part =
                (args.batch.is_none() && args.prompts.len() <= 1).then_some((self.index, self.batch));
        }
        if args.references.is_empty() {
            args.references = self.references.iter().map(path).collect();
        }
        if args.model.is_none() && args.transformer.is_none() {
            args.model = Some(PathBuf::from(&self.model.path));
            self.model.parts.fill(args);
        }
        or_take(&mut args.init, &self.init.as_ref().map(path));
        or_take(&mut args.mask, &self.mask.as_ref().map(path));
        if args.init.is_some() {
            or_take(&mut args.strength, &self.strength);
        }
        if args.mask.is_some() {
            or_take(&mut args.mask_padding, &self.mask_padding);
        } else if !self.size_of_init {
            or_take(&mut args.width, &Some(self.width));
            or_take(&mut args.height, &Some(self.height));
        }
        if args.sigmas.is_empty() && args.steps.is_none() {
            args.sigmas = self.sigmas.clone().unwrap_or_default();
        }
        if args.sigmas.is_empty() || self.sigmas.as_ref() == Some(&args.sigmas) {
            or_take(&mut args.steps, &Some(self.steps).filter(|n| *n > 0));
        }
        or_take(&mut args.rng, &Some(self.rng));
        or_take(&mut args.schedule, &Some(self.schedule));
        if args.schedule == Some(ScheduleArg::Power) {
            or_take(&mut args.rho, &self.rho);
        }
        or_take(&mut args.guidance, &self.guidance);
        if args.loras.is_empty() {
            let lora = |l: &LoraUsed| LoraArg { path: path(&l.file), weight: l.weight };
            args.loras = self.loras.iter().map(lora).collect();
            args.lora_partial |= self.lora_partial;
        }
        or_take(&mut args.vae, &self.vae.as_ref().map(path));
        or_take(&mut args.max_tokens, &u32::try_from(self.max_tokens).ok());
        let dtype = match self.dtype.as_str() {
            "bf16" => DTypeArg::Bf16,
            "int8" => DTypeArg::Int8,
            "fp8" => DTypeArg::Fp8,
            _ => DTypeArg::F32,
        };
        or_take(&mut args.machine.dtype, &Some(dtype));
        replay
    }

    /// Why `made`, made after this recipe, may look different: files that are no longer the same.
    pub fn differences(&self, made: &Recipe) -> Vec<String> {
        let mut differences = Vec::new();
        let ours: Vec<&Used> = self.files().collect();
        for file in made.files() {
            if ours.iter().any(|o| o.path == file.path && o.sha256 != file.sha256) {
                differences.push(format!("`{}` has changed since the picture was made", file.path));
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
                differences.push(format!("the {part} of `{path}` is not the one the picture was made with"));
            }
        }
        differences
    }

    fn files(&self) -> impl Iterator<Item = &Used> {
        let single = [&self.noise, &self.init, &self.mask, &self.vae].into_iter().flatten();
        let embeds = self.embeds.iter().map(|e| &e.file);
        single.chain(embeds).chain(&self.references).chain(self.loras.iter().map(|l| &l.file))
    }
}

fn or_take<T: Clone>(option: &mut Option<T>, value: &Option<T>) {
    if option.is_none() {
        option.clone_from(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe() -> Recipe {
        let json = r#"{"kiln":"0.1.0","prompt":"a fox","seed":18446744073709551615,"rng":"cpu","index":1,"batch":2,
            "model":{"path":"/m","variant":"klein","transformer":"aa"},"width":64,"height":96,"steps":4,
            "schedule":"shifted","references":[{"path":"/r.png","sha256":"bb"}],"max_tokens":512,"dtype":"f32",
            "backend":"cpu","from_the_future":1}"#;
        Recipe::parse(json).unwrap()
    }

    #[test]
    fn json_keeps_every_field() {
        assert_eq!(Recipe::parse(&recipe().to_json()).unwrap(), recipe());
        assert_eq!(recipe().seed, Some(u64::MAX));
        assert!(Recipe::parse("{}").unwrap_err().to_string().contains("missing field"));
    }

    #[test]
    fn options_given_beside_a_recipe_win() {
        let mut args = GenerateArgs { width: Some(128), ..Default::default() };
        let replay = recipe().fill(&mut args);
        assert_eq!((args.width, args.height), (Some(128), Some(96)));
        assert_eq!((args.prompts, args.seed), (vec!["a fox".into()], vec![u64::MAX]));
        assert_eq!(replay.part, Some((1, 2)));
    }

    /// Above a megapixel the initial picture is shrunk in two goes; asking for the resulting size would be one.
    #[test]
    fn a_size_that_is_the_initial_pictures_own_is_not_asked_for() {
        let mut args = GenerateArgs::default();
        Recipe { size_of_init: true, ..recipe() }.fill(&mut args);
        assert_eq!((args.width, args.height), (None, None));
    }

    #[test]
    fn a_new_seed_or_batch_is_a_batch_of_its_own() {
        let mut args = GenerateArgs { seed: vec![7], ..Default::default() };
        assert_eq!(recipe().fill(&mut args).part, None);
        assert_eq!(args.seed, [7]);
        let mut args = GenerateArgs { batch: Some(3), ..Default::default() };
        assert_eq!(recipe().fill(&mut args).part, None);
    }

    #[test]
    fn changed_files_and_another_model_are_told() {
        let mut made = recipe();
        assert!(recipe().differences(&made).is_empty());
        made.references[0].sha256 = "cc".into();
        made.model.transformer = "dd".into();
        let found = recipe().differences(&made);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("/r.png") && found[1].contains("transformer"), "{found:?}");
    }
}
