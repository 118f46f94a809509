//! What trainers call the layers of FLUX.2, and which rows of which layer of the model they mean.
//!
//! Names are compared with every dot as an underscore, so that one table serves dotted names and the flat ones of kohya,
//! OneTrainer and LyCORIS, in Black Forest Labs' naming as in diffusers'.

use std::ops::Range;

use Place::{Into, Swapped, Third, Whole};

/// How the rows of a module lie in a layer of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Row by row.
    Whole,
    /// The two halves change places: the last adaLN gives (shift, scale) in one naming and (scale, shift) in the other.
    Swapped,
    /// The layer is a third of the module, which has q, k and v in one.
    Third(usize),
    /// The module is a part of the layer, a single block's q, k, v (numbers 0 to 2) and MLP (3) in one.
    Into(usize),
}

/// A layer of the model that a module changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// As the model calls it.
    pub layer: String,
    pub place: Place,
}

/// Where a module's rows go: how many it must have, and which of them go to which row of the layer.
#[derive(Debug, PartialEq)]
pub(super) struct Rows {
    pub expected: usize,
    pub runs: Vec<(Range<usize>, usize)>,
}

impl Place {
    /// For a layer of this size; `None` when no module could fit.
    pub fn rows(self, rows: usize, cols: usize) -> Option<Rows> {
        let one = |expected, from, at| Some(Rows { expected, runs: vec![(from, at)] });
        match self {
            Whole => one(rows, 0..rows, 0),
            Swapped if rows.is_multiple_of(2) => {
                let half = rows / 2;
                Some(Rows { expected: rows, runs: vec![(half..rows, 0), (0..half, half)] })
            }
            Swapped => None,
            Third(i) => one(rows.checked_mul(3)?, rows.checked_mul(i)?..rows.checked_mul(i + 1)?, 0),
            // q, k and v are as wide as the layer's input.
            Into(i) => {
                let at = cols.checked_mul(i)?;
                let expected = if i < 3 { cols } else { rows.checked_sub(at)? };
                (at.checked_add(expected)? <= rows && expected > 0).then_some(())?;
                one(expected, 0..expected, at)
            }
        }
    }

    /// Whether two modules with these places change the same rows.
    pub fn overlaps(self, other: Place) -> bool {
        !matches!((self, other), (Into(a), Into(b)) if a != b)
    }
}

type Rule = (&'static [&'static str], &'static [(&'static str, Place)]);

const OUTSIDE: &[Rule] = &[
    (&["img_in", "x_embedder"], &[("x_embedder", Whole)]),
    (&["txt_in", "context_embedder"], &[("context_embedder", Whole)]),
    (
        &["time_in_in_layer", "time_guidance_embed_timestep_embedder_linear_1"],
        &[("time_guidance_embed.timestep_embedder.linear_1", Whole)],
    ),
    (
        &["time_in_out_layer", "time_guidance_embed_timestep_embedder_linear_2"],
        &[("time_guidance_embed.timestep_embedder.linear_2", Whole)],
    ),
    (
        &["guidance_in_in_layer", "time_guidance_embed_guidance_embedder_linear_1"],
        &[("time_guidance_embed.guidance_embedder.linear_1", Whole)],
    ),
    (
        &["guidance_in_out_layer", "time_guidance_embed_guidance_embedder_linear_2"],
        &[("time_guidance_embed.guidance_embedder.linear_2", Whole)],
    ),
    (
        &["double_stream_modulation_img_lin", "double_stream_modulation_img_linear"],
        &[("double_stream_modulation_img.linear", Whole)],
    ),
    (
        &["double_stream_modulation_txt_lin", "double_stream_modulation_txt_linear"],
        &[("double_stream_modulation_txt.linear", Whole)],
    ),
    (
        &["single_stream_modulation_lin", "single_stream_modulation_linear"],
        &[("single_stream_modulation.linear", Whole)],
    ),
    (&["final_layer_linear", "proj_out"], &[("proj_out", Whole)]),
    (&["final_layer_adaLN_modulation_1"], &[("norm_out.linear", Swapped)]),
    (&["norm_out_linear"], &[("norm_out.linear", Whole)]),
];

const DOUBLE_BLOCKS: [&str; 3] = ["double_blocks_", "transformer_blocks_", "sformer_blocks_"];

const DOUBLE: &[Rule] = &[
    (
        &["img_attn_qkv", "attn_to_qkv"],
        &[("attn.to_q", Third(0)), ("attn.to_k", Third(1)), ("attn.to_v", Third(2))],
    ),
    (
        &["txt_attn_qkv", "attn_to_added_qkv"],
        &[("attn.add_q_proj", Third(0)), ("attn.add_k_proj", Third(1)), ("attn.add_v_proj", Third(2))],
    ),
    (&["img_attn_qkv_0", "attn_to_q"], &[("attn.to_q", Whole)]),
    (&["img_attn_qkv_1", "attn_to_k"], &[("attn.to_k", Whole)]),
    (&["img_attn_qkv_2", "attn_to_v"], &[("attn.to_v", Whole)]),
    (&["txt_attn_qkv_0", "attn_add_q_proj"], &[("attn.add_q_proj", Whole)]),
    (&["txt_attn_qkv_1", "attn_add_k_proj"], &[("attn.add_k_proj", Whole)]),
    (&["txt_attn_qkv_2", "attn_add_v_proj"], &[("attn.add_v_proj", Whole)]),
    (&["img_attn_proj", "attn_to_out_0", "attn_to_out"], &[("attn.to_out.0", Whole)]),
    (&["txt_attn_proj", "attn_to_add_out"], &[("attn.to_add_out", Whole)]),
    (&["img_mlp_0", "ff_linear_in"], &[("ff.linear_in", Whole)]),
    (&["img_mlp_2", "ff_linear_out"], &[("ff.linear_out", Whole)]),
    (&["txt_mlp_0", "ff_context_linear_in"], &[("ff_context.linear_in", Whole)]),
    (&["txt_mlp_2", "ff_context_linear_out"], &[("ff_context.linear_out", Whole)]),
];

