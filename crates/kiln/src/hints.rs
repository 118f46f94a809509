//! Hints: what to do about an error. The libraries say what is wrong; only the program knows the options.

use kiln_engine::{MissingComponent, Model};
use kiln_model::Error;
use kiln_models::cache;
use kiln_weights::{Component, LoraProblem, MalformedFile};

use crate::error::{CliError, ErrorKind};
use crate::values;

const DOWNLOAD_AGAIN: &str = "the download is incomplete or the file is damaged; download it again";
const OTHER_MODEL: &str = "a LoRA fits only the model it was trained on: klein 4B, klein 9B and dev differ; \
                           compare both with `kiln info`";

const DESCRIBED: &str = "`kiln generate --help` describes the values of every option";

/// What to do about an error for which nothing more specific is known; `None` if it is none.
pub fn general(error: &CliError) -> Option<String> {
    let starts = |words: &[&str]| words.iter().any(|word| error.message.starts_with(word));
    let hint = match error.kind {
        ErrorKind::Cancelled | ErrorKind::Refused => return None,
        ErrorKind::Usage => "`kiln --help` lists the commands, `kiln COMMAND --help` the options of one",
        ErrorKind::Failed if starts(&["can't write", "can't create", "can't save"]) => {
            "check that the disk is not full and that the folder is writable"
        }
        ErrorKind::Failed if starts(&["can't read", "can't open", "can't map", "can't list"]) => {
            "check that the file exists and is readable"
        }
        ErrorKind::Failed if starts(&["can't start"]) => {
            "check the limits on threads and memory (`ulimit -a`)"
        }
        ErrorKind::Failed => {
            "if it happens again, report it with the command and with what `kiln doctor` prints"
        }
    };
    Some(hint.into())
}

pub fn engine(error: &kiln_engine::Error) -> Option<String> {
    use kiln_engine::Error;
    match error {
        Error::Mismatch { .. } => Some(
            "the components belong to different models: klein 4B needs Qwen3-4B (hidden size 2560), klein 9B needs \
             Qwen3-8B (4096), dev needs Mistral-Small-3.2-24B (5120); take all folders from one download"
                .into(),
        ),
        Error::Memory { any_size: true, .. } => Some(
            "no image size is small enough: the transformer is too wide for this machine, if its config.json is \
             right; a lower --max-tokens may help"
                .into(),
        ),
        Error::Memory { .. } => Some("use a smaller size (-W, -H) or fewer reference images".into()),
        Error::Value { hint, .. } | Error::Request { hint, .. } | Error::Combination { hint, .. } => {
            hint.clone().or_else(|| Some(DESCRIBED.into()))
        }
        Error::Device { hint, .. } => {
            hint.clone().or_else(|| Some("`kiln doctor` shows the devices of this machine".into()))
        }
        Error::Model(error) => model(error),
        // Its hint depends on the model.
        Error::MissingComponent { .. } => None,
        Error::Load(_) | Error::Panicked(_) | Error::Context { .. } => None,
    }
}

pub fn model(error: &kiln_model::Error) -> Option<String> {
    match error {
        Error::NotFinite { .. } => Some(
            "the guidance or the weight of a --lora is too large, or the model's weights are damaged; lower them, or \
             download the model again"
                .into(),
        ),
        Error::Read { .. } => Some("check that the file exists and is readable".into()),
        // The error names a folder when a file is missing in it.
        Error::Config { file, .. } if file.is_dir() => Some("download that component of the model, too".into()),
        // Only people write these.
        Error::Config { file, .. } if file.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) => {
            Some("correct the file: it names the model's parts, such as transformer = \"FILE\"".into())
        }
        Error::Config { what, .. } => Some(config(what).into()),
        Error::Weights(error) => weights(error),
        Error::Image(error) => image(error),
        Error::Ops(error) => ops(error),
        Error::Tokenizer(_) => Some(
            "the tokenizer does not belong to this text encoder: take both from one download, or give its own with \
             --tokenizer"
                .into(),
        ),
        Error::Request(_) => Some(DESCRIBED.into()),
        Error::Tensor(_) | Error::Cancelled => None,
    }
}

