//! Model names as users type them: `owner/repo[@revision][:pattern]`, or an alias.

use crate::{Error, Result};

/// Aliases and their repositories.
pub const ALIASES: [(&str, &str); 17] = [
    ("klein-4b", "black-forest-labs/FLUX.2-klein-4B"),
    ("klein-9b", "black-forest-labs/FLUX.2-klein-9B"),
    ("klein-base-4b", "black-forest-labs/FLUX.2-klein-base-4B"),
    ("klein-base-9b", "black-forest-labs/FLUX.2-klein-base-9B"),
    ("klein-9b-kv", "black-forest-labs/FLUX.2-klein-9b-kv"),
    ("klein-4b-fp8", "black-forest-labs/FLUX.2-klein-4b-fp8"),
    ("klein-9b-fp8", "black-forest-labs/FLUX.2-klein-9b-fp8"),
    ("klein-base-4b-fp8", "black-forest-labs/FLUX.2-klein-base-4b-fp8"),
    ("klein-base-9b-fp8", "black-forest-labs/FLUX.2-klein-base-9b-fp8"),
    ("klein-9b-kv-fp8", "black-forest-labs/FLUX.2-klein-9b-kv-fp8"),
    ("klein-4b-nvfp4", "black-forest-labs/FLUX.2-klein-4b-nvfp4"),
    ("klein-9b-nvfp4", "black-forest-labs/FLUX.2-klein-9b-nvfp4"),
    ("klein-4b-gguf", "unsloth/FLUX.2-klein-4B-GGUF"),
    ("klein-9b-gguf", "unsloth/FLUX.2-klein-9B-GGUF"),
    ("klein-base-4b-gguf", "unsloth/FLUX.2-klein-base-4B-GGUF"),
    ("klein-base-9b-gguf", "unsloth/FLUX.2-klein-base-9B-GGUF"),
    ("small-decoder", "black-forest-labs/FLUX.2-small-decoder"),
];

/// A repository, its revision and a pattern for its files: `owner/repo[@revision][:pattern]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// `owner/repo`.
    pub repo: String,
    /// A branch, tag or commit; `main` by default.
    pub revision: String,
    /// A file, a pattern with `*`, or part of a file name.
    pub pattern: Option<String>,
}

impl ModelName {
    /// Parses a name: one of [`ALIASES`] or a repository.
    pub fn parse(text: &str) -> Result<ModelName> {
        let invalid = |reason| Error::InvalidName { name: text.to_owned(), reason };
        let (rest, pattern) = match text.split_once(':') {
            Some((rest, pattern)) => (rest, Some(pattern.to_owned())),
            None => (text, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let alias = ALIASES.iter().find(|(short, _)| short.eq_ignore_ascii_case(repo));
        let repo = alias.map_or(repo, |(_, repo)| repo);
        let Some((owner, name)) = repo.split_once('/') else {
            return Err(invalid("expected owner/repo, or a name such as klein-4b"));
        };
        if ![owner, name].iter().all(|part| is_path_component(part) && !part.contains("--")) {
            return Err(invalid("owner and repository may only have letters, digits, `.`, `_` and `-`"));
        }
        if !revision.split('/').all(is_path_component) {
            return Err(invalid("the revision after `@` is not a branch, tag or commit"));
        }
        if pattern.as_deref().is_some_and(str::is_empty) {
            return Err(invalid("no file name or pattern after `:`"));
        }
        Ok(ModelName { repo: repo.to_owned(), revision: revision.to_owned(), pattern })
    }

    /// Whether the repository is one of [`ALIASES`], and not just any text of the form `owner/repo`.
    pub fn is_known(&self) -> bool {
        ALIASES.iter().any(|(_, repo)| *repo == self.repo)
    }

    /// The shortest text that parses to this name: with the alias, if there is one.
    pub fn short(&self) -> String {
        let alias = ALIASES.iter().find(|(_, repo)| *repo == self.repo).map(|(short, _)| *short);
        let revision = if self.revision == "main" { String::new() } else { format!("@{}", self.revision) };
        let pattern = self.pattern.as_ref().map_or(String::new(), |p| format!(":{p}"));
        format!("{}{revision}{pattern}", alias.unwrap_or(&self.repo))
    }
}

/// Whether `text` is a safe component of a path and of an address: letters, digits, `.`, `-` and `_`, and not only dots.
pub(crate) fn is_path_component(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    !text.is_empty() && text.len() <= 255 && text.bytes().all(allowed) && !text.bytes().all(|b| b == b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_repository_with_a_revision_and_a_pattern() {
        let name = ModelName::parse("a/b.c@v1.0:*Q4*.gguf").unwrap();
        assert_eq!((&*name.repo, &*name.revision), ("a/b.c", "v1.0"));
        assert_eq!(name.pattern.as_deref(), Some("*Q4*.gguf"));
        assert_eq!(name.short(), "a/b.c@v1.0:*Q4*.gguf");
        let short = ModelName::parse("KLEIN-4b-gguf:q4_k_m").unwrap();
        assert_eq!((&*short.repo, &*short.short()), ("unsloth/FLUX.2-klein-4B-GGUF", "klein-4b-gguf:q4_k_m"));
    }

    #[test]
    fn unsafe_or_incomplete_names_are_errors() {
        for invalid in [
            "",
            "klein",
            "a/",
            "/b",
            "../b",
            "a/..",
            "a/b/c",
            "a/b@..",
            "a/b@x/../y",
            "a b/c",
            "a/b?x",
            "a/b:",
            "a--b/c",
            "a\\b/c",
            "a/b@",
        ] {
            assert!(ModelName::parse(invalid).is_err(), "{invalid}");
        }
    }
}
