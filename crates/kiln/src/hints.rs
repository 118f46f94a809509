//! What to do about an error. The libraries name what is wrong; here is what they can't know: the options.

use std::path::Path;

use kiln_engine::{MissingPart, Model, Parts, Variant};
use kiln_model::Error;
use kiln_weights::{LoraProblem, Malformed};

use crate::failure::{Failure, While};
use crate::{hub, values};

const DOWNLOAD: &str = "the download is not complete or the file was damaged; fetch it again";
const OTHER_MODEL: &str = "a LoRA fits only the model it was trained on: klein 4B, klein 9B and dev differ; \
                           `kiln info` on both shows their sizes";

pub fn engine(error: &kiln_engine::Error) -> Option<String> {
    use kiln_engine::Error;
    match error {
        Error::Mismatch { .. } => Some(
            "the parts come from different models: klein 4B goes with Qwen3-4B (hidden size 2560), klein 9B with \
             Qwen3-8B (4096); take all folders from one download"
                .into(),
        ),
        Error::Memory { any_size: true, .. } => Some(
            "no size would be small enough: the transformer is too wide for this machine, if its config.json is right; \
             fewer --max-tokens may help"
                .into(),
        ),
        Error::Memory { .. } => Some("choose a smaller size with -W and -H, or fewer references".into()),
        Error::Request { hint, .. } | Error::Combination { hint, .. } | Error::Device { hint, .. } => hint.clone(),
        Error::Model(error) => model(error),
        Error::MissingPart { .. } | Error::Load(_) | Error::Panicked(_) | Error::While { .. } => None,
    }
}

pub fn model(error: &kiln_model::Error) -> Option<String> {
    match error {
        Error::NotFinite { .. } => Some(
            "the weights are damaged, or the weight of a --lora is too large; fetch the model again, or lower the weight"
                .into(),
        ),
        Error::Read { .. } => Some("check that the file exists and may be read".into()),
        // A folder is named when something is missing in it.
        Error::Config { file, .. } if file.is_dir() => Some("download that part of the model, too".into()),
        Error::Config { .. } => Some("check the file, or download the model again".into()),
        Error::Weights(error) => weights(error),
        Error::Image(error) => image(error),
        Error::Ops(error) => ops(error),
        Error::Request(_) | Error::Tokenizer(_) | Error::Tensor(_) | Error::Cancelled => None,
    }
}

pub fn weights(error: &kiln_weights::Error) -> Option<String> {
    use kiln_weights::Error;
    let hint = match error {
        Error::NotFound { .. } => "check the path",
        Error::Io { doing: "write", .. } => return None,
        Error::Io { .. } => "check that the file may be read",
        Error::NotAFile { .. } => "give a safetensors or GGUF file",
        Error::OtherComponent { component, .. } => {
            return Some(format!(
                "give a file with FLUX.2's {component}; `kiln info` on a file shows what it is"
            ));
        }
        Error::Coding { .. } => "fetch the model in another format: bf16, fp8, nvfp4 or GGUF",
        Error::Cut { .. } => DOWNLOAD,
        Error::Malformed { problem: Malformed::GgufType { .. }, .. } => {
            "the file is whole, but packed in a way that Kiln can't read; fetch the model as Q4_K_M, Q5_K_M, Q6_K or Q8_0"
        }
        Error::Malformed { problem: Malformed::DType { .. }, .. } => {
            "the file is whole, but of a kind that Kiln can't compute with; fetch the model in bf16"
        }
        Error::Malformed { problem: Malformed::Foreign(_), .. } => {
            "fetch the file itself, as safetensors or GGUF"
        }
        Error::Index { .. } | Error::DuplicateTensor { .. } => {
            "fetch the list and all its shards again, from one download"
        }
        Error::Malformed { .. } | Error::MissingShards { .. } | Error::NotInShard { .. } => DOWNLOAD,
        Error::NoWeights { .. } => "this part of the model has to be downloaded, too, as safetensors",
        Error::Missing { .. } | Error::Shape { .. } => {
            "the weights don't belong to the config.json beside them: take both from one download"
        }
        Error::NothingToRound { done: true, .. } => "use the model as it is, with --dtype int8",
        Error::NothingToRound { .. } => "give a FLUX.2 model in diffusers' layout",
        Error::NotFinite { .. } => DOWNLOAD,
        Error::LoraUnmatched { keys, total, .. } if keys.len() < *total => {
            "it may be for another model (`kiln info` on both shows their sizes); --lora-partial uses what fits"
        }
        Error::LoraUnmatched { .. } => OTHER_MODEL,
        Error::Lora { problem, .. } => lora(problem),
        _ => return None,
    };
    Some(hint.into())
}

