//! The options as one order that makes sense, before any file is read.

use std::io::Read;
use std::path::PathBuf;

use kiln_model::schedule::Spacing;
use kiln_model::{Parts, Rng};
use kiln_tensor::DType;

use crate::args::{DTypeArg, GenerateArgs, RngArg, ScheduleArg};
use crate::failure::Failure;
use crate::recipe::Replay;
use crate::values::{Device, LoraArg};

/// Image to image keeps the composition and changes the rest.
const STRENGTH: f64 = 0.6;
/// What diffusers' inpainting takes.
const MASK_STRENGTH: f64 = 0.8;
const RHO: f32 = 2.0;
/// Bytes of standard input that are read for a prompt: far more than any model looks at, and an end to endless ones.
const MAX_PROMPT: u64 = 1 << 20;

/// What is asked for.
#[derive(Debug)]
pub struct Order {
    /// Path or name; the model inside the program when absent.
    pub model: Option<PathBuf>,
    /// Parts to use instead of the model's, without the autoencoder.
    pub parts: Parts,
    pub words: Words,
    /// Pictures for each prompt; decided by the seeds when absent.
    pub batch: Option<usize>,
    pub chance: Chance,
    pub rng: RngArg,
    pub width: Option<usize>,
    pub height: Option<usize>,
    pub steps: Option<usize>,
    pub sigmas: Option<Vec<f32>>,
    pub schedule: ScheduleArg,
    pub rho: f32,
    pub guidance: Option<f32>,
    pub references: Vec<PathBuf>,
    pub start: Start,
    pub loras: Vec<LoraArg>,
    pub lora_partial: bool,
    pub vae: Option<PathBuf>,
    /// The model's own number when absent.
    pub max_tokens: Option<usize>,
    pub device: Device,
    pub precision: Precision,
}

/// What is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Not said: the model decides.
    Auto,
    F32,
    Bf16,
    /// Products of integers, activations between them in bf16.
    Int8,
    /// Products of 8-bit floats, activations between them in bf16.
    Fp8,
}

impl Precision {
    /// The dtype of activations.
    pub fn dtype(self) -> DType {
        match self {
            Precision::Auto | Precision::F32 => DType::F32,
            Precision::Bf16 | Precision::Int8 | Precision::Fp8 => DType::BF16,
        }
    }

    /// The word on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Auto | Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Int8 => "int8",
            Precision::Fp8 => "fp8",
        }
    }
}

/// What the pictures show.
#[derive(Debug, PartialEq)]
pub enum Words {
    Prompts { texts: Vec<String>, negative: Option<String> },
    Embeds { file: PathBuf, row: Option<usize> },
}

/// Where the noise comes from.
#[derive(Debug, PartialEq)]
pub enum Chance {
    Seed(u64),
    /// One picture of a batch again.
    Part {
        seed: u64,
        index: usize,
        of: usize,
    },
    Seeds(Vec<u64>),
    /// Given; perhaps one picture of a batch again.
    File {
        path: PathBuf,
        part: Option<(usize, usize)>,
    },
}

/// How a picture begins.
#[derive(Debug, PartialEq)]
pub enum Start {
    Noise,
    Picture { init: PathBuf, strength: f64 },
    Masked { init: PathBuf, mask: PathBuf, strength: f64, padding: Option<u32> },
}

impl Order {
    /// Checks what the options say together. Reads standard input if that is the prompt.
    pub fn new(args: &GenerateArgs, replay: Replay) -> Result<Order, Failure> {
        let words = words(args, replay)?;
        if args.rho.is_some() && args.schedule != Some(ScheduleArg::Power) {
            return Err(Failure::usage("--rho goes with --schedule power"));
        }
        Ok(Order {
            model: args.model.clone(),
            parts: Parts {
                transformer: args.transformer.clone(),
                text_encoder: args.text_encoder.clone(),
                vae: None,
                tokenizer: args.tokenizer.clone(),
                variant: args.variant.map(Into::into),
                others: Vec::new(),
            },
            words,
            batch: args.batch,
            chance: chance(args, replay)?,
            rng: args.rng.unwrap_or_default(),
            width: args.width,
            height: args.height,
            steps: args.steps,
            sigmas: Some(args.sigmas.clone()).filter(|s| !s.is_empty()),
            schedule: args.schedule.unwrap_or_default(),
            rho: args.rho.unwrap_or(RHO),
            guidance: args.guidance,
            references: args.references.clone(),
            start: start(args)?,
            loras: args.loras.clone(),
            lora_partial: args.lora_partial,
            vae: args.vae.clone(),
            max_tokens: args.max_tokens.map(|n| n as usize),
            device: args.machine.device.unwrap_or(Device::Auto),
            precision: match args.machine.dtype.unwrap_or_default() {
                DTypeArg::Auto => Precision::Auto,
                DTypeArg::F32 => Precision::F32,
                DTypeArg::Bf16 => Precision::Bf16,
                DTypeArg::Int8 => Precision::Int8,
                DTypeArg::Fp8 => Precision::Fp8,
            },
        })
    }

