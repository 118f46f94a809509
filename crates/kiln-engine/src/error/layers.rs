//! What the errors of the layers below mean, and what to do about them.

use kiln_family::published_names;
use kiln_weights::MalformedFile;

use super::{ErrorKind, Explain, Field, Hint, lora};
use crate::hint;

const DOWNLOAD_AGAIN: &str = "the download is incomplete or the file is damaged; download it again";
const OTHER_FORMAT: &str = "download the model in another format: bf16, fp8, nvfp4 or GGUF";
const SHOWS_CONTENTS: &str = "`kiln info` shows what the file contains";

impl Explain for kiln_nn::Error {
    fn kind(&self) -> ErrorKind {
        use kiln_nn::Error;
        match self {
            Error::Request(_) => ErrorKind::Value,
            Error::Read { .. } | Error::Config { .. } | Error::Tokenizer(_) => ErrorKind::Model,
            Error::NotFinite { .. } => ErrorKind::NotFinite,
            Error::Cancelled => ErrorKind::Cancelled,
            Error::Weights(error) => error.kind(),
            Error::Image(error) => error.kind(),
            Error::Ops(error) => error.kind(),
            Error::Tensor(_) => ErrorKind::Internal,
        }
    }

    fn hint(&self) -> Option<Hint> {
        use kiln_nn::Error;
        let text: &'static str = match self {
            Error::NotFinite { .. } => {
                "the guidance or the weight of a LoRA is too large, or the model's weights are damaged; lower them, or \
                 download the model again"
            }
            Error::Read { .. } => "check that the file exists and is readable",
            // The error names a folder when a file is missing in it.
            Error::Config { file, .. } if file.is_dir() => "download that component of the model, too",
            // Only people write these.
            Error::Config { file, .. }
                if file.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) =>
            {
                "correct the file: it names the model's parts, such as transformer = \"FILE\""
            }
            Error::Config { what, .. } => return Some(config(what)),
            Error::Weights(error) => return error.hint(),
            Error::Image(error) => return error.hint(),
            Error::Ops(error) => return error.hint(),
            Error::Tokenizer(_) => {
                return Some(hint![
                    "the tokenizer does not belong to this text encoder: take both from one download";
                    "give its own with ", Field::Tokenizer
                ]);
            }
            Error::Request(_) | Error::Tensor(_) | Error::Cancelled => return None,
        };
        Some(text.into())
    }
}

/// Hint for a configuration, by what is wrong with it.
fn config(what: &str) -> Hint {
    let hints = [
        (
            "scaled rotary",
            hint!["take the text encoder from the model's own download: Kiln runs Qwen3 as it is published"],
        ),
        (
            "tokenizer: the chat template",
            hint![
                "without a chat template the one that FLUX.2 was trained with is used";
                "give another tokenizer with ", Field::Tokenizer
            ],
        ),
        ("partial_rotary_factor", hint!["take the text encoder from the model's own download"]),
        (
            "the scheduler is",
            hint!["use FLUX.2's own scheduler: without `scheduler` in model_index.json it is used"],
        ),
        ("the pipeline is", hint!["Kiln runs the FLUX.2 models; `kiln pull klein-4b` downloads one"]),
        ("neither TAEF2 nor", hint![SHOWS_CONTENTS]),
        ("tensors that every FLUX.2", hint![SHOWS_CONTENTS]),
        ("this text encoder has a vocabulary", hint!["give its own tokenizer with ", Field::Tokenizer]),
        (
            "this is a VAE of",
            hint![
                "use FLUX.2's autoencoder (flux2-vae.safetensors); `kiln pull klein-4b` downloads it with its model"
            ],
        ),
        (
            "num_hidden_layers is",
            hint!["take the whole text encoder, with all of its tensors, from the model's own download"],
        ),
        (
            "there are several transformers",
            hint!["name one of them with ", Field::Model; "with ", Field::Transformer],
        ),
    ];
    let own = hints.into_iter().find(|(start, _)| what.starts_with(start)).map(|(_, hint)| hint);
    own.unwrap_or_else(|| hint!["check the file"; "download the model again"])
}

