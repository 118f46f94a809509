//! The user's defaults for options, from `config.toml` in the settings folder.
//!
//! An option comes before the environment, the environment before this file, and the file before what is built in. A key
//! that is not in [`KEYS`], or in the table `[serve]` no option of `kiln serve`, is an error, so that a typo does not pass
//! for a setting.

pub mod edit;
mod machine;
mod serve;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use clap::ValueEnum;
use kiln_base::folders;
use kiln_catalog::{ModelFolders, ember};
use kiln_engine::{Device, Payload, Precision, Settings, cache_threshold};
use toml::{Table, Value};

pub use serve::{ServeOption, missing_arguments};

use crate::error::CliError;
use crate::values;

/// The variable that names another settings file.
const FILE_VARIABLE: &str = "KILN_CONFIG";

/// The settings of the file; `None` leaves the built-in default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UserSettings {
    pub model: Option<PathBuf>,
    pub models_folder: Option<PathBuf>,
    pub output_folder: Option<PathBuf>,
    pub device: Option<Device>,
    pub dtype: Option<Precision>,
    pub threads: Option<u32>,
    pub vram_limit: Option<u64>,
    pub cache: Option<f32>,
    pub sign: Option<bool>,
    pub watermark: Option<Payload>,
    pub timestamp_url: Option<String>,
    /// The table `[serve]`.
    pub serve: Vec<ServeOption>,
}

/// A key of the file.
pub struct Key {
    pub name: &'static str,
    pub about: &'static str,
    /// The variable that comes before the file.
    pub variable: Option<&'static str>,
    /// The built-in default, as text.
    pub default: fn() -> String,
    /// Reads the value. The error says what was expected.
    read: fn(&mut UserSettings, &str) -> Result<(), String>,
}

/// All keys, in the order in which they are listed.
pub const KEYS: [Key; 11] = [
    Key {
        name: "model",
        about: "model of `generate` and `serve`: a name or a path",
        variable: Some("KILN_MODEL"),
        default: || ember::file().map_or(String::new(), |_| ember::NAME.into()),
        read: |settings, text| read_path(&mut settings.model, text, false),
    },
    Key {
        name: "models_folder",
        about: "folder with the models that have a name",
        variable: Some("KILN_MODELS"),
        default: || ModelFolders::own().map_or(String::new(), |path| path.display().to_string()),
        read: |settings, text| read_path(&mut settings.models_folder, text, true),
    },
    Key {
        name: "output_folder",
        about: "folder for images without -o",
        variable: None,
        default: || ".".into(),
        read: |settings, text| read_path(&mut settings.output_folder, text, true),
    },
    Key {
        name: "device",
        about: Device::NAMES,
        variable: None,
        default: || "auto".into(),
        read: |settings, text| Device::parse(text).map(|device| settings.device = Some(device)),
    },
    Key {
        name: "dtype",
        about: "data type to compute in",
        variable: None,
        default: || "auto".into(),
        read: |settings, text| read_dtype(text).map(|dtype| settings.dtype = Some(dtype)),
    },
    Key {
        name: "threads",
        about: "number of CPU threads",
        variable: None,
        default: || std::thread::available_parallelism().map_or(String::new(), |n| n.to_string()),
        read: |settings, text| read_threads(text).map(|threads| settings.threads = Some(threads)),
    },
    Key {
        name: "vram_limit",
        about: "limit for GPU memory, such as 6G",
        variable: None,
        default: String::new,
        read: |settings, text| values::parse_bytes(text).map(|bytes| settings.vram_limit = Some(bytes)),
    },
    Key {
        name: "cache",
        about: "threshold of the step cache for models with many steps, such as 0.1",
        variable: None,
        default: || "0".into(),
        read: |settings, text| cache_threshold(text).map(|threshold| settings.cache = Some(threshold)),
    },
    Key {
        name: "sign",
        about: "whether image files are signed (C2PA): true or false",
        variable: None,
        default: || "false".into(),
        read: |settings, text| {
            let sign = text.parse().map_err(|_| "expected true or false".to_owned())?;
            settings.sign = Some(sign);
            Ok(())
        },
    },
    Key {
        name: "watermark",
        about: "invisible watermark of image files: 8 hexadecimal digits, such as 4b494c4e for Kiln's own",
        variable: None,
        default: String::new,
        read: |settings, text| {
            text.parse().map(|payload| settings.watermark = Some(payload)).map_err(str::to_owned)
        },
    },
    Key {
        name: "timestamp_url",
        about: "authority that adds time stamps to signatures (RFC 3161)",
        variable: None,
        default: String::new,
        read: |settings, text| {
            let is_url = ["http://", "https://"].iter().any(|scheme| text.starts_with(scheme));
            settings.timestamp_url = Some(text.to_owned()).filter(|_| is_url);
            if is_url { Ok(()) } else { Err("expected an http:// or https:// URL".into()) }
        },
    },
];