/// Hint for a configuration, by what is wrong with it.
fn config(what: &str) -> &'static str {
    let hints = [
        (
            "scaled rotary",
            "take the text encoder from the model's own download: Kiln runs Qwen3 as it is published",
        ),
        (
            "tokenizer: the chat template",
            "without a chat template the one that FLUX.2 was trained with is used; or give another tokenizer with --tokenizer",
        ),
        ("partial_rotary_factor", "take the text encoder from the model's own download"),
        (
            "the scheduler is",
            "use FLUX.2's own scheduler: without `scheduler` in model_index.json it is used",
        ),
        ("the pipeline is", "Kiln runs the FLUX.2 models; `kiln pull klein-4b` downloads one"),
        ("neither TAEF2 nor", "`kiln info` shows what the file contains"),
        ("tensors that every FLUX.2", "`kiln info` shows what the file contains"),
        ("this text encoder has a vocabulary", "give its own tokenizer with --tokenizer"),
        (
            "this is a VAE of",
            "use FLUX.2's autoencoder (flux2-vae.safetensors); `kiln pull klein-4b` downloads it with its model",
        ),
        (
            "num_hidden_layers is",
            "take the whole text encoder, with all of its tensors, from the model's own download",
        ),
    ];
    let own = hints.iter().find(|(start, _)| what.starts_with(start)).map(|(_, hint)| *hint);
    own.unwrap_or("check the file, or download the model again")
}

pub fn weights(error: &kiln_weights::Error) -> Option<String> {
    use kiln_weights::Error;
    let hint = match error {
        Error::NotFound { .. } => "check the path",
        Error::Io { doing: "write", .. } => "check that the disk is not full and that the folder is writable",
        Error::Io { .. } => "check that the file is readable",
        Error::NotAFile { .. } => "give a safetensors or GGUF file",
        Error::WrongComponent { component, .. } => {
            return Some(format!(
                "give a file with FLUX.2's {component}; `kiln info` shows what a file contains"
            ));
        }
        Error::UnsupportedQuantization { .. } => {
            "download the model in another format: bf16, fp8, nvfp4 or GGUF"
        }
        Error::CannotSplit { .. } => DOWNLOAD_AGAIN,
        Error::Malformed {
            problem: MalformedFile::GgufType { .. } | MalformedFile::UnknownGgufType { .. },
            ..
        } => {
            "the file is complete, but Kiln does not support its quantization; download the model as Q4_K_M, Q5_K_M, \
             Q6_K or Q8_0"
        }
        Error::Malformed { problem: MalformedFile::SplitGguf { .. }, .. } => {
            "put all parts into one folder and merge them: llama-gguf-split --merge FIRST-PART OUT.gguf"
        }
        Error::Malformed { problem: MalformedFile::DType { .. }, .. } => {
            "the file is complete, but Kiln does not support its data type; download the model in bf16"
        }
        Error::Malformed { problem: MalformedFile::OtherFormat(_), .. } => {
            "download the file itself, as safetensors or GGUF"
        }
        Error::ShardIndex { .. } | Error::DuplicateTensor { .. } => {
            "download the index and all its shards again, from one repository"
        }
        Error::Malformed { .. } | Error::MissingShards { .. } | Error::NotInShard { .. } => DOWNLOAD_AGAIN,
        Error::NoWeights { .. } => "download this component of the model, too, as safetensors",
        Error::Shape { found, expected, .. } if is_transposed(found.dims(), expected.dims()) => {
            "the matrix is transposed: the program that wrote the file stores matrices the other way round; get the \
             file from its origin"
        }
        Error::MissingTensor { .. } | Error::Shape { .. } => {
            "the weights don't belong to the config.json next to them: take both from one download"
        }
        Error::Delta { .. } => "take the file from the same version of Kiln as the program",
        Error::NothingToQuantize { already_int8: true, .. } => "use the model as it is, with --dtype int8",
        Error::NothingToQuantize { .. } => "give a FLUX.2 model in diffusers' layout",
        Error::NotFinite { .. } => DOWNLOAD_AGAIN,
        Error::Tensor { source: kiln_tensor::Error::Conversion { .. }, .. } => {
            "the file is quantized in a way that Kiln does not read; download the model in bf16, fp8 or as GGUF"
        }
        Error::AmbiguousWeights { .. } => "give the file itself instead of its folder",
        Error::UnusedTensors { .. }
        | Error::TwoNames { .. }
        | Error::Linear { .. }
        | Error::Tensor { .. } => {
            "the file may be of another model, or of a format that Kiln does not read; \
             `kiln info` shows what it contains"
        }
        Error::ForeignQuantization { .. } => "download the model in another format: bf16, fp8, nvfp4 or GGUF",
        Error::InvalidTensor { .. } => "the file may be damaged; `kiln info` shows what it contains",
        Error::RequiresGguf { .. } => "end OUT in .gguf",
        Error::RequiresSafetensors { .. } => "end OUT in .safetensors",
        Error::LoraUnmatched { keys, total, .. } if keys.len() < *total => {
            "it may be for another model (compare both with `kiln info`); --lora-partial uses what fits"
        }
        Error::LoraUnmatched { .. } => OTHER_MODEL,
        Error::Lora { problem, .. } => lora(problem),
        _ => return None,
    };
    Some(hint.into())
}

fn is_transposed(found: &[usize], expected: &[usize]) -> bool {
    matches!((found, expected), ([a, b], [c, d]) if a != b && [a, b] == [d, c])
}