impl Explain for kiln_weights::Error {
    fn kind(&self) -> ErrorKind {
        use kiln_weights::Error;
        match self {
            Error::Cancelled => ErrorKind::Cancelled,
            Error::Lora { .. } | Error::LoraUnmatched { .. } => ErrorKind::Lora,
            Error::Io { doing: "write", .. } => ErrorKind::File,
            Error::RequiresGguf { .. } | Error::RequiresSafetensors { .. } => ErrorKind::Request,
            _ => ErrorKind::Model,
        }
    }

    fn hint(&self) -> Option<Hint> {
        use kiln_weights::Error;
        let text: &'static str = match self {
            Error::NotFound { .. } => "check the path",
            Error::Io { doing: "write", .. } => {
                "check that the disk is not full and that the folder is writable"
            }
            Error::Io { .. } => "check that the file is readable",
            Error::NotAFile { .. } => "give a safetensors or GGUF file",
            Error::WrongComponent { component, .. } => {
                let family = published_names();
                let what = format!(
                    "give a file with {family}'s {component}; `kiln info` shows what a file contains"
                );
                return Some(what.into());
            }
            Error::UnsupportedQuantization { .. } | Error::ForeignQuantization { .. } => OTHER_FORMAT,
            Error::Malformed { problem, .. } => match problem {
                MalformedFile::GgufType { .. } | MalformedFile::UnknownGgufType { .. } => {
                    "the file is complete, but Kiln does not support its quantization; download the model as Q4_K_M, \
                     Q5_K_M, Q6_K or Q8_0"
                }
                MalformedFile::SplitGguf { .. } => {
                    "put all parts into one folder and merge them: llama-gguf-split --merge FIRST-PART OUT.gguf"
                }
                MalformedFile::DType { .. } => {
                    "the file is complete, but Kiln does not support its data type; download the model in bf16"
                }
                MalformedFile::OtherFormat(_) => "download the file itself, as safetensors or GGUF",
                _ => DOWNLOAD_AGAIN,
            },
            Error::ShardIndex { .. } | Error::DuplicateTensor { .. } => {
                "download the index and all its shards again, from one repository"
            }
            Error::MissingShards { .. }
            | Error::NotInShard { .. }
            | Error::CannotSplit { .. }
            | Error::NotFinite { .. } => DOWNLOAD_AGAIN,
            Error::NoWeights { .. } => "download this component of the model, too, as safetensors",
            Error::Shape { found, expected, .. } if is_transposed(found.dims(), expected.dims()) => {
                "the matrix is transposed: the program that wrote the file stores matrices the other way round; get the \
                 file from its origin"
            }
            Error::MissingTensor { .. } | Error::Shape { .. } => {
                "the weights don't belong to the config.json next to them: take both from one download"
            }
            Error::Delta { .. } => "take the file from the same version of Kiln as the program",
            Error::NothingToQuantize { already_int8: true, .. } => {
                return Some(hint!["use the model as it is, with ", Field::Dtype.to("int8")]);
            }
            Error::NothingToQuantize { .. } => "give a FLUX.2 model in diffusers' layout",
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
            Error::InvalidTensor { .. } => "the file may be damaged; `kiln info` shows what it contains",
            Error::RequiresGguf { .. } => return Some(hint!["end ", Field::Out, " in .gguf"]),
            Error::RequiresSafetensors { .. } => return Some(hint!["end ", Field::Out, " in .safetensors"]),
            Error::LoraUnmatched { keys, total, .. } if keys.len() < *total => {
                return Some(hint![
                    "it may be for another model (compare both with `kiln info`)";
                    "use what fits with ", Field::LoraPartial.on()
                ]);
            }
            Error::LoraUnmatched { .. } => lora::OTHER_MODEL,
            Error::Lora { problem, .. } => return Some(lora::hint(problem)),
            Error::Cancelled => return None,
        };
        Some(text.into())
    }
}