impl Key {
    /// Finds a key; a `-` may stand for `_`, as in the options.
    pub fn find(name: &str) -> Result<&'static Key, CliError> {
        let spelled = name.replace('-', "_");
        KEYS.iter().find(|key| key.name == spelled).ok_or_else(|| unknown_key(name))
    }

    /// Checks a value. The error says what was expected.
    pub fn check(&self, text: &str) -> Result<(), String> {
        (self.read)(&mut UserSettings::default(), text)
    }
}

fn unknown_key(name: &str) -> CliError {
    let names = KEYS.iter().map(|key| key.name);
    let similar = kiln_weights::similar_names(name, names.clone());
    let hint = match similar.first() {
        Some(similar) => format!("did you mean `{similar}`?"),
        None => format!("known settings: {}", names.collect::<Vec<_>>().join(", ")),
    };
    CliError::usage(format!("there is no setting `{name}`")).hint(hint)
}

fn read_path(out: &mut Option<PathBuf>, text: &str, is_folder: bool) -> Result<(), String> {
    let path = folders::expand(text, folders::home().as_deref());
    // The file means the same in every folder.
    if is_folder && !path.is_absolute() {
        return Err("expected an absolute path, or one that starts with ~/".into());
    }
    if text.trim().is_empty() {
        return Err("expected a name or a path".into());
    }
    *out = Some(path);
    Ok(())
}