fn lora(problem: &LoraProblem) -> &'static str {
    if problem.settings_file().is_some() {
        return "take the LoRA and its adapter_config.json, which sets its scale, from one download";
    }
    match problem {
        LoraProblem::Shape { .. }
        | LoraProblem::WrongBase { .. }
        | LoraProblem::Flux1
        | LoraProblem::UnknownModules { .. } => OTHER_MODEL,
        LoraProblem::Quantized { .. } | LoraProblem::DType { .. } => {
            "get the LoRA as f32, bf16, f16 or fp8, in which LoRAs are published"
        }
        LoraProblem::UnknownInModule { .. } => {
            "it may change the scale of the module; save the LoRA with the program that made it, without this key"
        }
        LoraProblem::UnsupportedKind { .. } => "LoRA, LoKr, LoHa and DoRA of linear layers are supported",
        LoraProblem::WholeModel { .. } => {
            "use a model with -m, or its parts with --transformer, --text-encoder and --vae"
        }
        LoraProblem::NothingElse(problem) => match **problem {
            LoraProblem::UnknownKeys { .. } => "this is not a LoRA; `kiln info` shows what a file contains",
            _ => "there is nothing in it for the transformer, so that Kiln can't use it",
        },
        LoraProblem::TextEncoder { .. } | LoraProblem::OtherPart { .. } => {
            "--lora-partial ignores these and uses the rest"
        }
        LoraProblem::MetadataAlpha { .. } => {
            "programs differ in which one they use; save the LoRA again with the program that made it"
        }
        LoraProblem::DoraOfColumns { .. } => "use --dora-rule comfyui: diffusers does not read such a DoRA",
        LoraProblem::Setting { .. } => "merge it into its model with PEFT, and use the merged model",
        LoraProblem::Adapters { .. } => "save each adapter to a file of its own, and give both with --lora",
        LoraProblem::UnknownKeys { .. } => {
            "if it is a LoRA, --lora-partial ignores these and uses the rest; `kiln info` shows what a file contains"
        }
        LoraProblem::Empty => "this is not a LoRA; `kiln info` shows what a file contains",
        _ => {
            "the file is damaged or incomplete; download it again, or save it with diffusers' `save_lora_weights`"
        }
    }
}

pub fn image(error: &kiln_image::Error) -> Option<String> {
    use kiln_image::Error;
    if let Some(program) = error.converter() {
        return Some(format!("convert it to PNG or JPEG first, such as with `{program} IN OUT.png`"));
    }
    let hint = match error {
        Error::NotAnImage { .. } => "convert it to PNG or JPEG first",
        Error::Damaged { .. } => "open it in another program and save it again",
        Error::TooLarge { .. } | Error::FileTooLarge { .. } => "scale it down: the models see one megapixel",
        Error::TooSmall { .. } => "use a larger image",
        Error::AspectRatio { .. } => "crop it",
        Error::EmptyMask { .. } => "paint the area to change white, or leave out --mask-padding",
        Error::TooLong { .. } => "choose a smaller size with -W or -H",
        Error::Format { .. } => "end the name in .png, .jpg or .webp",
        Error::Encode { .. } => "choose another format with -o, such as .png, or a smaller size",
        Error::Write { .. } => "choose another path with -o",
        Error::Read { .. } => "check the path",
        _ => return None,
    };
    Some(hint.into())
}

/// What to do about a training's error.
pub fn train(error: &kiln_train::Error) -> Option<String> {
    use kiln_train::Error;
    match error {
        Error::Data { hint, .. } => hint.clone(),
        Error::Diverged { saved: Some(step), .. } => Some(format!(
            "continue from the checkpoint of step {step} with --resume and a lower --lr (a third) or --dtype f32; or start \
             over with --overwrite, a lower --lr and a longer --warmup"
        )),
        Error::Diverged { saved: None, .. } => {
            Some("start again with a lower --lr (a third), a longer --warmup, or --dtype f32".into())
        }
        Error::InUse { .. } => Some("wait until it ends, or choose another -o".into()),
        Error::Io { doing: "read", .. } => Some("check the path".into()),
        Error::Io { .. } => Some("check that the disk is not full and the folder is writable".into()),
        Error::Settings(_) => Some("see `kiln train --help`".into()),
        Error::State(_) => Some("the state is damaged: start without --resume, with --overwrite".into()),
        _ => None,
    }
}

pub fn ops(error: &kiln_ops::Error) -> Option<String> {
    match error {
        kiln_ops::Error::Memory { backend, .. } if backend.starts_with("cuda") => {
            let hint = "use a smaller size (-W, -H), stream weights with --vram-limit, halve them with --dtype fp8, \
                        or use --device cpu";
            Some(hint.into())
        }
        kiln_ops::Error::Memory { .. } => Some("use a smaller size (-W, -H), or close other programs".into()),
        _ => None,
    }
}