fn is_transposed(found: &[usize], expected: &[usize]) -> bool {
    matches!((found, expected), ([a, b], [c, d]) if a != b && [a, b] == [d, c])
}

impl Explain for kiln_credentials::Error {
    fn kind(&self) -> ErrorKind {
        use kiln_credentials::Error;
        match self {
            Error::Image(error) => error.kind(),
            Error::File { .. } => ErrorKind::File,
            Error::NoKey { .. } | Error::Content { .. } | Error::Certificate(_) | Error::KeyMismatch => {
                ErrorKind::Request
            }
            Error::Signing(_) | Error::Command { .. } | Error::TimeStamp { .. } => ErrorKind::Input,
        }
    }

    fn hint(&self) -> Option<Hint> {
        match self {
            kiln_credentials::Error::Image(error) => error.hint(),
            error => error.advice().map(Hint::from),
        }
    }
}

impl Explain for kiln_image::Error {
    fn kind(&self) -> ErrorKind {
        use kiln_image::Error;
        match self {
            Error::Read { .. } => ErrorKind::Input,
            Error::Write { .. } => ErrorKind::File,
            // The name of the file to write.
            Error::Format { .. } => ErrorKind::Value,
            _ => ErrorKind::Request,
        }
    }

    fn hint(&self) -> Option<Hint> {
        use kiln_image::Error;
        if let Some(program) = self.converter() {
            return Some(
                format!("convert it to PNG or JPEG first, such as with `{program} IN OUT.png`").into(),
            );
        }
        let text: &'static str = match self {
            Error::NotAnImage { .. } => "convert it to PNG or JPEG first",
            Error::Damaged { .. } => "open it in another program and save it again",
            Error::TooLarge { .. } | Error::FileTooLarge { .. } => {
                "scale it down: the models see one megapixel"
            }
            Error::TooSmall { .. } => "use a larger image",
            Error::AspectRatio { .. } => "crop it",
            Error::EmptyMask { .. } => {
                return Some(hint!["paint the area to change white"; "leave out ", Field::MaskPadding]);
            }
            Error::TooLong { .. } => {
                return Some(hint!["choose a smaller size with ", Field::Width, " or ", Field::Height]);
            }
            Error::Format { .. } => "end the name in .png, .jpg or .webp",
            Error::Encode { .. } => {
                return Some(hint![
                    "choose another format with ", Field::Output, ", such as .png";
                    "choose a smaller size"
                ]);
            }
            Error::Write { .. } => return Some(hint!["choose another path with ", Field::Output]),
            Error::Read { .. } => "check the path",
            Error::Text { .. } | Error::Pixels { .. } => return None,
        };
        Some(text.into())
    }
}

impl Explain for kiln_ops::Error {
    fn kind(&self) -> ErrorKind {
        match self {
            kiln_ops::Error::Memory { .. } => ErrorKind::OutOfMemory,
            kiln_ops::Error::Device { .. } => ErrorKind::Device,
            _ => ErrorKind::Internal,
        }
    }

    fn hint(&self) -> Option<Hint> {
        let kiln_ops::Error::Memory { backend, .. } = self else { return None };
        let smaller = hint!["use a smaller size (", Field::Width, ", ", Field::Height, ")"];
        Some(if backend.starts_with("wgpu") {
            smaller.or(hint!["stream weights with ", Field::VramLimit; "use ", Field::Device.to("cpu")])
        } else if backend.starts_with("cuda") {
            smaller.or(hint![
                "stream weights with ", Field::VramLimit;
                "halve them with ", Field::Dtype.to("fp8");
                "use ", Field::Device.to("cpu")
            ])
        } else {
            smaller.or(hint!["close other programs"])
        })
    }
}
