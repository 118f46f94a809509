use std::collections::BTreeMap;

use kiln_nn::{Observer, Result};
use kiln_ops::Backend;
use kiln_tensor::HostTensor;

/// Records every observed tensor per image, named as in the dumps.
pub(crate) struct Recorder<'a, B: Backend> {
    backend: &'a B,
    transformer_tensors: bool,
    /// Tensors that belong to no single image: text, references.
    pub(crate) shared: BTreeMap<String, HostTensor>,
    /// Text embeddings in the order of encoding.
    pub(crate) texts: Vec<HostTensor>,
    pub(crate) images: Vec<BTreeMap<String, HostTensor>>,
    calls: usize,
}

impl<'a, B: Backend> Recorder<'a, B> {
    /// `transformer_tensors`: whether to record tensors inside transformer calls.
    pub(crate) fn new(backend: &'a B, transformer_tensors: bool) -> Self {
        let (shared, texts, images) = (BTreeMap::new(), Vec::new(), Vec::new());
        Recorder { backend, transformer_tensors, shared, texts, images, calls: 0 }
    }
}

/// Whether a tensor is outside of transformer calls.
fn is_outside(name: &str) -> bool {
    ["noise", "step", "vae.", "ref", "text.", "prompt_embeds"].iter().any(|start| name.starts_with(start))
}

impl<B: Backend> Observer<B> for Recorder<'_, B> {
    fn inspect(&mut self, name: &str, x: &B::Tensor) -> Result<()> {
        if !self.transformer_tensors && !is_outside(name) {
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
        let full = if is_outside(name) {
            name.to_owned()
        } else if name.starts_with("kv.") {
            format!("{name}.{}", self.calls - 1)
        } else {
            format!("call{}.{name}", self.calls - 1)
        };
        match self.images.last_mut() {
            Some(image) => image.insert(full, x),
            // The dumps have the text encoder's hidden states of the first prompt only.
            None if full.starts_with("text.") => Some(self.shared.entry(full).or_insert(x).clone()),
            None => self.shared.insert(full, x),
        };
        Ok(())
    }

    fn wants_tensors(&self) -> bool {
        self.transformer_tensors
    }
}