pub fn hub(error: &kiln_hub::Error) -> Option<String> {
    use kiln_hub::Error;
    let list = |files: &[kiln_hub::RemoteFile]| {
        let shown =
            files.iter().take(30).map(|file| format!("\n  {} ({})", file.path, values::bytes(file.size)));
        let more = files.len().saturating_sub(30);
        let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
        shown.collect::<String>() + &more
    };
    Some(match error {
        Error::InvalidName { .. } => {
            let names = kiln_family::aliases().map(|alias| alias.name).collect::<Vec<_>>().join(", ");
            format!("known names: {names}; or give OWNER/REPO")
        }
        Error::NoCache => "set HF_HOME to a folder".into(),
        Error::Variable { .. } => "correct the variable, or unset it".into(),
        Error::Unauthorised { repo, .. } => format!(
            "check the name; if the model is gated, accept its terms on its page ({repo}) and put an access token of \
             that account into HF_TOKEN"
        ),
        Error::Gated { page, .. } => {
            format!("accept the terms on {page} with the account of the access token in HF_TOKEN")
        }
        Error::NotFound { .. } => "check the name; it must match the model's page".into(),
        Error::Connection { .. } => {
            "check the connection (HTTPS_PROXY sets a proxy) and run the same command again: the download resumes".into()
        }
        Error::BadResponse { .. } => "check HF_ENDPOINT, or try again later".into(),
        Error::UnsafeName { .. } => "don't trust this repository".into(),
        Error::Checksum { .. } => "run the same command again: it downloads that file anew".into(),
        Error::NoMatch { files, .. } | Error::Ambiguous { files, .. } => {
            format!("add a colon and a file name, or a part of it:{}", list(files))
        }
        Error::NoSpace { .. } => {
            "free some space, or set HF_HOME to a folder on a larger disk; `kiln models` lists what is there".into()
        }
        Error::InProgress { .. } => "wait for it to finish".into(),
        Error::Io { .. } => {
            "check that the folder is writable and the disk is not full; HF_HOME sets another folder".into()
        }
        Error::Cancelled => return None,
    })
}

/// Hint for a model that lacks a component the request needs.
pub fn missing_component(model: &Model, component: MissingComponent) -> String {
    match component {
        MissingComponent::Vae if model.candidates(Component::Vae).is_some() => {
            return "name one of them with --vae".into();
        }
        MissingComponent::TextEncoder if model.candidates(Component::TextEncoder).is_some() => {
            return "name one of them with --text-encoder".into();
        }
        _ => {}
    }
    let searched = !model.searched_folders.is_empty();
    match component {
        MissingComponent::Vae if searched => format!(
            "{}put FLUX.2's autoencoder (flux2-vae.safetensors or ae.safetensors) there, or give it with --vae FILE",
            pull(model)
        ),
        MissingComponent::Vae => "download it, or give another autoencoder with --vae FILE".into(),
        MissingComponent::TextEncoder if searched => text_encoder(model),
        MissingComponent::TextEncoder => "download it, or give prompt embeddings with --embeds FILE".into(),
    }
}

/// Refuses a model of which several files could be a component, for commands that have no option to name one. With
/// `vae_given`, its VAE is not used.
pub fn refuse_ambiguous(model: &Model, vae_given: bool) -> Result<(), CliError> {
    let mut ambiguous = model.ambiguous.iter();
    match ambiguous.find(|(component, _)| !(vae_given && *component == Component::Vae)) {
        None => Ok(()),
        Some((component, files)) => {
            let files: Vec<String> = files.iter().map(|file| format!("`{}`", file.display())).collect();
            let (path, files) = (model.path.display(), files.join(", "));
            Err(CliError::new(format!("several files could be the {component} of `{path}`: {files}"))
                .hint("name the model's files in a model.toml"))
        }
    }
}

/// Hint for a model without a text encoder.
fn text_encoder(model: &Model) -> String {
    let hidden = model.transformer.config.joint_attention_dim / 3;
    let name = match hidden {
        2560 => "Qwen3-4B",
        4096 => "Qwen3-8B",
        5120 => "Mistral-Small-3.2-24B",
        _ => "a text encoder",
    };
    format!(
        "{}put {name} (hidden size {hidden}; safetensors or GGUF) there, or give it with --text-encoder FILE; or give \
         prompt embeddings with --embeds FILE",
        pull(model)
    )
}

/// Hint for a transformer without its other components: which model to pull.
fn pull(model: &Model) -> String {
    match cache::matching_model(model.transformer.config.joint_attention_dim) {
        Some(name) => format!("run `kiln pull {name}`, whose components fit; or "),
        None => String::new(),
    }
}
