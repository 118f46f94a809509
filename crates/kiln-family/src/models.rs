//! Published models: their short names and repositories, the files that they lack there, and their licences.

use crate::FAMILIES;

/// A model with a short name.
#[derive(Debug, PartialEq, Eq)]
pub struct Alias {
    /// The short name.
    pub name: &'static str,
    /// `owner/repo`.
    pub repo: &'static str,
    /// The file that the name means, in a repository of several models.
    pub file: Option<&'static str>,
    /// Whether it is only a component.
    pub is_component: bool,
    /// Files that the model needs and that are not part of it, such as the text encoder of a lone transformer.
    pub companions: &'static [Companion],
    /// A repository that has the companions, too.
    pub whole: Option<&'static str>,
    /// The licence that must be accepted before a download.
    pub licence: Option<Licence>,
}

/// A file that completes a model.
#[derive(Debug, PartialEq, Eq)]
pub struct Companion {
    /// `owner/repo`.
    pub repo: &'static str,
    /// Its path in the repository.
    pub file: &'static str,
    /// A pattern for the files of the repository that serve as well.
    pub alternatives: &'static str,
}

/// A licence with conditions that its user must accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Licence {
    /// Its name.
    pub name: &'static str,
    /// Where to read it.
    pub url: &'static str,
}

/// Returns all models with a short name.
pub fn aliases() -> impl Iterator<Item = &'static Alias> {
    FAMILIES.iter().flat_map(|family| family.models)
}

impl Alias {
    /// Whether the name alone is a whole model: not a repository of several files to choose from, and not a component.
    pub fn is_model(&self) -> bool {
        !self.name.ends_with("-gguf") && !self.is_component
    }

    /// The model of this name, in any case.
    pub fn named(name: &str) -> Option<&'static Alias> {
        aliases().find(|alias| alias.name.eq_ignore_ascii_case(name))
    }

    /// The name for a file of a repository: that of the file, or that of the repository.
    pub fn of(repo: &str, file: Option<&str>) -> Option<&'static Alias> {
        let of_repo = || aliases().filter(|alias| alias.repo == repo);
        let exact = of_repo().find(|alias| alias.file.is_some() && alias.file == file);
        exact.or_else(|| of_repo().find(|alias| alias.file.is_none()))
    }

    /// The name of a repository that has no other.
    pub fn only_one(repo: &str) -> Option<&'static Alias> {
        let mut all = aliases().filter(|alias| alias.repo == repo);
        all.next().filter(|_| all.next().is_none())
    }

    /// Any of the names that lead to a repository.
    pub fn of_repo(repo: &str) -> Option<&'static Alias> {
        aliases().find(|alias| alias.repo.eq_ignore_ascii_case(repo))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_9b_and_dev_has_a_licence() {
        let all: Vec<&Alias> = aliases().collect();
        for (i, alias) in all.iter().enumerate() {
            assert!(!all[..i].iter().any(|other| other.name == alias.name), "{}", alias.name);
            let is_open = !alias.repo.to_lowercase().contains("9b") && !alias.name.starts_with("dev");
            assert_eq!(alias.licence.is_none(), is_open, "{}", alias.name);
        }
    }
}
