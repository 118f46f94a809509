//! What a model lacks, and where to get it.

use kiln_weights::Component;

use super::{Model, search};
use crate::error::{Error, Field, Hint, MissingComponent};
use crate::hint;

impl Model {
    /// Returns the short name of the model whose components fit this transformer.
    pub fn matching_model(&self) -> Option<&'static str> {
        let text_dim = self.transformer.config.joint_attention_dim;
        let mut known = kiln_family::FAMILIES.iter().flat_map(|family| family.components_of);
        known.find(|(dim, _)| *dim == text_dim).map(|(_, name)| *name)
    }

    /// Returns the error for a request that needs a component which the model lacks.
    pub(crate) fn missing_component(&self, component: MissingComponent) -> Error {
        let (path, name) = (self.path.display(), component.name());
        let kind = match component {
            MissingComponent::Vae => Component::Vae,
            MissingComponent::TextEncoder => Component::TextEncoder,
        };
        let what = match (self.candidates(kind), &self.searched_folders[..]) {
            (Some(files), _) => {
                format!("several files could be the {kind} of `{path}`: {}", search::quoted_names(files))
            }
            (None, []) => format!("the model `{path}` has no `{name}/config.json`"),
            (None, folders) => {
                let folders: Vec<_> = folders.iter().map(|p| format!("`{}`", p.display())).collect();
                let unusable: String = self.unusable.iter().map(|reason| format!("; {reason}")).collect();
                let name = name.replace('_', " ");
                format!("there is no {name} for `{path}` in {}{unusable}", folders.join(", "))
            }
        };
        Error::MissingComponent { what, component, hint: self.component_hint(component, kind) }
    }

    /// Where to get a component that the model lacks.
    fn component_hint(&self, missing: MissingComponent, component: Component) -> Hint {
        let field = match missing {
            MissingComponent::Vae => Field::Vae,
            MissingComponent::TextEncoder => Field::TextEncoder,
        };
        if self.candidates(component).is_some() {
            return hint!["name one of them with ", field];
        }
        if self.searched_folders.is_empty() {
            return match missing {
                MissingComponent::Vae => hint!["download it"; "give another autoencoder with ", field],
                MissingComponent::TextEncoder => {
                    hint!["download it"; "give prompt embeddings with ", Field::Embeds]
                }
            };
        }
        let text_dim = self.transformer.config.joint_attention_dim;
        let pull =
            self.matching_model().map(|name| hint![format!("run `kiln pull {name}`, whose components fit")]);
        let put = match missing {
            MissingComponent::Vae => hint![
                "put FLUX.2's autoencoder (flux2-vae.safetensors or ae.safetensors) there";
                "give it with ", field
            ],
            MissingComponent::TextEncoder => {
                let hidden = text_dim / 3;
                let name = match hidden {
                    2560 => "Qwen3-4B",
                    4096 => "Qwen3-8B",
                    5120 => "Mistral-Small-3.2-24B",
                    _ => "a text encoder",
                };
                hint![
                    format!("put {name} (hidden size {hidden}; safetensors or GGUF) there");
                    "give it with ", field;
                    "give prompt embeddings with ", Field::Embeds
                ]
            }
        };
        pull.into_iter().fold(put, |put, pull| pull.or(put))
    }
}