const SINGLE_BLOCKS: [&str; 2] = ["single_blocks_", "single_transformer_blocks_"];

const SINGLE: &[Rule] = &[
    (&["linear1", "attn_to_qkv_mlp_proj"], &[("attn.to_qkv_mlp_proj", Whole)]),
    (&["linear1_0", "attn_to_q"], &[("attn.to_qkv_mlp_proj", Into(0))]),
    (&["linear1_1", "attn_to_k"], &[("attn.to_qkv_mlp_proj", Into(1))]),
    (&["linear1_2", "attn_to_v"], &[("attn.to_qkv_mlp_proj", Into(2))]),
    (&["linear1_3", "proj_mlp"], &[("attn.to_qkv_mlp_proj", Into(3))]),
    (&["linear2", "attn_to_out", "attn_to_out_0", "proj_out"], &[("attn.to_out", Whole)]),
];

/// A block's number and the name of something in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block<'n> {
    Double(usize, &'n str),
    Single(usize, &'n str),
}

/// The block that a flat name is in.
pub(super) fn block(flat: &str) -> Option<Block<'_>> {
    let inside = |starts: &[&str]| {
        let rest = starts.iter().find_map(|start| flat.strip_prefix(start))?;
        let (number, name) = rest.split_once('_')?;
        // As the model would write it, and small: a name must not make up another one's number.
        let plain = number == "0" || !number.starts_with('0') && number.bytes().all(|b| b.is_ascii_digit());
        (plain && number.len() <= 4).then(|| Some((number.parse().ok()?, name)))?
    };
    let double = || inside(&DOUBLE_BLOCKS).map(|(number, name)| Block::Double(number, name));
    double().or_else(|| inside(&SINGLE_BLOCKS).map(|(number, name)| Block::Single(number, name)))
}

/// The layers that a module of this flat name changes; `None` when FLUX.2 has nothing of that name.
pub(super) fn targets(flat: &str) -> Option<Vec<Target>> {
    let (rules, name, start) = match block(flat) {
        Some(Block::Double(number, name)) => (DOUBLE, name, format!("transformer_blocks.{number}.")),
        Some(Block::Single(number, name)) => (SINGLE, name, format!("single_transformer_blocks.{number}.")),
        None => (OUTSIDE, flat, String::new()),
    };
    let (_, layers) = rules.iter().find(|(names, _)| names.contains(&name))?;
    Some(layers.iter().map(|&(layer, place)| Target { layer: format!("{start}{layer}"), place }).collect())
}

/// Whether the name is Black Forest Labs' rather than diffusers'.
pub(super) fn is_original(flat: &str) -> bool {
    const STARTS: [&str; 7] =
        ["double_blocks_", "single_blocks_", "img_in", "txt_in", "time_in_", "guidance_in_", "final_layer_"];
    STARTS.iter().any(|start| flat.starts_with(start)) || flat.ends_with("_lin")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(flat: &str) -> Vec<(String, Place)> {
        targets(flat).unwrap_or_default().into_iter().map(|t| (t.layer, t.place)).collect()
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
        ] {
            assert!(!found(original).is_empty(), "{original}");
            assert_eq!(found(original), found(diffusers), "{original}");
            assert!(is_original(original) && !is_original(diffusers));
        }
        assert_eq!(found("final_layer_adaLN_modulation_1"), [("norm_out.linear".into(), Swapped)]);
        assert_eq!(found("norm_out_linear"), [("norm_out.linear".into(), Whole)]);
    }

    #[test]
    fn names_of_other_models_mean_nothing() {
        for name in [
            "double_blocks_0_img_mod_lin",
            "single_blocks_0_modulation_lin",
            "transformer_blocks_0_ff_net_0_proj",
            "transformer_blocks_00_attn_to_q",
            "transformer_blocks_99999_attn_to_q",
            "transformer_blocks_x_attn_to_q",
            "transformer_blocks_1",
            "vector_in_in_layer",
            "",
        ] {
            assert_eq!(targets(name), None, "{name}");
        }
    }

    #[test]
    fn every_rule_of_a_table_has_names_of_its_own() {
        for rules in [OUTSIDE, DOUBLE, SINGLE] {
            let mut names: Vec<_> = rules.iter().flat_map(|(names, _)| *names).collect();
            let count = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), count);
        }
    }

    #[test]
    fn rows_go_where_the_place_says() {
        let runs = |place: Place, rows, cols| place.rows(rows, cols).map(|r| (r.expected, r.runs));
        assert_eq!(runs(Whole, 6, 2), Some((6, vec![(0..6, 0)])));
        assert_eq!(runs(Swapped, 6, 2), Some((6, vec![(3..6, 0), (0..3, 3)])));
        assert_eq!(runs(Third(2), 6, 2), Some((18, vec![(12..18, 0)])));
        assert_eq!(runs(Into(1), 18, 2), Some((2, vec![(0..2, 2)])));
        assert_eq!(runs(Into(3), 18, 2), Some((12, vec![(0..12, 6)])));
        for (place, rows, cols) in
            [(Swapped, 5, 2), (Into(3), 6, 2), (Into(2), 5, 2), (Third(1), usize::MAX, 2)]
        {
            assert_eq!(runs(place, rows, cols), None);
        }
    }
}
