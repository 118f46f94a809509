//! Names of modules, translated between a file's naming scheme and the model's.
//!
//! A table has one [`ModuleNames`] per module, which says what its placeholders stand for.

use kiln_family::{ModuleLayout, ModuleNames};
use kiln_tensor::Shape;

/// Which slice of the file's tensor is the model's module number `i`.
fn view(names: &ModuleNames, i: usize) -> View {
    match (names.layout, names.model.len()) {
        (ModuleLayout::SwappedHalves, _) => View::SwappedHalves,
        (ModuleLayout::Conv1x1, _) => View::Squeezed,
        (ModuleLayout::Same, 1) => View::Whole,
        (ModuleLayout::Same, count) => View::Chunk(i, count),
    }
}

/// Which slice of a file's tensor is a tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Whole,
    /// Chunk `.0` of `.1` equal chunks of the rows.
    Chunk(usize, usize),
    /// All, with the two halves of the rows swapped.
    SwappedHalves,
    /// All, without two final dimensions of 1.
    Squeezed,
}

impl View {
    /// The shape of this view of a tensor; `None` if the tensor can't be sliced so.
    pub fn shape(&self, stored: &Shape) -> Option<Shape> {
        match (self, stored.dims()) {
            (View::Whole, _) => Some(stored.clone()),
            (View::Chunk(_, count), [rows, rest @ ..]) if rows.is_multiple_of(*count) => {
                Some([&[rows / count], rest].concat().into())
            }
            (View::SwappedHalves, [rows, ..]) if rows.is_multiple_of(2) => Some(stored.clone()),
            (View::Squeezed, [rows, cols, 1, 1]) => Some([*rows, *cols].into()),
            // Some files store the matrix itself, and vectors have nothing to squeeze.
            (View::Squeezed, [_] | [_, _]) => Some(stored.clone()),
            _ => None,
        }
    }
}

/// The model's tensors in the file's tensor `name`; `None` if the table does not have it.
pub(super) fn to_model(modules: &[ModuleNames], name: &str) -> Option<Vec<(String, View)>> {
    let (module, leaf) = name.rsplit_once('.')?;
    // Norms have a `scale` in the original naming and a `weight` in all others.
    let leaf = if leaf == "scale" { "weight" } else { leaf };
    modules.iter().find_map(|names| {
        let matched = Match::new(names.file, module)?;
        let tensors = names.model.iter().enumerate();
        Some(tensors.map(|(i, model)| (format!("{}.{leaf}", matched.fill(model)), view(names, i))).collect())
    })
}

/// The file's tensor that holds the model's tensor `name`, and which slice of it that is.
pub(super) fn to_file(modules: &[ModuleNames], name: &str) -> Option<(String, View)> {
    let (module, leaf) = name.rsplit_once('.')?;
    modules.iter().find_map(|names| {
        let mut candidates = names.model.iter().enumerate();
        let (i, matched) = candidates.find_map(|(i, model)| Some((i, Match::new(model, module)?)))?;
        let leaf = if names.is_norm && leaf == "weight" { "scale" } else { leaf };
        Some((format!("{}.{leaf}", matched.fill(names.file)), view(names, i)))
    })
}

/// What the placeholders of a pattern stand for in a name.
struct Match<'n> {
    numbers: Vec<usize>,
    rest: &'n str,
}

/// The last of the autoencoder's levels.
const LAST_LEVEL: usize = 3;

