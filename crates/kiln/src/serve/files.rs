//! Weight files in folders that requests may name: LoRAs and autoencoders, and what is known about LoRAs.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use kiln_server::LoraInfo;
use kiln_weights::WeightSource;
use serde_json::Value;

use crate::models;

const EXTENSION: &str = "safetensors";
/// Deepest level of subfolders; a link may lead back up.
const MAX_DEPTH: usize = 4;
/// The most trigger words of a LoRA: the lists of tags that some trainers store are long.
const MAX_TRIGGERS: usize = 8;
/// The longest trigger word, in characters: the header of a file may hold megabytes.
const MAX_TRIGGER: usize = 200;
/// The largest file beside a LoRA that is read for its words.
const MAX_DESCRIPTION: u64 = 1 << 20;
const PREVIEWS: [&str; 5] = ["preview.png", "png", "jpg", "jpeg", "webp"];

/// Returns a folder next to the user's models folder.
pub fn next_to_models(name: &str) -> Option<PathBuf> {
    models::folders().paths().last()?.parent().map(|kiln| kiln.join(name))
}

/// The folders whose files requests may name.
pub struct WeightFolders {
    pub loras: Option<PathBuf>,
    pub vaes: Option<PathBuf>,
}

impl WeightFolders {
    /// Returns the file of a LoRA.
    pub fn lora(&self, name: &str) -> Option<PathBuf> {
        find(self.loras.as_deref(), name)
    }

    /// Returns the file of an autoencoder.
    pub fn vae(&self, name: &str) -> Option<PathBuf> {
        find(self.vaes.as_deref(), name)
    }
}

/// Lists the names of the weight files in a folder and its subfolders: `ink`, `styles/wax`.
pub fn names(folder: Option<&Path>) -> Vec<String> {
    let mut names = Vec::new();
    if let Some(folder) = folder {
        collect(folder, "", MAX_DEPTH, &mut names);
    }
    names.sort();
    names
}

fn collect(folder: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else { continue };
        if path.is_dir() {
            let name = path.file_name().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.'));
            if let Some(name) = name.filter(|_| depth > 0) {
                collect(&path, &format!("{prefix}{name}/"), depth - 1, names);
            }
        } else if path.extension().is_some_and(|extension| extension == EXTENSION) {
            names.push(format!("{prefix}{stem}"));
        }
    }
}

/// Finds the weight file of this name in a folder. Only listed names are accepted, so none leads outside the folder.
pub fn find(folder: Option<&Path>, name: &str) -> Option<PathBuf> {
    let is_listed = names(folder).iter().any(|listed| listed == name);
    is_listed.then(|| Some(folder?.join(format!("{name}.{EXTENSION}"))))?
}

/// Lists the LoRAs of a folder with their trigger words and previews.
pub fn lora_details(folder: Option<&Path>) -> Vec<LoraInfo> {
    let Some(root) = folder else { return Vec::new() };
    let info = |name: String| {
        // Not `with_extension`: a name may contain a dot.
        let beside = |extension: &str| root.join(format!("{name}.{extension}"));
        let triggers = triggers(&beside(EXTENSION), &beside("json"), &beside("civitai.info"));
        LoraInfo { triggers, has_preview: preview_path(root, &name).is_some(), name }
    };
    names(folder).into_iter().map(info).collect()
}

fn preview_path(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut paths = PREVIEWS.iter().map(|extension| folder.join(format!("{name}.{extension}")));
    paths.find(|path| path.is_file())
}

/// Reads the image that shows what a listed LoRA does.
pub fn lora_preview(folder: Option<&Path>, name: &str) -> Option<Vec<u8>> {
    find(folder, name)?;
    std::fs::read(preview_path(folder?, name)?).ok()
}

/// The trigger words of a LoRA: from A1111's or Civitai's file next to it, else from its header.
fn triggers(weights: &Path, a1111: &Path, civitai: &Path) -> Vec<String> {
    let json = |path: &Path| {
        let mut bytes = Vec::new();
        fs::File::open(path).ok()?.take(MAX_DESCRIPTION).read_to_end(&mut bytes).ok()?;
        serde_json::from_str::<Value>(&kiln_base::decode_text(bytes).ok()?).ok()
    };
    let from_a1111 = || Some(split(json(a1111)?.get("activation text")?.as_str()?));
    let from_civitai = || {
        let words = json(civitai)?.get("trainedWords")?.as_array()?.clone();
        Some(words.iter().filter_map(Value::as_str).flat_map(split).collect())
    };
    let from_header = || {
        let source = WeightSource::open(weights).ok()?;
        let header = source.metadata();
        let phrase = ["modelspec.trigger_phrase", "trigger_phrase", "trigger_word", "instance_prompt"];
        let phrase = phrase.iter().find_map(|key| header.get(*key)).map(|text| split(text));
        phrase.or_else(|| most_frequent_tags(header.get("ss_tag_frequency")?))
    };
    let filled = |words: &Vec<String>| !words.is_empty();
    let found = from_a1111().filter(filled).or_else(|| from_civitai().filter(filled)).or_else(from_header);
    let mut words = found.unwrap_or_default();
    words.truncate(MAX_TRIGGERS);
    words.iter().map(|word| word.chars().take(MAX_TRIGGER).collect()).collect()
}

