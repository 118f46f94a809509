//! The layers of the model that a LoRA module changes, by the module's name.
//!
//! Names are compared with every dot as an underscore, so that the tables of the families serve dotted names and
//! the flat ones of kohya, OneTrainer and LyCORIS, in Black Forest Labs' naming as in diffusers'. Inside a block, names of
//! both namings are accepted behind the prefix of either.

use std::ops::Range;

use kiln_family::{BlockPrefix, FAMILIES, ModuleLayout, ModuleNames, TransformerNames};

use crate::layout::parse_index;

/// How the rows of a module map to those of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowMapping {
    /// Row by row.
    Whole,
    /// With the two halves swapped: the last adaLN gives (shift, scale) in one naming and (scale, shift) in the other.
    SwappedHalves,
    /// The layer is chunk `.0` of `.1` equal chunks of the module, which fuses q, k and v.
    FromChunk(usize, usize),
    /// The module is one slice of the layer, which fuses a single block's q, k, v (numbers 0 to 2) and MLP (3).
    IntoSlice(usize),
}

/// Slices of the layer in [`RowMapping::IntoSlice`] before the MLP's.
const QKV_SLICES: usize = 3;

/// A layer of the model that a module changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerTarget {
    /// The model's name for it.
    pub layer: String,
    pub mapping: RowMapping,
}

/// A [`RowMapping`] for a layer of a certain size.
#[derive(Debug, PartialEq)]
pub(super) struct MappedRows {
    /// How many rows the module must have.
    pub expected: usize,
    pub runs: RowRuns,
}

/// Ranges of a module's rows, and the row of the layer where each begins.
pub(super) type RowRuns = Vec<(Range<usize>, usize)>;

impl RowMapping {
    /// Maps rows for a layer of this size; `None` if no module could fit.
    pub fn for_layer(self, rows: usize, cols: usize) -> Option<MappedRows> {
        let one = |expected, from, at| Some(MappedRows { expected, runs: vec![(from, at)] });
        match self {
            RowMapping::Whole => one(rows, 0..rows, 0),
            RowMapping::SwappedHalves if rows.is_multiple_of(2) => {
                let half = rows / 2;
                Some(MappedRows { expected: rows, runs: vec![(half..rows, 0), (0..half, half)] })
            }
            RowMapping::SwappedHalves => None,
            RowMapping::FromChunk(i, count) => {
                one(rows.checked_mul(count)?, rows.checked_mul(i)?..rows.checked_mul(i + 1)?, 0)
            }
            // q, k and v are as wide as the layer's input.
            RowMapping::IntoSlice(i) => {
                let at = cols.checked_mul(i)?;
                let expected = if i < QKV_SLICES { cols } else { rows.checked_sub(at)? };
                (at.checked_add(expected)? <= rows && expected > 0).then_some(())?;
                one(expected, 0..expected, at)
            }
        }
    }

    /// Whether two modules with these mappings change the same rows of a layer.
    pub fn overlaps(self, other: RowMapping) -> bool {
        !matches!((self, other), (RowMapping::IntoSlice(a), RowMapping::IntoSlice(b)) if a != b)
    }
}

/// A block's prefix in the model and its number, and the name of a module in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block<'n> {
    pub prefix: &'static str,
    pub number: usize,
    pub name: &'n str,
}

impl Block<'_> {
    /// Whether text and image are separate streams in it.
    pub fn is_double(&self) -> bool {
        self.prefix == "transformer_blocks."
    }
}

/// The block that a flat name is in.
pub(super) fn block(flat: &str) -> Option<Block<'_>> {
    families().find_map(|names| block_of(names, flat))
}

fn block_of<'n>(names: &TransformerNames, flat: &'n str) -> Option<Block<'n>> {
    let inside = |prefix: &BlockPrefix| {
        let (number, name) = flat.strip_prefix(prefix.flat)?.split_once('_')?;
        Some(Block { prefix: prefix.model, number: parse_index(number)?, name })
    };
    names.lora_blocks.iter().find_map(inside)
}

/// The names of each family's transformer.
fn families() -> impl Iterator<Item = &'static TransformerNames> {
    FAMILIES.iter().map(|family| family.transformer)
}

/// The layers that a module of this flat name changes; `None` if no family has such a module.
pub(super) fn layer_targets(flat: &str) -> Option<Vec<LayerTarget>> {
    families().find_map(|names| targets_of(names, flat))
}