    pub fn spacing(&self) -> Spacing {
        match self.schedule {
            ScheduleArg::Shifted => Spacing::Shifted,
            ScheduleArg::Power => Spacing::Power { rho: self.rho },
        }
    }

    pub fn rng(&self) -> Rng {
        match self.rng {
            RngArg::Cpu => Rng::Cpu,
            RngArg::CpuBf16 => Rng::CpuBf16,
            RngArg::CpuF16 => Rng::CpuF16,
            RngArg::Cuda => Rng::Cuda,
        }
    }

    /// Pictures for each of `prompts`, and a check that there is a seed for each picture.
    pub fn per_prompt(&self, prompts: usize) -> Result<usize, Failure> {
        let Chance::Seeds(seeds) = &self.chance else { return Ok(self.batch.unwrap_or(1)) };
        let fitting = seeds.len() / prompts.max(1);
        let per_prompt = self.batch.unwrap_or(fitting.max(1));
        if per_prompt.checked_mul(prompts) != Some(seeds.len()) {
            let (seeds, pictures) = (seeds.len(), per_prompt.saturating_mul(prompts));
            return Err(Failure::usage(format!("{seeds} seeds were given for {pictures} pictures"))
                .hint("give one seed for all, or one for each picture"));
        }
        Ok(per_prompt)
    }
}

fn words(args: &GenerateArgs, replay: Replay) -> Result<Words, Failure> {
    if let Some(file) = &args.embeds {
        if args.negative.is_some() {
            return Err(Failure::usage("-n and --embeds don't go together")
                .hint("put `negative_prompt_embeds` into the file of embeddings"));
        }
        return Ok(Words::Embeds { file: file.clone(), row: replay.embeds_row });
    }
    if args.prompts.is_empty() {
        return Err(Failure::usage("no prompt was given")
            .hint("say what to paint: kiln generate \"a red apple on a blue background\"; `-` reads it from standard input"));
    }
    let mut texts = args.prompts.clone();
    // A prompt out of a recipe is meant literally, whatever it is.
    let mut piped = texts.iter_mut().filter(|text| !replay.words && *text == "-");
    if let Some(text) = piped.next() {
        *text = standard_input()?;
        if piped.next().is_some() {
            return Err(Failure::usage("standard input can be one prompt only, found `-` twice"));
        }
    }
    Ok(Words::Prompts { texts, negative: args.negative.clone() })
}

fn standard_input() -> Result<String, Failure> {
    let unreadable = |why: String| Failure::new(format!("can't read the prompt from standard input: {why}"));
    let mut bytes = Vec::new();
    let mut input = std::io::stdin().lock().take(MAX_PROMPT + 1);
    input.read_to_end(&mut bytes).map_err(|e| unreadable(e.to_string()))?;
    if bytes.len() as u64 > MAX_PROMPT {
        return Err(unreadable(format!("it is longer than {}", crate::values::bytes(MAX_PROMPT)))
            .hint("models look at a page of text; give the words that matter"));
    }
    let text =
        String::from_utf8(bytes).map_err(|e| unreadable(e.to_string()).hint("it must be UTF-8 text"))?;
    // The end of the last line is the shell's, not the prompt's.
    let trimmed = text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t));
    Ok(trimmed.to_owned())
}

