//! `model.toml`: the parts of a model by name, so that a set of files can be used as one.
//!
//! ```toml
//! transformer = "flux-2-klein-4b-Q4_K_M.gguf"
//! text_encoder = "text_encoders/qwen_3_4b.safetensors"
//! vae = "vae/flux2-vae.safetensors"
//! tokenizer = "tokenizer/tokenizer.json"   # Qwen3's is in Kiln
//! variant = "distilled"                    # or "base", "kv", "dev"
//! ```

use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::parts::Parts;
use super::variant::Variant;
use crate::error::{Error, Result};

/// More than such a file could need.
const LONGEST: u64 = 1 << 16;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Set {
    transformer: String,
    text_encoder: Option<String>,
    vae: Option<String>,
    tokenizer: Option<String>,
    variant: Option<Variant>,
}

pub(super) fn read(file: &Path) -> Result<Parts> {
    let mut text = String::new();
    let opened = std::fs::File::open(file).and_then(|f| f.take(LONGEST + 1).read_to_string(&mut text));
    opened.map_err(|source| kiln_model::Error::Read { file: file.to_path_buf(), source })?;
    if text.len() as u64 > LONGEST {
        return Err(Error::config(file, format!("it is longer than {LONGEST} bytes")));
    }
    parse(&text, file.parent().unwrap_or(Path::new(""))).map_err(|what| Error::config(file, what))
}

impl Parts {
    /// What the text of a `model.toml` in `folder` names; an error is what is wrong with it.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// let set = "transformer = 'flux-2-klein-4b.gguf'\nvae = 'vae/ae.safetensors'";
    /// let parts = kiln_engine::Parts::parse(set, Path::new("models"))?;
    /// assert_eq!(parts.vae.as_deref(), Some(Path::new("models/vae/ae.safetensors")));
    /// assert!(kiln_engine::Parts::parse("transformer = '/etc/passwd'", Path::new("models")).is_err());
    /// # Ok::<(), String>(())
    /// ```
    pub fn parse(text: &str, folder: &Path) -> Result<Parts, String> {
        parse(text, folder)
    }
}

/// The parts that `text` names, below `folder`.
fn parse(text: &str, folder: &Path) -> Result<Parts, String> {
    let set: Set = toml::from_str(text).map_err(|e| e.to_string().trim_end().to_owned())?;
    let path = |name: String| -> Result<PathBuf, String> {
        // Below its own folder: a set that was downloaded must not lead anywhere else on this machine.
        let below = Path::new(&name).components().all(|c| matches!(c, Component::Normal(_)));
        match below && !name.is_empty() {
            true => Ok(folder.join(name)),
            false => Err(format!("`{name}` is not a path below the folder of this file")),
        }
    };
    Ok(Parts {
        transformer: Some(path(set.transformer)?),
        text_encoder: set.text_encoder.map(path).transpose()?,
        vae: set.vae.map(path).transpose()?,
        tokenizer: set.tokenizer.map(path).transpose()?,
        variant: set.variant,
        others: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        parse(text, Path::new("models")).unwrap_err()
    }

    #[test]
    fn parts_lie_below_the_file() {
        let text = "transformer = 'a.gguf'\nvae = 'vae/b.safetensors'\nvariant = 'kv'";
        let parts = parse(text, Path::new("models")).unwrap();
        assert_eq!(parts.transformer, Some(PathBuf::from("models/a.gguf")));
        assert_eq!(parts.vae, Some(PathBuf::from("models/vae/b.safetensors")));
        assert_eq!((parts.variant, parts.text_encoder), (Some(Variant::Kv), None));
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        for name in ["/etc/passwd", "../a.gguf", "a/../../b", "", "./a"] {
            let told = refused(&format!("transformer = '{name}'"));
            assert!(told.contains("not a path below"), "{name}: {told}");
        }
    }

    #[test]
    fn misspelt_and_missing_fields_are_named() {
        assert!(refused("transformer = 'a'\nvea = 'b'").contains("unknown field `vea`"));
        assert!(refused("vae = 'b'").contains("missing field `transformer`"));
        assert!(refused("transformer = 'a'\nvariant = 'schnell'").contains("schnell"));
        assert!(refused("transformer = [1]").contains("line 1"));
        assert!(refused("transformer = ").contains("line 1"));
    }
}