fn targets_of(names: &TransformerNames, flat: &str) -> Option<Vec<LayerTarget>> {
    let Block { prefix, number, name } =
        block_of(names, flat).unwrap_or(Block { prefix: "", number: 0, name: flat });
    let in_place = |module: &&ModuleNames| !module.is_norm && split_block(module.model[0]).0 == prefix;
    let modules = names.layouts.iter().flat_map(|layout| layout.modules);
    let layers = modules.filter(in_place).find_map(|module| match_module(module, name))?;
    let target = |(layer, mapping): (&str, RowMapping)| LayerTarget {
        layer: layer.replace('#', &number.to_string()),
        mapping,
    };
    Some(layers.into_iter().map(target).collect())
}

/// The layers of `module` that `name`, which is flat and relative to a block, stands for.
fn match_module(module: &ModuleNames, name: &str) -> Option<Vec<(&'static str, RowMapping)>> {
    let is = |pattern: &&str| is_flat(split_block(pattern).1, name);
    // Some trainers number the layers or slices that a module fuses: `img_attn_qkv_2`.
    let numbered = || {
        let (start, number) = name.rsplit_once('_')?;
        is_flat(split_block(module.file).1, start).then(|| parse_index(number))?
    };
    let member = |names: &[&str]| names.iter().position(&is).or_else(numbered);
    let is_whole = is(&module.file) || module.lora_names.iter().any(&is);
    match module.model {
        &[layer] if is(&module.file) && module.layout == ModuleLayout::SwappedHalves => {
            Some(vec![(layer, RowMapping::SwappedHalves)])
        }
        &[layer] if is_whole || is(&layer) => Some(vec![(layer, RowMapping::Whole)]),
        &[layer] => {
            let slice = member(module.lora_slices).filter(|slice| *slice < module.lora_slices.len())?;
            Some(vec![(layer, RowMapping::IntoSlice(slice))])
        }
        layers if is_whole => {
            let chunk = |(i, &layer)| (layer, RowMapping::FromChunk(i, layers.len()));
            Some(layers.iter().enumerate().map(chunk).collect())
        }
        layers => Some(vec![(*layers.get(member(layers)?)?, RowMapping::Whole)]),
    }
}

/// The prefix of a name's block, without its number, and the name inside the block.
fn split_block(pattern: &str) -> (&str, &str) {
    pattern.split_once("#.").unwrap_or(("", pattern))
}

/// Whether `flat` is `dotted` with underscores for dots.
fn is_flat(dotted: &str, flat: &str) -> bool {
    dotted.len() == flat.len() && dotted.bytes().map(|b| if b == b'.' { b'_' } else { b }).eq(flat.bytes())
}

/// Whether the name is one of a family's original layout rather than diffusers'.
pub(super) fn is_original(flat: &str) -> bool {
    let begins = |word: &&str| {
        let rest = flat.strip_prefix(*word);
        rest.is_some_and(|rest| word.ends_with('_') || rest.is_empty() || rest.starts_with('_'))
    };
    families().any(|names| names.original_words.iter().any(begins))
}

#[cfg(test)]
mod tests {
    use super::RowMapping::{FromChunk, IntoSlice, SwappedHalves, Whole};
    use super::*;

    fn found(flat: &str) -> Vec<(String, RowMapping)> {
        layer_targets(flat).unwrap_or_default().into_iter().map(|t| (t.layer, t.mapping)).collect()
    }

    #[test]
    fn both_namings_mean_the_same_layers() {
        for (original, diffusers) in [
            ("double_blocks_3_img_attn_qkv", "transformer_blocks_3_attn_to_qkv"),
            ("double_blocks_0_txt_attn_qkv_1", "transformer_blocks_0_attn_add_k_proj"),
            ("double_blocks_12_img_mlp_2", "sformer_blocks_12_ff_linear_out"),
            ("single_blocks_7_linear2", "single_transformer_blocks_7_attn_to_out"),
            ("single_blocks_7_linear1_3", "single_transformer_blocks_7_proj_mlp"),
            ("time_in_out_layer", "time_guidance_embed_timestep_embedder_linear_2"),
            // dev's last single block, and its guidance.
            ("single_blocks_47_linear1", "single_transformer_blocks_47_attn_to_qkv_mlp_proj"),
            ("guidance_in_in_layer", "time_guidance_embed_guidance_embedder_linear_1"),
            ("guidance_in_out_layer", "time_guidance_embed_guidance_embedder_linear_2"),
        ] {
            assert!(!found(original).is_empty(), "{original}");
            assert_eq!(found(original), found(diffusers), "{original}");
            assert!(is_original(original) && !is_original(diffusers));
        }
        assert_eq!(found("final_layer_adaLN_modulation_1"), [("norm_out.linear".into(), SwappedHalves)]);
        assert_eq!(found("norm_out_linear"), [("norm_out.linear".into(), Whole)]);
    }

