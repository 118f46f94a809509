use std::collections::BTreeMap;

use kiln_model::{Observer, Result};
use kiln_ops::Backend;
use kiln_tensor::HostTensor;

/// Keeps every tensor a run shows, named as in the dumps, image by image.
pub(crate) struct Recorder<'a, B: Backend> {
    backend: &'a B,
    inside: bool,
    /// What belongs to no single image: text, references.
    pub(crate) shared: BTreeMap<String, HostTensor>,
    /// Text tokens in the order they were encoded.
    pub(crate) texts: Vec<HostTensor>,
    pub(crate) images: Vec<BTreeMap<String, HostTensor>>,
    calls: usize,
}

impl<'a, B: Backend> Recorder<'a, B> {
    /// `inside`: of the transformer's calls as well.
    pub(crate) fn new(backend: &'a B, inside: bool) -> Self {
        let (shared, texts, images) = (BTreeMap::new(), Vec::new(), Vec::new());
        Recorder { backend, inside, shared, texts, images, calls: 0 }
    }
}

/// Tensors that stand outside of a transformer call.
fn of_run(name: &str) -> bool {
    ["noise", "step", "vae.", "ref", "text.", "prompt_embeds"].iter().any(|start| name.starts_with(start))
}

impl<B: Backend> Observer<B> for Recorder<'_, B> {
    fn see(&mut self, name: &str, x: &B::Tensor) -> Result<()> {
        if !self.inside && !of_run(name) {
            return Ok(());
        }
        let x = self.backend.download(x)?;
        match name {
            "prompt_embeds" => {
                self.texts.push(x);
                return Ok(());
            }
            "noise" => {
                self.images.push(BTreeMap::new());
                self.calls = 0;
            }
            "temb" => self.calls += 1,
            _ => {}
        }
        let full = if of_run(name) {
            name.to_owned()
        } else if name.starts_with("kv.") {
            format!("{name}.{}", self.calls - 1)
        } else {
            format!("call{}.{name}", self.calls - 1)
        };
        match self.images.last_mut() {
            Some(image) => image.insert(full, x),
            // The text encoder's states: the first prompt's are the ones the dumps have.
            None if full.starts_with("text.") => Some(self.shared.entry(full).or_insert(x).clone()),
            None => self.shared.insert(full, x),
        };
        Ok(())
    }

    fn looks_inside(&self) -> bool {
        self.inside
    }
}
