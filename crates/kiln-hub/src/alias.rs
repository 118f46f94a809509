//! Short names of models: their repositories, the files that they lack there, and their licences.

/// A model with a short name.
#[derive(Debug, PartialEq, Eq)]
pub struct Alias {
    /// The short name.
    pub name: &'static str,
    /// `owner/repo`.
    pub repo: &'static str,
    /// The file that the name means, in a repository of several models.
    pub file: Option<&'static str>,
    /// Files that the model needs and that are not part of it, such as the text encoder of a lone transformer.
    pub companions: &'static [Companion],
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

/// The model with all components of FLUX.2 [dev].
pub(crate) const DEV: &str = "black-forest-labs/FLUX.2-dev";
/// ComfyUI's copy of its components, in one file each.
const COMFY: &str = "Comfy-Org/flux2-dev";

const DEV_LICENCE: Option<Licence> = Some(Licence {
    name: "FLUX.2 [dev] Non-Commercial License",
    url: "https://huggingface.co/black-forest-labs/FLUX.2-dev/blob/main/LICENSE.md",
});
const KLEIN_9B_LICENCE: Option<Licence> = Some(Licence {
    name: "FLUX Non-Commercial License",
    url: "https://huggingface.co/black-forest-labs/FLUX.2-klein-9B/blob/main/LICENSE.md",
});

const fn mistral(file: &'static str) -> Companion {
    Companion { repo: COMFY, file, alternatives: "split_files/text_encoders/mistral_3_small_flux2_*" }
}

const MISTRAL_FP8: &str = "split_files/text_encoders/mistral_3_small_flux2_fp8.safetensors";
const MISTRAL_FP4: &str = "split_files/text_encoders/mistral_3_small_flux2_fp4_mixed.safetensors";
const VAE_FILE: &str = "split_files/vae/flux2-vae.safetensors";
const VAE: Companion = Companion { repo: COMFY, file: VAE_FILE, alternatives: VAE_FILE };
const WITH_FP8: &[Companion] = &[mistral(MISTRAL_FP8), VAE];
const WITH_FP4: &[Companion] = &[mistral(MISTRAL_FP4), VAE];

const fn klein(name: &'static str, repo: &'static str) -> Alias {
    Alias { name, repo, file: None, companions: &[], licence: None }
}

const fn klein_9b(name: &'static str, repo: &'static str) -> Alias {
    Alias { licence: KLEIN_9B_LICENCE, ..klein(name, repo) }
}

const fn dev(name: &'static str, repo: &'static str, companions: &'static [Companion]) -> Alias {
    Alias { companions, licence: DEV_LICENCE, ..klein(name, repo) }
}

/// All models with a short name.
pub const ALIASES: [Alias; 22] = [
    klein("klein-4b", "black-forest-labs/FLUX.2-klein-4B"),
    klein_9b("klein-9b", "black-forest-labs/FLUX.2-klein-9B"),
    klein("klein-base-4b", "black-forest-labs/FLUX.2-klein-base-4B"),
    klein_9b("klein-base-9b", "black-forest-labs/FLUX.2-klein-base-9B"),
    klein_9b("klein-9b-kv", "black-forest-labs/FLUX.2-klein-9b-kv"),
    klein("klein-4b-fp8", "black-forest-labs/FLUX.2-klein-4b-fp8"),
    klein_9b("klein-9b-fp8", "black-forest-labs/FLUX.2-klein-9b-fp8"),
    klein("klein-base-4b-fp8", "black-forest-labs/FLUX.2-klein-base-4b-fp8"),
    klein_9b("klein-base-9b-fp8", "black-forest-labs/FLUX.2-klein-base-9b-fp8"),
    klein_9b("klein-9b-kv-fp8", "black-forest-labs/FLUX.2-klein-9b-kv-fp8"),
    klein("klein-4b-nvfp4", "black-forest-labs/FLUX.2-klein-4b-nvfp4"),
    klein_9b("klein-9b-nvfp4", "black-forest-labs/FLUX.2-klein-9b-nvfp4"),
    klein("klein-4b-gguf", "unsloth/FLUX.2-klein-4B-GGUF"),
    klein_9b("klein-9b-gguf", "unsloth/FLUX.2-klein-9B-GGUF"),
    klein("klein-base-4b-gguf", "unsloth/FLUX.2-klein-base-4B-GGUF"),
    klein_9b("klein-base-9b-gguf", "unsloth/FLUX.2-klein-base-9B-GGUF"),
    dev("dev", DEV, &[]),
    Alias {
        file: Some("split_files/diffusion_models/flux2_dev_fp8mixed.safetensors"),
        ..dev("dev-fp8", COMFY, WITH_FP8)
    },
    Alias {
        file: Some("flux2-dev-nvfp4.safetensors"),
        ..dev("dev-nvfp4", "black-forest-labs/FLUX.2-dev-NVFP4", WITH_FP4)
    },
    dev("dev-gguf", "city96/FLUX.2-dev-gguf", WITH_FP8),
    // The text encoder and the VAE alone, for a transformer from elsewhere.
    Alias { file: Some(MISTRAL_FP8), ..dev("dev-encoder", COMFY, &[VAE]) },
    klein("small-decoder", "black-forest-labs/FLUX.2-small-decoder"),
];

impl Alias {
    /// Whether the name alone is a whole model: not a repository of several files to choose from, and not a component.
    pub fn is_model(&self) -> bool {
        !self.name.ends_with("-gguf") && !["small-decoder", "dev-encoder"].contains(&self.name)
    }

    /// The model of this name, in any case.
    pub(crate) fn named(name: &str) -> Option<&'static Alias> {
        ALIASES.iter().find(|alias| alias.name.eq_ignore_ascii_case(name))
    }

    /// The name for a file of a repository: that of the file, or that of the repository.
    pub(crate) fn of(repo: &str, file: Option<&str>) -> Option<&'static Alias> {
        let of_repo = |alias: &&Alias| alias.repo == repo;
        let exact = ALIASES.iter().filter(of_repo).find(|alias| alias.file.is_some() && alias.file == file);
        exact.or_else(|| ALIASES.iter().filter(of_repo).find(|alias| alias.file.is_none()))
    }

    /// The name of a repository that has no other.
    pub(crate) fn only_one(repo: &str) -> Option<&'static Alias> {
        let mut all = ALIASES.iter().filter(|alias| alias.repo == repo);
        all.next().filter(|_| all.next().is_none())
    }

    /// Any of the names that lead to a repository.
    pub(crate) fn of_repo(repo: &str) -> Option<&'static Alias> {
        ALIASES.iter().find(|alias| alias.repo.eq_ignore_ascii_case(repo))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_9b_and_dev_has_a_licence() {
        for (i, alias) in ALIASES.iter().enumerate() {
            assert!(!ALIASES[..i].iter().any(|other| other.name == alias.name), "{}", alias.name);
            let is_open = !alias.repo.to_lowercase().contains("9b") && !alias.name.starts_with("dev");
            assert_eq!(alias.licence.is_none(), is_open, "{}", alias.name);
        }
    }
}