impl<'n> Match<'n> {
    fn new(pattern: &str, name: &'n str) -> Option<Match<'n>> {
        let (mut numbers, mut rest) = (Vec::new(), name);
        let mut segments = pattern.split('.').peekable();
        while let Some(segment) = segments.next() {
            if segment == "*" {
                return Some(Match { numbers, rest });
            }
            let (word, after) = match (rest.split_once('.'), segments.peek()) {
                (Some((word, after)), Some(_)) => (word, after),
                (None, None) => (rest, ""),
                _ => return None,
            };
            match segment {
                "#" => numbers.push(parse_index(word)?),
                "~" => numbers.push(LAST_LEVEL.checked_sub(parse_index(word)?)?),
                _ if segment != word => return None,
                _ => {}
            }
            rest = after;
        }
        Some(Match { numbers, rest: "" })
    }

    fn fill(&self, pattern: &str) -> String {
        let mut numbers = self.numbers.iter();
        let mut number = || numbers.next().copied().unwrap_or(0);
        let segments = pattern.split('.').map(|segment| match segment {
            "#" => number().to_string(),
            "~" => LAST_LEVEL.saturating_sub(number()).to_string(),
            "*" => self.rest.to_owned(),
            word => word.to_owned(),
        });
        segments.collect::<Vec<_>>().join(".")
    }
}

/// Parses a number in a name. It must be small and written as a model writes it (no sign, no leading zeros), so that two
/// different names never mean the same module.
pub(crate) fn parse_index(word: &str) -> Option<usize> {
    let canonical = word == "0" || !word.starts_with(['0', '+']);
    (canonical && word.len() <= 4).then(|| word.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::super::Component;
    use super::*;

    fn original_names(component: Component) -> &'static [ModuleNames] {
        super::super::original_names(component, &kiln_family::flux2::FLUX2)
    }

    fn names(component: Component, name: &str) -> Vec<(String, View)> {
        to_model(original_names(component), name).unwrap_or_default()
    }

    #[test]
    fn every_kind_of_module_round_trips() {
        let cases = [
            (Component::Transformer, "img_in.weight"),
            (Component::Transformer, "double_blocks.7.txt_attn.qkv.weight"),
            (Component::Transformer, "double_blocks.0.img_attn.norm.key_norm.scale"),
            (Component::Transformer, "single_blocks.23.linear1.weight"),
            (Component::Transformer, "final_layer.adaLN_modulation.1.weight"),
            (Component::Vae, "decoder.up.0.block.2.nin_shortcut.bias"),
            (Component::Vae, "decoder.up.3.upsample.conv.weight"),
            (Component::Vae, "encoder.mid.attn_1.q.weight"),
            (Component::Vae, "encoder.quant_conv.bias"),
            (Component::TextEncoder, "blk.12.ffn_down.weight"),
            (Component::TextEncoder, "token_embd.weight"),
        ];
        for (component, name) in cases {
            let tensors = names(component, name);
            assert!(!tensors.is_empty(), "{name}");
            for (model, view) in tensors {
                assert_eq!(
                    to_file(original_names(component), &model),
                    Some((name.to_owned(), view)),
                    "{model}"
                );
            }
        }
    }

    #[test]
    fn fused_rows_reversed_levels_and_swapped_halves_are_recognized() {
        let qkv = names(Component::Transformer, "double_blocks.3.img_attn.qkv.weight");
        assert_eq!(qkv[1], ("transformer_blocks.3.attn.to_k.weight".into(), View::Chunk(1, 3)));
        let norm = names(Component::Transformer, "single_blocks.3.norm.query_norm.weight");
        assert_eq!(norm, [("single_transformer_blocks.3.attn.norm_q.weight".into(), View::Whole)]);
        let last = names(Component::Transformer, "final_layer.adaLN_modulation.1.weight");
        assert_eq!(last, [("norm_out.linear.weight".into(), View::SwappedHalves)]);
        let up = names(Component::Vae, "decoder.up.1.block.0.conv1.weight");
        assert_eq!(up, [("decoder.up_blocks.2.resnets.0.conv1.weight".into(), View::Whole)]);
    }

    #[test]
    fn other_names_are_left_alone() {
        for name in [
            "img_in",
            "img_in.more.weight",
            "double_blocks.01.img_attn.proj.weight",
            "decoder.up.4.upsample.conv.weight",
        ] {
            assert_eq!(to_model(original_names(Component::Transformer), name), None, "{name}");
        }
        assert_eq!(to_model(original_names(Component::Vae), "decoder.up.4.upsample.conv.weight"), None);
    }

    #[test]
    fn views_have_the_shapes_they_slice() {
        let shape = |view: View, dims: &[usize]| view.shape(&dims.into()).map(|s| s.dims().to_vec());
        assert_eq!(shape(View::Chunk(2, 3), &[9, 4]), Some(vec![3, 4]));
        assert_eq!(shape(View::Chunk(2, 3), &[10, 4]), None);
        assert_eq!(shape(View::Squeezed, &[5, 5, 1, 1]), Some(vec![5, 5]));
        assert_eq!(shape(View::Squeezed, &[5, 5, 3, 3]), None);
        assert_eq!(shape(View::SwappedHalves, &[3, 2]), None);
    }
}
