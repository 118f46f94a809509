//! The model that a LoRA was made for, as far as names and shapes tell.

use std::fmt;

use kiln_family::{FAMILIES, published_names};

use super::targets::{block, layer_targets};

/// A model that LoRAs are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraBase {
    /// The family before FLUX.2, whose layers have much the same names.
    Flux1,
    /// A model of a known family.
    Width(usize),
}

impl fmt::Display for LoraBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LoraBase::Width(dim) = self else { return f.write_str("FLUX.1") };
        match FAMILIES.iter().find_map(|family| family.title_of_width(*dim)) {
            Some(title) => f.write_str(&title),
            None => write!(f, "a {} model {dim} wide", published_names()),
        }
    }
}

/// Names that only FLUX.1 has, inside of blocks and outside.
const FLUX1_IN_BLOCKS: [&str; 8] = [
    "img_mod_lin",
    "txt_mod_lin",
    "modulation_lin",
    "norm1_linear",
    "norm1_context_linear",
    "norm_linear",
    "ff_net_",
    "ff_context_net_",
];
const FLUX1_OUTSIDE: [&str; 3] = ["vector_in_", "time_text_embed_", "distilled_guidance_layer_"];

/// FLUX.2 has at most 8, FLUX.1 has 19.
const MAX_DOUBLE_BLOCKS: usize = 8;
/// Single blocks of klein 4B; FLUX.1, which is as wide, has 38.
const SINGLE_BLOCKS_4B: usize = 20;
const DIM_4B: usize = 3072;

impl LoraBase {
    /// Guesses the model from the flat names of modules and the sizes of the weights they change.
    pub(super) fn guess<'m>(
        modules: impl Iterator<Item = (&'m str, [usize; 2])> + Clone,
    ) -> Option<LoraBase> {
        if modules.clone().any(|(name, size)| is_flux1(name, size)) {
            return Some(LoraBase::Flux1);
        }
        let dim = modules.clone().find_map(|(name, size)| dim(name, size))?;
        let beyond = |name: &str| match block(name) {
            Some(block) if block.is_double() => block.number >= MAX_DOUBLE_BLOCKS,
            Some(block) => block.number >= SINGLE_BLOCKS_4B,
            None => false,
        };
        if dim == DIM_4B && modules.clone().any(|(name, _)| beyond(name)) {
            return Some(LoraBase::Flux1);
        }
        Some(LoraBase::Width(dim))
    }
}

fn is_flux1(name: &str, [rows, cols]: [usize; 2]) -> bool {
    let named = match block(name) {
        Some(block) => FLUX1_IN_BLOCKS.iter().any(|start| block.name.starts_with(start)),
        None => FLUX1_OUTSIDE.iter().any(|start| name.starts_with(start)),
    };
    // FLUX.1's MLPs are 4 times as wide as the model and have no gate; FLUX.2's are 3 times as wide, with a gate.
    let is_multiple = |n: usize, dim: usize, other: usize| dim.checked_mul(n) == Some(other);
    let shaped = match block(name).map(|block| (block.is_double(), block.name)) {
        Some((true, "img_mlp_0" | "txt_mlp_0")) => is_multiple(4, cols, rows),
        Some((true, "img_mlp_2" | "txt_mlp_2")) => is_multiple(4, rows, cols),
        Some((false, "linear1")) => is_multiple(7, cols, rows),
        Some((false, "linear2" | "proj_out")) => is_multiple(5, rows, cols),
        Some((false, "linear1_3" | "proj_mlp")) => is_multiple(4, cols, rows),
        _ => false,
    };
    named || shaped
}

/// The width of the model, from a module that has it as a side: as its rows, if it is one of [`TO_THE_WIDTH`].
fn dim(name: &str, [rows, cols]: [usize; 2]) -> Option<usize> {
    match layer_targets(name).as_deref() {
        Some([target, ..]) if TO_THE_WIDTH.iter().any(|end| target.layer.ends_with(end)) => Some(rows),
        Some(_) => Some(cols),
        None => block(name).map(|_| cols),
    }
}

/// The ends of the names of layers whose output is as wide as the model, and whose input may not be.
const TO_THE_WIDTH: [&str; 7] = [
    "x_embedder",
    "context_embedder",
    "timestep_embedder.linear_1",
    "guidance_embedder.linear_1",
    "ff.linear_out",
    "ff_context.linear_out",
    ".attn.to_out",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(modules: &[(&str, [usize; 2])]) -> Option<LoraBase> {
        LoraBase::guess(modules.iter().copied())
    }

    #[test]
    fn sizes_tell_the_models_apart() {
        assert_eq!(guess(&[("double_blocks_4_img_attn_qkv", [9216, 3072])]), Some(LoraBase::Width(3072)));
        assert_eq!(guess(&[("transformer_blocks_7_attn_to_q", [4096, 4096])]), Some(LoraBase::Width(4096)));
        assert_eq!(guess(&[("single_blocks_47_linear2", [6144, 24576])]), Some(LoraBase::Width(6144)));
        assert_eq!(guess(&[("x_embedder", [256, 128])]), Some(LoraBase::Width(256)));
        assert_eq!(guess(&[("guidance_in_in_layer", [6144, 256])]), Some(LoraBase::Width(6144)));
        assert_eq!(guess(&[("down_blocks_0", [1, 1])]), None);
        let names = [3072, 4096, 6144, 256].map(|dim| LoraBase::Width(dim).to_string());
        let expected = ["FLUX.2 klein 4B", "FLUX.2 klein 9B", "FLUX.2 dev", "a FLUX.2 model 256 wide"];
        assert_eq!(names, expected);
    }

    #[test]
    fn flux_1_is_recognized_by_names_shapes_and_block_numbers() {
        for module in [
            ("double_blocks_0_img_mod_lin", [18432, 3072]),
            ("transformer_blocks_0_ff_net_0_proj", [12288, 3072]),
            ("single_transformer_blocks_0_norm_linear", [9216, 3072]),
            ("vector_in_in_layer", [3072, 768]),
            ("double_blocks_0_img_mlp_0", [12288, 3072]),
            ("single_blocks_0_linear1", [21504, 3072]),
            ("single_blocks_0_linear2", [3072, 15360]),
            ("double_blocks_18_img_attn_qkv", [9216, 3072]),
            ("single_transformer_blocks_37_attn_to_q", [3072, 3072]),
        ] {
            assert_eq!(guess(&[module]), Some(LoraBase::Flux1), "{module:?}");
        }
    }
}