fn read_dtype(text: &str) -> Result<Precision, String> {
    <Precision as ValueEnum>::from_str(text, false).map_err(|_| {
        let variants = Precision::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = variants.map(|value| value.get_name().to_owned()).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn read_threads(text: &str) -> Result<u32, String> {
    let threads = text.parse().ok().filter(|n| (1..=Settings::MAX_THREADS).contains(&(*n as usize)));
    threads.ok_or_else(|| format!("expected a number from 1 to {}", Settings::MAX_THREADS))
}

/// The settings file; it need not exist.
pub fn file() -> Option<PathBuf> {
    folders::from_env(FILE_VARIABLE).or_else(|| Some(folders::config()?.join("kiln").join("config.toml")))
}

/// Reads the text of the settings file; a missing file is empty.
pub fn read_text(file: &Path) -> Result<String, CliError> {
    match kiln_base::read_regular_text(file) {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => {
            Err(CliError::new(format!("can't read the settings file `{}`: {error}", file.display()))
                .hint("make it a readable text file, or name another one with KILN_CONFIG"))
        }
    }
}

/// An error about the text of `file`, without a hint.
fn invalid(file: &Path, problem: &str) -> CliError {
    CliError::new(format!("the settings file `{}` is invalid: {problem}", file.display()))
}

/// What to do about a setting in the file whose value is wrong.
fn repair(name: &str) -> String {
    format!("change it with `kiln config set {name} VALUE`, or remove it with `kiln config unset {name}`")
}

fn parse_table(text: &str, file: &Path) -> Result<Table, CliError> {
    // No command can change what is no TOML.
    text.parse().map_err(|error: toml::de::Error| {
        let path =
            if text.contains('\\') { r" (a path with `\` stands in single quotes: 'C:\models')" } else { "" };
        invalid(file, error.to_string().trim_end()).hint(format!(
            "correct the file with an editor{path}, or delete it: then every setting has its default"
        ))
    })
}

/// Parses the text of `file` to the keys that it sets, with their values as text.
pub fn parse(text: &str, file: &Path) -> Result<Vec<(&'static Key, String)>, CliError> {
    let in_file = |problem: String| invalid(file, &problem);
    let entry = |(name, value): (&String, &Value)| {
        let key = KEYS.iter().find(|key| key.name == name).ok_or_else(|| {
            let error = unknown_key(name);
            let hint = error.hint.unwrap_or_default();
            let end = if hint.ends_with('?') { "" } else { ";" };
            in_file(error.message).hint(format!("{hint}{end} `kiln config unset {name}` removes it"))
        })?;
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Boolean(is_on) => is_on.to_string(),
            other => {
                let found = other.type_str();
                return Err(in_file(format!("`{name}` is a value of the type {found}, expected a text"))
                    .hint(repair(name)));
            }
        };
        key.check(&text)
            .map_err(|expected| in_file(format!("`{name}` is `{text}`, {expected}")).hint(repair(name)))?;
        Ok((key, text))
    };
    let is_plain = |(name, value): &(&String, &Value)| *name != serve::TABLE || !value.is_table();
    parse_table(text, file)?.iter().filter(is_plain).map(entry).collect()
}

/// Parses the table `[serve]` of `file`.
pub fn parse_serve(text: &str, file: &Path) -> Result<Vec<ServeOption>, CliError> {
    match parse_table(text, file)?.get(serve::TABLE) {
        Some(Value::Table(table)) => serve::parse(table).map_err(|problem| {
            invalid(file, &problem)
                .hint("change it with `kiln config set serve.NAME VALUE`, or remove it with `kiln config unset serve.NAME`")
        }),
        _ => Ok(Vec::new()),
    }
}

static SETTINGS: OnceLock<UserSettings> = OnceLock::new();

/// Reads the settings file, or the one that an option names, once, before the command runs.
pub fn load(named: Option<&Path>) -> Result<(), CliError> {
    if let Some(named) = named.filter(|named| !named.is_file()) {
        return Err(CliError::new(format!("there is no settings file `{}`", named.display()))
            .hint("--config names a file such as kiln.toml"));
    }
    let Some(file) = named.map(Path::to_path_buf).or_else(file) else { return Ok(()) };
    let text = read_text(&file)?;
    let mut settings = UserSettings { serve: parse_serve(&text, &file)?, ..UserSettings::default() };
    for (key, text) in parse(&text, &file)? {
        // Checked by `parse`.
        let _ = (key.read)(&mut settings, &text);
    }
    let _ = SETTINGS.set(settings);
    Ok(())
}

/// The settings of the file; empty before [`load`].
pub fn get() -> &'static UserSettings {
    static EMPTY: UserSettings = UserSettings {
        model: None,
        models_folder: None,
        output_folder: None,
        device: None,
        dtype: None,
        threads: None,
        vram_limit: None,
        cache: None,
        sign: None,
        watermark: None,
        timestamp_url: None,
        serve: Vec::new(),
    };
    SETTINGS.get().unwrap_or(&EMPTY)
}

/// A folder of `kiln serve` that this variable or the file names.
pub fn serve_folder(option: &str, variable: &str) -> Option<PathBuf> {
    folders::from_env(variable).or_else(|| {
        let option = get().serve.iter().find(|given| given.name == option)?;
        option.values.first().map(PathBuf::from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> String {
        parse(text, Path::new("config.toml")).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn every_key_is_read() {
        let [m, o] = if cfg!(windows) { [r"C:\m", r"C:\o"] } else { ["/m", "/o"] };
        let text = format!(
            "model = \"klein-4b\"\nmodels_folder = '{m}'\noutput_folder = '{o}'\ndevice = \"cuda:1\"\n\
             dtype = \"int8\"\nthreads = 4\nvram_limit = \"6G\"\ncache = 0.1"
        );
        let mut settings = UserSettings::default();
        for (key, text) in parse(&text, Path::new("config.toml")).unwrap() {
            (key.read)(&mut settings, &text).unwrap();
        }
        let UserSettings {
            model,
            models_folder,
            output_folder,
            device,
            dtype,
            threads,
            vram_limit,
            cache,
            ..
        } = settings;
        assert_eq!(cache, Some(0.1));
        assert_eq!((model, models_folder), (Some("klein-4b".into()), Some(m.into())));
        assert_eq!((output_folder, device), (Some(o.into()), Some(Device::Cuda(1))));
        assert_eq!((dtype, threads, vram_limit), (Some(Precision::Int8), Some(4), Some(6 << 30)));
    }

    #[test]
    fn errors_name_the_file_the_key_and_what_is_expected() {
        for (text, words) in [
            ("modle = \"x\"", ["`modle`", "did you mean `model`?"]),
            ("dtype = \"f64\"", ["`dtype` is `f64`", "auto, f32, bf16"]),
            ("threads = 0", ["`threads` is `0`", "from 1 to 1024"]),
            ("cache = 1.5", ["`cache` is `1.5`", "from 0 (off) to 1"]),
            ("device = \"gpu\"", ["`device` is `gpu`", "cuda:N"]),
            ("models_folder = \"models\"", ["`models_folder` is `models`", "absolute"]),
            ("vram_limit = [1]", ["`vram_limit`", "array"]),
            ("model = ", ["line 1", "hint: "]),
            (r#"model = "C:\Users\ann""#, ["line 1", r"single quotes: 'C:\models'"]),
        ] {
            let message = message(text);
            assert!(message.contains("`config.toml`"), "{message}");
            assert!(words.iter().all(|word| message.contains(word)), "{text}: {message}");
        }
    }
}