fn lora(problem: &LoraProblem) -> &'static str {
    match problem {
        LoraProblem::Shape { .. } | LoraProblem::Base { .. } => OTHER_MODEL,
        LoraProblem::Kind { .. } => "LoRA, LoKr, LoHa and DoRA of linear layers are supported",
        LoraProblem::TextEncoder { .. } => "--lora-partial uses the rest of it",
        LoraProblem::UnknownKeys { .. } => {
            "if it is a LoRA, --lora-partial uses the rest of it; `kiln info` on the file shows what it is"
        }
        LoraProblem::Empty => "this is no LoRA; `kiln info` on the file shows what it is",
        _ => {
            "the file was damaged or not saved well; fetch it again, or save it with diffusers' `save_lora_weights`"
        }
    }
}

pub fn image(error: &kiln_image::Error) -> Option<String> {
    use kiln_image::Error;
    let hint = match error {
        Error::NotAPicture { .. } => "convert it to PNG or JPEG first",
        Error::Damaged { .. } => "open it in another program and save it again",
        Error::TooLarge { .. } | Error::FileTooLarge { .. } => {
            "make it smaller: the models look at one megapixel"
        }
        Error::TooSmall { .. } => "give a larger picture",
        Error::AspectRatio { .. } => "crop it",
        Error::Format { .. } => "end the name in .png, .jpg or .webp",
        Error::Write { .. } => "choose another place with -o",
        Error::Read { .. } => "check the path",
        _ => return None,
    };
    Some(hint.into())
}

pub fn ops(error: &kiln_ops::Error) -> Option<String> {
    match error {
        kiln_ops::Error::Memory { backend, .. } if backend.starts_with("cuda") => {
            let what = "choose a smaller size with -W and -H, have weights brought in as they are used with --vram-limit, \
                        halve them with --dtype fp8, or say --device cpu";
            Some(what.into())
        }
        kiln_ops::Error::Memory { .. } => {
            Some("choose a smaller size with -W and -H, or close other programs".into())
        }
        _ => None,
    }
}

pub fn hub(error: &kiln_hub::Error) -> Option<String> {
    use kiln_hub::Error;
    let listed = |files: &[kiln_hub::RemoteFile]| {
        let shown =
            files.iter().take(30).map(|file| format!("\n  {} ({})", file.path, values::bytes(file.size)));
        let more = files.len().saturating_sub(30);
        let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
        shown.collect::<String>() + &more
    };
    Some(match error {
        Error::Name { .. } => {
            let names = kiln_hub::ALIASES.map(|(short, _)| short).join(", ");
            format!("known names: {names}; or give OWNER/REPO")
        }
        Error::NoCache => "set HF_HOME to a folder".into(),
        Error::Unauthorised { repo, .. } => format!(
            "check the name; if the model is gated, accept its terms on its page ({repo}) and put a token of that account \
             into HF_TOKEN"
        ),
        Error::Gated { page, .. } => {
            format!("accept the terms on {page} with the account that the token is of")
        }
        Error::NotFound { .. } => "check the name; it is written as on the model's page".into(),
        Error::Connection { .. } => {
            "check the connection (HTTPS_PROXY names a proxy) and run the same command again: it \
                                     goes on where it stopped"
                .into()
        }
        Error::Answer { .. } => "check HF_ENDPOINT, or try again later".into(),
        Error::UnsafeName { .. } => "don't trust this repository".into(),
        Error::Checksum { .. } => "run the same command again: that file is fetched anew".into(),
        Error::NoMatch { files, .. } | Error::Choose { files, .. } => {
            format!("name one behind a colon, or a part of its name:{}", listed(files))
        }
        Error::Busy { .. } => "wait for it to end".into(),
        Error::Io { .. } => {
            "check that the folder may be written and that the disk is not full; HF_HOME names another".into()
        }
        Error::Cancelled => return None,
    })
}