    #[test]
    fn fused_modules_mean_several_layers_and_slices_a_part_of_one() {
        let layer = |leaf: &str| format!("transformer_blocks.3.attn.{leaf}");
        let qkv = ["to_q", "to_k", "to_v"].map(layer);
        for name in ["double_blocks_3_img_attn_qkv", "double_blocks_3_attn_to_qkv"] {
            let expected: Vec<_> =
                qkv.iter().enumerate().map(|(i, layer)| (layer.clone(), FromChunk(i, 3))).collect();
            assert_eq!(found(name), expected);
        }
        for name in ["transformer_blocks_3_img_attn_qkv_1", "sformer_blocks_3_attn_to_k"] {
            assert_eq!(found(name), [(qkv[1].clone(), Whole)]);
        }
        assert_eq!(found("double_blocks_3_attn_to_out"), [(layer("to_out.0"), Whole)]);
        let fused = "single_transformer_blocks.0.attn.to_qkv_mlp_proj";
        assert_eq!(found("single_blocks_0_linear1"), [(fused.into(), Whole)]);
        assert_eq!(found("single_blocks_0_attn_to_v"), [(fused.into(), IntoSlice(2))]);
        assert_eq!(found("single_transformer_blocks_0_linear1_3"), [(fused.into(), IntoSlice(3))]);
    }

    #[test]
    fn names_of_other_models_mean_nothing() {
        for name in [
            "double_blocks_0_img_mod_lin",
            "single_blocks_0_modulation_lin",
            "transformer_blocks_0_ff_net_0_proj",
            "transformer_blocks_0_attn_norm_q",
            "transformer_blocks_00_attn_to_q",
            "transformer_blocks_99999_attn_to_q",
            "transformer_blocks_x_attn_to_q",
            "transformer_blocks_1",
            "double_blocks_0_img_attn_qkv_3",
            "double_blocks_0_img_attn_qkv_00",
            "single_blocks_0_linear1_4",
            "single_blocks_0_linear2_0",
            "attn_to_q",
            "vector_in_in_layer",
            "",
        ] {
            assert_eq!(layer_targets(name), None, "{name}");
        }
    }

    #[test]
    fn no_name_means_two_modules() {
        let mut names: Vec<(&str, String)> = Vec::new();
        for module in
            kiln_family::flux2::FLUX2.transformer.layouts[0].modules.iter().filter(|module| !module.is_norm)
        {
            let all = [&[module.file], module.model, module.lora_names, module.lora_slices].concat();
            let flat = all.iter().map(|name| split_block(name).1.replace('.', "_"));
            names.extend(flat.map(|name| (split_block(module.model[0]).0, name)));
        }
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn rows_go_where_the_mapping_says() {
        let runs =
            |mapping: RowMapping, rows, cols| mapping.for_layer(rows, cols).map(|r| (r.expected, r.runs));
        assert_eq!(runs(Whole, 6, 2), Some((6, vec![(0..6, 0)])));
        assert_eq!(runs(SwappedHalves, 6, 2), Some((6, vec![(3..6, 0), (0..3, 3)])));
        assert_eq!(runs(FromChunk(2, 3), 6, 2), Some((18, vec![(12..18, 0)])));
        assert_eq!(runs(IntoSlice(1), 18, 2), Some((2, vec![(0..2, 2)])));
        assert_eq!(runs(IntoSlice(3), 18, 2), Some((12, vec![(0..12, 6)])));
        for (mapping, rows, cols) in [
            (SwappedHalves, 5, 2),
            (IntoSlice(3), 6, 2),
            (IntoSlice(2), 5, 2),
            (FromChunk(1, 3), usize::MAX, 2),
        ] {
            assert_eq!(runs(mapping, rows, cols), None);
        }
    }
}
