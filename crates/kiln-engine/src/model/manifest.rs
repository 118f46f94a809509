//! `model.toml`: a manifest that names the components of a model, so that separate files can be used as one model.
//!
//! ```toml
//! transformer = "flux-2-klein-4b-Q4_K_M.gguf"
//! text_encoder = "text_encoders/qwen_3_4b.safetensors"
//! vae = "vae/flux2-vae.safetensors"
//! tokenizer = "tokenizer/tokenizer.json"   # optional: Qwen3's and Mistral's are built in
//! variant = "distilled"                    # or "base", "kv", "dev"
//! ```

use std::io::Read;
use std::path::{Component, Path, PathBuf};

use kiln_family::Variant;
use serde::Deserialize;

use super::component_paths::ComponentPaths;
use crate::error::{Error, Result};

/// The largest manifest that is read, in bytes.
const MAX_BYTES: u64 = 1 << 16;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    transformer: String,
    text_encoder: Option<String>,
    vae: Option<String>,
    tokenizer: Option<String>,
    variant: Option<Variant>,
}

pub(super) fn read(file: &Path) -> Result<ComponentPaths> {
    let unreadable = |source| kiln_nn::Error::Read { file: file.to_path_buf(), source };
    let mut bytes = Vec::new();
    let opened = kiln_base::open_regular(file).and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    opened.map_err(unreadable)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::config(file, format!("it is longer than {MAX_BYTES} bytes")));
    }
    let text = kiln_base::decode_text(bytes).map_err(unreadable)?;
    let folder = file.parent().unwrap_or(Path::new(""));
    ComponentPaths::parse(&text, folder).map_err(|what| Error::config(file, what))
}

impl ComponentPaths {
    /// Parses the text of a `model.toml` that lies in `folder`. The error says what is wrong with the text.
    ///
    /// ```
    /// use std::path::Path;
    /// use kiln_engine::ComponentPaths;
    ///
    /// let text = "transformer = 'flux-2-klein-4b.gguf'\nvae = 'vae/ae.safetensors'";
    /// let paths = ComponentPaths::parse(text, Path::new("models"))?;
    /// assert_eq!(paths.vae.as_deref(), Some(Path::new("models/vae/ae.safetensors")));
    /// assert!(ComponentPaths::parse("transformer = '/etc/passwd'", Path::new("models")).is_err());
    /// # Ok::<(), String>(())
    /// ```
    pub fn parse(text: &str, folder: &Path) -> Result<ComponentPaths, String> {
        let manifest: Manifest = toml::from_str(text).map_err(|e| e.to_string().trim_end().to_owned())?;
        let path = |name: String| -> Result<PathBuf, String> {
            // A downloaded manifest must not refer to other files of this machine.
            let below = Path::new(&name).components().all(|c| matches!(c, Component::Normal(_)));
            if below && !name.is_empty() {
                Ok(folder.join(name))
            } else {
                Err(format!("`{name}` is not a path below the folder of this file"))
            }
        };
        Ok(ComponentPaths {
            transformer: Some(path(manifest.transformer)?),
            text_encoder: manifest.text_encoder.map(path).transpose()?,
            vae: manifest.vae.map(path).transpose()?,
            tokenizer: manifest.tokenizer.map(path).transpose()?,
            variant: manifest.variant,
            ..ComponentPaths::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ComponentPaths, String> {
        ComponentPaths::parse(text, Path::new("models"))
    }

    #[test]
    fn paths_are_relative_to_the_manifest() {
        let text = "transformer = 'a.gguf'\nvae = 'vae/b.safetensors'\nvariant = 'kv'";
        let paths = parse(text).unwrap();
        assert_eq!(paths.transformer, Some(PathBuf::from("models/a.gguf")));
        assert_eq!(paths.vae, Some(PathBuf::from("models/vae/b.safetensors")));
        assert_eq!((paths.variant, paths.text_encoder), (Some(kiln_family::flux2::KV), None));
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        for name in ["/etc/passwd", "../a.gguf", "a/../../b", "", "./a"] {
            let message = parse(&format!("transformer = '{name}'")).unwrap_err();
            assert!(message.contains("not a path below"), "{name}: {message}");
        }
    }

    #[test]
    fn misspelt_and_missing_fields_are_named() {
        let message = |text: &str| parse(text).unwrap_err();
        assert!(message("transformer = 'a'\nvea = 'b'").contains("unknown field `vea`"));
        assert!(message("vae = 'b'").contains("missing field `transformer`"));
        assert!(message("transformer = 'a'\nvariant = 'schnell'").contains("schnell"));
        assert!(message("transformer = [1]").contains("line 1"));
        assert!(message("transformer = ").contains("line 1"));
    }
}