fn split(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The tags that kohya's trainers store with their counts, `{"folder": {"tag": 12}}`: those of most images.
fn most_frequent_tags(text: &str) -> Option<Vec<String>> {
    let folders: HashMap<String, HashMap<String, u64>> = serde_json::from_str(text).ok()?;
    let mut counts: HashMap<String, u64> = HashMap::new();
    for (tag, count) in folders.into_values().flatten() {
        *counts.entry(tag.trim().to_owned()).or_default() += count;
    }
    let most = counts.values().copied().max()?;
    let mut tags: Vec<(u64, String)> = counts.into_iter().map(|(tag, count)| (count, tag)).collect();
    // A tag of most images is what the LoRA teaches; the rest describes single images.
    tags.retain(|(count, tag)| count * 2 > most && !tag.is_empty());
    tags.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    Some(tags.into_iter().map(|(_, tag)| tag).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A safetensors file without tensors and with this metadata.
    fn weights(path: &Path, metadata: Value) {
        let header = serde_json::json!({ "__metadata__": metadata }).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn loras_are_found_in_subfolders_with_their_words_and_previews() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir_all(path("styles/old")).unwrap();
        fs::create_dir(path(".hidden")).unwrap();
        weights(
            &path("ink.safetensors"),
            serde_json::json!({ "modelspec.trigger_phrase": "inkwash, brush" }),
        );
        let tags = r#"{"a": {"waxfigure": 9, "red": 1}, "b": {"waxfigure": 2}}"#;
        weights(&path("styles/old/wax.v2.safetensors"), serde_json::json!({ "ss_tag_frequency": tags }));
        weights(&path("styles/oil.safetensors"), serde_json::json!({}));
        weights(&path(".hidden/no.safetensors"), serde_json::json!({}));
        fs::write(path("styles/oil.json"), r#"{"activation text": "oilpaint"}"#).unwrap();
        fs::write(path("styles/oil.preview.png"), "image").unwrap();
        fs::write(path("secret.png"), "").unwrap();
        fs::write(path("notes.txt"), "").unwrap();
        let found = lora_details(Some(folder.path()));
        let names: Vec<&str> = found.iter().map(|lora| lora.name.as_str()).collect();
        assert_eq!(names, ["ink", "styles/oil", "styles/old/wax.v2"]);
        let triggers: Vec<String> = found.iter().map(|lora| lora.triggers.join("+")).collect();
        assert_eq!(triggers, ["inkwash+brush", "oilpaint", "waxfigure"]);
        assert!(found[1].has_preview && !found[0].has_preview);
        assert_eq!(lora_preview(Some(folder.path()), "styles/oil"), Some(b"image".to_vec()));
        for wrong in ["ink", "secret", "styles/../styles/oil"] {
            assert_eq!(lora_preview(Some(folder.path()), wrong), None);
        }
        assert_eq!(
            find(Some(folder.path()), "styles/old/wax.v2"),
            Some(path("styles/old/wax.v2.safetensors"))
        );
        for wrong in ["../ink", "styles/../ink", "/etc/passwd", "styles"] {
            assert_eq!(find(Some(folder.path()), wrong), None);
        }
        assert!(lora_details(None).is_empty());
    }

    #[test]
    fn words_of_megabytes_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let long = "é".repeat(1 << 20);
        weights(&folder.path().join("a.safetensors"), serde_json::json!({ "trigger_word": long }));
        weights(&folder.path().join("b.safetensors"), serde_json::json!({}));
        let text = serde_json::json!({ "activation text": long }).to_string();
        fs::write(folder.path().join("b.json"), text).unwrap();
        let found = lora_details(Some(folder.path()));
        let lengths: Vec<usize> =
            found.iter().flat_map(|lora| &lora.triggers).map(|word| word.chars().count()).collect();
        assert_eq!(lengths, [MAX_TRIGGER]);
    }
}
