//! Which files of a repository are wanted.

use crate::client::RemoteFile;
use crate::{Error, Name, Result};

/// The parts of a model that Kiln uses, as folders of a diffusers repository.
const PARTS: [&str; 5] = ["transformer", "text_encoder", "vae", "tokenizer", "scheduler"];
/// Files that say how a part is built.
const TEXTS: [&str; 3] = [".json", ".txt", ".jinja"];

/// The files that `name` stands for. In a repository of diffusers' layout, the parts of the model and not the same weights
/// once more in one file; elsewhere the only file of weights, and what the pattern matches.
pub(crate) fn select(name: &Name, files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>> {
    let repo = name.repo.clone();
    if let Some(unsafe_name) = files.iter().find(|file| !is_safe(&file.path)) {
        return Err(Error::UnsafeName { repo, file: unsafe_name.path.clone() });
    }
    if let Some(pattern) = &name.pattern {
        let chosen: Vec<_> = files.iter().filter(|file| matches(pattern, &file.path)).cloned().collect();
        let files = weights(&files);
        return match chosen.is_empty() {
            true => Err(Error::NoMatch { repo, pattern: pattern.clone(), files }),
            false => Ok(chosen),
        };
    }
    if files.iter().any(|file| file.path == "model_index.json") {
        return Ok(files.into_iter().filter(|file| is_of_model(&file.path)).collect());
    }
    // A part by itself (a VAE): its configuration, and the usual file of weights.
    let weights = weights(&files);
    if weights.len() != 1 {
        return Err(Error::Choose { repo, files: weights });
    }
    Ok(files.into_iter().filter(|file| file.path == weights[0].path || is_text(&file.path)).collect())
}

/// The files of weights of a repository.
pub(crate) fn weights(files: &[RemoteFile]) -> Vec<RemoteFile> {
    files.iter().filter(|file| is_weights(&file.path)).cloned().collect()
}

pub(crate) fn is_weights(path: &str) -> bool {
    path.ends_with(".safetensors") || path.ends_with(".gguf")
}

fn is_text(path: &str) -> bool {
    TEXTS.iter().any(|ending| path.ends_with(ending))
}

fn is_of_model(path: &str) -> bool {
    match path.split_once('/') {
        None => path == "model_index.json" || path.to_ascii_lowercase().starts_with("license"),
        Some((part, file)) => {
            PARTS.contains(&part) && !file.contains('/') && (is_weights(file) || is_text(file))
        }
    }
}

/// Whether a pattern means this file: as its path, with `*` for anything, or as a part of its name, in any case.
pub(crate) fn matches(pattern: &str, path: &str) -> bool {
    if pattern == path {
        return true;
    }
    let (pattern, lower) = (pattern.to_ascii_lowercase(), path.to_ascii_lowercase());
    match pattern.contains('*') {
        true => glob(&pattern, &lower),
        false => {
            let file = lower.rsplit('/').next().unwrap_or(&lower);
            is_weights(&lower) && file.contains(&pattern)
        }
    }
}

/// `*` stands for any characters.
fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Whether a name may become a path below a folder, on any system.
pub(crate) fn is_safe(path: &str) -> bool {
    let part = |part: &str| {
        let reserved = |c: char| c.is_control() || "\\:*?\"<>|".contains(c);
        !part.is_empty() && part != "." && part != ".." && part.len() <= 200 && !part.contains(reserved)
    };
    !path.is_empty() && path.len() <= 1000 && path.split('/').all(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RemoteFile> {
        let file = |path: &&str| RemoteFile { path: (*path).into(), size: 1, hash: String::new() };
        paths.iter().map(file).collect()
    }

    fn chosen(name: &str, paths: &[&str]) -> Result<Vec<String>> {
        let name = Name::parse(name).unwrap();
        Ok(select(&name, files(paths))?.into_iter().map(|file| file.path).collect())
    }

    #[test]
    fn of_a_model_its_parts_are_wanted_and_not_the_same_again() {
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
        let wanted = chosen("a/b", &repo).unwrap();
        assert_eq!(wanted.len(), 7, "{wanted:?}");
        assert!(!wanted.contains(&"flux-2-klein-4b.safetensors".into()));
        assert_eq!(
            chosen("a/b:flux-2-klein-4b.safetensors", &repo).unwrap(),
            ["flux-2-klein-4b.safetensors"]
        );
    }

    #[test]
    fn one_of_many_has_to_be_chosen() {
        let repo = ["README.md", "x-Q4_K_M.gguf", "x-Q8_0.gguf"];
        assert!(matches!(chosen("a/b", &repo), Err(Error::Choose { files, .. }) if files.len() == 2));
        assert_eq!(chosen("a/b:q4_k_m", &repo).unwrap(), ["x-Q4_K_M.gguf"]);
        assert_eq!(chosen("a/b:*.gguf", &repo).unwrap().len(), 2);
        assert!(matches!(chosen("a/b:Q3", &repo), Err(Error::NoMatch { files, .. }) if files.len() == 2));
        assert_eq!(
            chosen("a/b", &["README.md", "x.safetensors", "config.json"]).unwrap(),
            ["x.safetensors", "config.json"]
        );
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
    fn names_that_leave_the_folder_are_not_safe() {
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
        assert!(matches!(chosen("a/b", &["model_index.json", "../x"]), Err(Error::UnsafeName { .. })));
    }
}
