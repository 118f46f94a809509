//! Selecting the files of a repository to download.

use crate::remote_file::RemoteFile;
use crate::{Error, ModelName, Result};

/// The components of a model that Kiln uses: folders of a diffusers repository.
pub(crate) const COMPONENTS: [&str; 5] = ["transformer", "text_encoder", "vae", "tokenizer", "scheduler"];
/// Extensions of configuration and tokenizer files.
const CONFIG_EXTENSIONS: [&str; 3] = [".json", ".txt", ".jinja"];

/// Selects the files of `name`: those that its pattern matches; otherwise the components of a diffusers repository
/// (without the single-file copy of the same weights), or the only weight file of another repository.
pub(crate) fn select(name: &ModelName, files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>> {
    let repo = name.repo.clone();
    if let Some(unsafe_name) = files.iter().find(|file| !is_safe(&file.path)) {
        return Err(Error::UnsafeName { repo, file: unsafe_name.path.clone() });
    }
    if let Some(pattern) = &name.pattern {
        let chosen = matching(pattern, &files, |file| &file.path).into_iter().cloned().collect::<Vec<_>>();
        if chosen.is_empty() {
            return Err(Error::NoMatch { repo, pattern: pattern.clone(), files: weights(&files) });
        }
        return Ok(chosen);
    }
    if files.iter().any(|file| file.path == "model_index.json") {
        return Ok(files.into_iter().filter(|file| is_component_file(&file.path)).collect());
    }
    // A single component, such as a VAE: its configuration and its weight file.
    let weights = weights(&files);
    if weights.len() != 1 {
        return Err(Error::Ambiguous { repo, files: weights });
    }
    Ok(files.into_iter().filter(|file| file.path == weights[0].path || is_config(&file.path)).collect())
}

/// The weight files of a repository.
pub(crate) fn weights(files: &[RemoteFile]) -> Vec<RemoteFile> {
    files.iter().filter(|file| is_weights(&file.path)).cloned().collect()
}

pub(crate) fn is_weights(path: &str) -> bool {
    path.ends_with(".safetensors") || path.ends_with(".gguf")
}

fn is_config(path: &str) -> bool {
    CONFIG_EXTENSIONS.iter().any(|extension| path.ends_with(extension))
}

fn is_component_file(path: &str) -> bool {
    match path.split_once('/') {
        None => path == "model_index.json" || path.to_ascii_lowercase().starts_with("license"),
        Some((component, file)) => {
            COMPONENTS.contains(&component) && !file.contains('/') && (is_weights(file) || is_config(file))
        }
    }
}

/// The items that a pattern matches; a whole path means that file alone, even if other names contain it.
pub(crate) fn matching<'a, T>(pattern: &str, items: &'a [T], path: impl Fn(&T) -> &str) -> Vec<&'a T> {
    match items.iter().find(|item| path(item) == pattern) {
        Some(exact) => vec![exact],
        None => items.iter().filter(|item| matches(pattern, path(item))).collect(),
    }
}

/// Whether a pattern matches a file: its path, a path with `*` for any characters, or part of a weight file's name. Case
/// is ignored.
fn matches(pattern: &str, path: &str) -> bool {
    if pattern == path {
        return true;
    }
    let (pattern, lower) = (pattern.to_ascii_lowercase(), path.to_ascii_lowercase());
    if pattern.contains('*') {
        return glob(&pattern, &lower);
    }
    let file = lower.rsplit('/').next().unwrap_or(&lower);
    is_weights(&lower) && file.contains(&pattern)
}

/// Matches a pattern in which `*` stands for any characters.
fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match rest.find(part) {
            Some(start) => rest = &rest[start + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Whether a file name is a safe relative path: on every system, but for the names of devices, which Windows alone has.
pub(crate) fn is_safe(path: &str) -> bool {
    let is_safe_component = |part: &str| {
        let reserved = |c: char| c.is_control() || "\\:*?\"<>|".contains(c);
        let is_device = cfg!(windows) && kiln_base::windows_name_problem(part).is_some();
        let is_name = !part.is_empty() && part != "." && part != "..";
        is_name && part.len() <= 200 && !part.contains(reserved) && !is_device
    };
    !path.is_empty() && path.len() <= 1000 && path.split('/').all(is_safe_component)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RemoteFile> {
        let file = |path: &&str| RemoteFile { path: (*path).into(), size: 1, hash: String::new() };
        paths.iter().map(file).collect()
    }

    fn selected(name: &str, paths: &[&str]) -> Result<Vec<String>> {
        let name = ModelName::parse(name).unwrap();
        Ok(select(&name, files(paths))?.into_iter().map(|file| file.path).collect())
    }

    #[test]
    fn a_model_is_its_components_without_the_single_file_copy() {
        let repo = [
            "README.md",
            "LICENSE.md",
            "model_index.json",
            "flux-2-klein-4b.safetensors",
            "teaser.png",
            "transformer/config.json",
            "transformer/diffusion_pytorch_model.safetensors",
            "text_encoder/model-00001-of-00002.safetensors",
            "text_encoder/model.safetensors.index.json",
            "tokenizer/merges.txt",
            "vae/diffusion_pytorch_model.bin",
            "vae/old/diffusion_pytorch_model.safetensors",
        ];
        let files = selected("a/b", &repo).unwrap();
        assert_eq!(files.len(), 7, "{files:?}");
        assert!(!files.contains(&"flux-2-klein-4b.safetensors".into()));
        assert_eq!(
            selected("a/b:flux-2-klein-4b.safetensors", &repo).unwrap(),
            ["flux-2-klein-4b.safetensors"]
        );
    }

    #[test]
    fn one_of_several_weight_files_must_be_chosen() {
        let repo = ["README.md", "x-Q4_K_M.gguf", "x-Q8_0.gguf"];
        assert!(matches!(selected("a/b", &repo), Err(Error::Ambiguous { files, .. }) if files.len() == 2));
        assert_eq!(selected("a/b:q4_k_m", &repo).unwrap(), ["x-Q4_K_M.gguf"]);
        assert_eq!(selected("a/b:*.gguf", &repo).unwrap().len(), 2);
        assert!(matches!(selected("a/b:Q3", &repo), Err(Error::NoMatch { files, .. }) if files.len() == 2));
        assert_eq!(
            selected("a/b", &["README.md", "x.safetensors", "config.json"]).unwrap(),
            ["x.safetensors", "config.json"]
        );
    }

    #[test]
    fn a_whole_name_means_that_file_alone() {
        let repo = ["vae.safetensors", "small-vae.safetensors"];
        assert_eq!(selected("a/b:vae.safetensors", &repo).unwrap(), ["vae.safetensors"]);
        assert_eq!(selected("a/b:VAE", &repo).unwrap().len(), 2);
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, path, expected) in [
            ("*", "a/b", true),
            ("a*", "ba", false),
            ("*a", "ab", false),
            ("a*b*c", "a-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("**", "", true),
            ("a*a", "a", false),
            ("vae/*", "VAE/x.json", true),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn names_outside_the_folder_are_not_safe() {
        for path in
            ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a\\b", "C:x", "a/.", "a\nb", "a/b*", "nul\0"]
        {
            assert!(!is_safe(path), "{path:?}");
        }
        let long = "a".repeat(201);
        assert!(
            !is_safe(&long)
                && is_safe("transformer/model-00001-of-00002.safetensors")
                && is_safe(".gitattributes")
        );
        assert!(matches!(selected("a/b", &["model_index.json", "../x"]), Err(Error::UnsafeName { .. })));
    }
}