/// For a model without a part that a request needs.
pub fn missing_part(model: &Model, part: MissingPart) -> String {
    let searched = !model.searched.is_empty();
    match part {
        MissingPart::Vae if searched => format!(
            "{}put FLUX.2's autoencoder (flux2-vae.safetensors or ae.safetensors) there, or name it with --vae FILE",
            pull(model)
        ),
        MissingPart::Vae => "download that part, or name another autoencoder with --vae FILE".into(),
        MissingPart::TextEncoder if model.variant == Variant::Dev => {
            "Kiln can't run dev's text encoder yet: give prompt embeddings with --embeds FILE".into()
        }
        MissingPart::TextEncoder if searched => text_encoder(model),
        MissingPart::TextEncoder => "download that part, or give prompt embeddings with --embeds FILE".into(),
    }
}

/// Opens a model; a file that is none gets a better hint than the reader of weights could give.
pub fn open_model(path: &Path) -> Result<Model, Failure> {
    open_model_with(path, &Parts::default())
}

/// [`open_model`] with some parts from elsewhere.
pub fn open_model_with(path: &Path, parts: &Parts) -> Result<Model, Failure> {
    let parts = &Parts { others: hub::whole_models(), ..parts.clone() };
    let opened = Model::open_with(Some(path), parts);
    // A folder that has no index and no weights of its own is none.
    let stranger = path.is_dir() && !path.join("model_index.json").is_file();
    let hint = match &opened {
        Err(kiln_engine::Error::Model(error)) => match error {
            Error::Weights(kiln_weights::Error::Malformed { .. }) if path.is_file() => {
                Some(not_a_model(path))
            }
            Error::Config { file, .. } if stranger && file == path => Some(not_a_model(path)),
            _ => None,
        },
        _ => None,
    };
    opened.while_doing(|| format!("opening the model `{}`", path.display())).map_err(|failure| match hint {
        Some(hint) => Failure { hint: Some(hint), ..failure },
        None => failure,
    })
}

/// What would do as the text encoder of a model that has none.
fn text_encoder(model: &Model) -> String {
    let hidden = model.transformer.config.joint_attention_dim / 3;
    let name = match hidden {
        2560 => "Qwen3-4B",
        4096 => "Qwen3-8B",
        _ => "a Qwen3 model",
    };
    format!(
        "{}put {name} (hidden size {hidden}; safetensors or GGUF) there, or name it with --text-encoder FILE; or give prompt \
         embeddings with --embeds FILE",
        pull(model)
    )
}

/// What to fetch for the parts that a transformer has not brought along.
pub fn pull(model: &Model) -> String {
    match hub::whole_model(model.transformer.config.joint_attention_dim) {
        Some(name) => format!("`kiln pull {name}` fetches a model whose parts are used for it; or "),
        None => String::new(),
    }
}

/// What may be meant by a path that is no model folder.
pub fn not_a_model(path: &Path) -> String {
    const INDEX: &str = "model_index.json";
    if path.is_file() {
        return "give the folder that has model_index.json, transformer, text_encoder and vae in it, a FLUX.2 transformer \
                as safetensors or GGUF, or a model.toml"
            .into();
    }
    if let Some(parent) = path.parent().filter(|p| p.join(INDEX).is_file()) {
        return format!("the model is the folder around it: -m {}", parent.display());
    }
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut models: Vec<_> = inside.filter(|p| p.join(INDEX).is_file()).collect();
    models.sort();
    match models.first() {
        Some(model) => format!("there is a model inside: -m {}", model.display()),
        None => "give the folder of a diffusers download of FLUX.2 [klein]: it has model_index.json, transformer, \
                 text_encoder and vae in it"
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_model_beside_a_wrong_path_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("klein");
        fs::create_dir_all(model.join("vae")).unwrap();
        fs::write(model.join("model_index.json"), "{}").unwrap();
        let name = model.display().to_string();
        assert!(not_a_model(&model.join("vae")).ends_with(&name));
        assert!(not_a_model(dir.path()).ends_with(&name));
        assert!(not_a_model(&model.join("model_index.json")).contains("GGUF"));
        assert!(not_a_model(Path::new("/no/where")).contains("diffusers download"));
    }
}
