//! Model names as users type them: `owner/repo[@revision][:pattern]`, or an alias.

use kiln_family::{Alias, Companion, Licence};

use crate::{Error, Result};

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
    /// Parses a name: that of one of the [aliases](kiln_family::aliases) or a repository.
    pub fn parse(text: &str) -> Result<ModelName> {
        let invalid = |reason| Error::InvalidName { name: text.to_owned(), reason };
        let (rest, pattern) = match text.split_once(':') {
            Some((rest, pattern)) => (rest, Some(pattern.to_owned())),
            None => (text, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let alias = Alias::named(repo);
        let repo = alias.map_or(repo, |alias| alias.repo);
        let pattern = pattern.or_else(|| alias?.file.map(str::to_owned));
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

    /// Whether the repository has an alias, and is not just any text of the form `owner/repo`.
    pub fn is_known(&self) -> bool {
        Alias::of_repo(&self.repo).is_some()
    }

    /// The licence of a known repository, which must be accepted; `None` if there are no conditions, or none known.
    pub fn licence(&self) -> Option<Licence> {
        Alias::of_repo(&self.repo)?.licence
    }

    /// The shortest text that parses to this name: with the alias, if there is one.
    pub fn short(&self) -> String {
        let revision = if self.revision == "main" { String::new() } else { format!("@{}", self.revision) };
        let alias = Alias::of(&self.repo, self.pattern.as_deref());
        let name = alias.map_or(self.repo.as_str(), |alias| alias.name);
        match &self.pattern {
            Some(pattern) if alias.is_none_or(|alias| alias.file != Some(pattern)) => {
                format!("{name}{revision}:{pattern}")
            }
            _ => format!("{name}{revision}"),
        }
    }

    /// The files that complete the model, such as a text encoder.
    pub fn companions(&self) -> Vec<ModelName> {
        self.needed().iter().map(|companion| ModelName::file(companion.repo, companion.file)).collect()
    }

    pub(crate) fn file(repo: &str, pattern: &str) -> ModelName {
        ModelName { repo: repo.into(), revision: "main".into(), pattern: Some(pattern.into()) }
    }

    pub(crate) fn needed(&self) -> &'static [Companion] {
        self.alias().map_or(&[], |alias| alias.companions)
    }

    pub(crate) fn alias(&self) -> Option<&'static Alias> {
        let named = Alias::of(&self.repo, self.pattern.as_deref());
        // Another file of a repository of transformers needs the same.
        named.or_else(|| Alias::only_one(&self.repo))
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
    fn an_alias_may_mean_one_file_of_a_repository() {
        let fp8 = ModelName::parse("dev-fp8").unwrap();
        assert_eq!((&*fp8.repo, &*fp8.short()), ("Comfy-Org/flux2-dev", "dev-fp8"));
        assert!(fp8.pattern.as_deref().is_some_and(|file| file.ends_with("/flux2_dev_fp8mixed.safetensors")));
        let other = ModelName::parse("dev-nvfp4@v1:flux2-dev-nvfp4-mixed.safetensors").unwrap();
        assert_eq!(other.short(), "black-forest-labs/FLUX.2-dev-NVFP4@v1:flux2-dev-nvfp4-mixed.safetensors");
        assert_eq!(ModelName::parse(&other.short()).unwrap(), other);
        let files = |name: &str| {
            let names = ModelName::parse(name).unwrap().companions().into_iter();
            names.map(|name| name.pattern.unwrap()).collect::<Vec<_>>()
        };
        for name in ["dev-fp8", "dev-gguf:Q4_K_S", "dev-nvfp4", "dev-nvfp4:mixed"] {
            let [text_encoder, vae] = &files(name)[..] else { panic!("{name}") };
            assert!(
                text_encoder.contains("mistral_3_small_flux2_f") && vae.ends_with("flux2-vae.safetensors")
            );
        }
        assert_eq!(files("dev-encoder"), ["split_files/vae/flux2-vae.safetensors"]);
        assert_eq!(files("dev"), [""; 0]);
        assert_eq!(files("klein-4b-gguf:Q4_0"), [""; 0]);
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