fn chance(args: &GenerateArgs, replay: Replay) -> Result<Chance, Failure> {
    if let Some(path) = &args.noise {
        return Ok(Chance::File { path: path.clone(), part: replay.part });
    }
    Ok(match (&args.seed[..], replay.part) {
        ([], _) => Chance::Seed(random_seed()?),
        (&[seed], Some((index, of))) => Chance::Part { seed, index, of },
        (&[seed], None) => Chance::Seed(seed),
        (seeds, _) => Chance::Seeds(seeds.to_vec()),
    })
}

/// Short enough to be typed again: torch's CPU generator looks at 32 bits only.
fn random_seed() -> Result<u64, Failure> {
    let seed = getrandom::u32().map_err(|e| {
        Failure::new(format!("the system has no random numbers: {e}")).hint("choose a seed with -S")
    })?;
    Ok(seed.into())
}

fn start(args: &GenerateArgs) -> Result<Start, Failure> {
    let needs = |option: &str, other: &str, what: &str| {
        Err(Failure::usage(format!("{option} needs {other}")).hint(format!("give {what} with {other}")))
    };
    match (&args.init, &args.mask) {
        (None, Some(_)) => needs("--mask", "--init", "the picture that the mask belongs to"),
        (None, None) if args.strength.is_some() => needs("--strength", "--init", "the picture to start from"),
        (_, None) if args.mask_padding.is_some() => needs("--mask-padding", "--mask", "the place to repaint"),
        (None, None) => Ok(Start::Noise),
        (Some(init), None) => {
            Ok(Start::Picture { init: init.clone(), strength: args.strength.unwrap_or(STRENGTH) })
        }
        (Some(init), Some(mask)) => Ok(Start::Masked {
            init: init.clone(),
            mask: mask.clone(),
            strength: args.strength.unwrap_or(MASK_STRENGTH),
            padding: args.mask_padding,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Kind;

    fn args() -> GenerateArgs {
        GenerateArgs { prompts: vec!["a fox".into()], model: Some("m".into()), ..Default::default() }
    }

    fn order(args: &GenerateArgs) -> Result<Order, Failure> {
        Order::new(args, Replay::default())
    }

    #[test]
    fn what_does_not_go_together_is_a_usage_error() {
        let wrong = [
            GenerateArgs { prompts: vec![], ..args() },
            GenerateArgs { mask: Some("m.png".into()), ..args() },
            GenerateArgs { strength: Some(0.5), ..args() },
            GenerateArgs { init: Some("i.png".into()), mask_padding: Some(8), ..args() },
            GenerateArgs { rho: Some(2.0), ..args() },
            GenerateArgs { prompts: vec![], embeds: Some("e".into()), negative: Some("n".into()), ..args() },
        ];
        for args in wrong {
            assert_eq!(order(&args).unwrap_err().kind, Kind::Usage, "{args:?}");
        }
    }

    #[test]
    fn strength_has_a_default_for_each_task() {
        let init = GenerateArgs { init: Some("i".into()), ..args() };
        assert!(matches!(order(&init).unwrap().start, Start::Picture { strength: STRENGTH, .. }));
        let masked = GenerateArgs { mask: Some("m".into()), ..init };
        assert!(matches!(order(&masked).unwrap().start, Start::Masked { strength: MASK_STRENGTH, .. }));
    }

    #[test]
    fn a_list_of_seeds_decides_how_many_pictures_there_are() {
        let seeds = |n: u64| order(&GenerateArgs { seed: (0..n).collect(), ..args() }).unwrap();
        assert_eq!(seeds(3).per_prompt(1).unwrap(), 3);
        assert_eq!(seeds(4).per_prompt(2).unwrap(), 2);
        assert!(seeds(3).per_prompt(2).is_err());
        assert!(seeds(2).per_prompt(3).is_err());
        assert_eq!(seeds(1).chance, Chance::Seed(0));
        assert_eq!(seeds(1).per_prompt(2).unwrap(), 1);
    }

    #[test]
    fn a_seed_is_found_when_none_is_given() {
        let (a, b) = (order(&args()).unwrap().chance, order(&args()).unwrap().chance);
        assert!(matches!(a, Chance::Seed(_)));
        assert_ne!(a, b, "two random seeds are equal once in four billion runs");
    }
}
