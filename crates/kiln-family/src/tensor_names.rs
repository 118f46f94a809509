//! The names of a transformer's modules in files, in LoRAs and in the model.
//!
//! In a name, `#` stands for a number, `~` for that number counted from the other end of an autoencoder's levels, and a
//! final `*` for the rest of the name. The model's own names are those of diffusers.

/// The names of the tensors of a family's transformer.
#[derive(Debug)]
pub struct TransformerNames {
    /// The `_class_name` of its `config.json`.
    pub class: &'static str,
    /// Its `general.architecture` in GGUF files.
    pub architecture: &'static str,
    /// How files name its modules, if not as diffusers. Files are written in the first.
    pub layouts: &'static [Layout],
    /// The prefixes of blocks in LoRA files, flattened.
    pub lora_blocks: &'static [BlockPrefix],
    /// The first words of flattened names that are those of [`layouts`](Self::layouts), not diffusers'.
    pub original_words: &'static [&'static str],
    /// The modules that GGUF presets give more bits: a prefix of blocks and the ends of names.
    pub sensitive: (&'static str, &'static [&'static str]),
}

/// The names that one origin of files has for a transformer.
#[derive(Debug)]
pub struct Layout {
    /// The programs or people it comes from.
    pub name: &'static str,
    /// The tensor by which it is recognized.
    pub anchor: &'static str,
    /// The modules whose names differ from the model's.
    pub modules: &'static [ModuleNames],
}

/// A block's prefix in LoRA files, with underscores for dots.
#[derive(Debug)]
pub struct BlockPrefix {
    /// The prefix.
    pub flat: &'static str,
    /// The prefix of these blocks in the model.
    pub model: &'static str,
}

/// The names of one module, or of a few that files store as one.
#[derive(Debug)]
pub struct ModuleNames {
    /// Its name in the file.
    pub file: &'static str,
    /// Its name in the model; or several, whose rows the file stacks in this order.
    pub model: &'static [&'static str],
    /// How the file lays out its values.
    pub layout: ModuleLayout,
    /// Whether it is a norm, whose weight is called `scale` in the file and which no LoRA changes.
    pub is_norm: bool,
    /// Other names that LoRA files have for it.
    pub lora_names: &'static [&'static str],
    /// Names that LoRA files have for consecutive slices of its rows.
    pub lora_slices: &'static [&'static str],
}

/// How a file lays out the values of a module, compared with the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModuleLayout {
    /// In the same way.
    Same,
    /// The two halves of the rows are swapped.
    SwappedHalves,
    /// A matrix is stored as a 1×1 convolution.
    Conv1x1,
}

impl ModuleNames {
    /// A module whose values are laid out as in the model.
    pub const fn new(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
        ModuleNames {
            file,
            model,
            layout: ModuleLayout::Same,
            is_norm: false,
            lora_names: &[],
            lora_slices: &[],
        }
    }
}

impl TransformerNames {
    /// Returns whether GGUF presets give a module of the model more bits.
    pub fn is_sensitive(&self, module: &str) -> bool {
        let (blocks, ends) = self.sensitive;
        let end = module.rsplit('.').next().unwrap_or(module);
        module.starts_with(blocks) && ends.contains(&end)
    }
}
