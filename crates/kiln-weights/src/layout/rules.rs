//! Names translated by a table, in both directions.
//!
//! A rule pairs a module's name in a file with its names in the model. In both, `#` stands for a number, `~` for that
//! number counted from the other end of the autoencoder's four levels, and `*` at the end for the rest of the name.

use kiln_tensor::Shape;

/// One line of a table.
#[derive(Debug)]
pub(crate) struct Rule {
    pub theirs: &'static str,
    /// One name; or several, whose rows the file has below each other in this order.
    pub ours: &'static [&'static str],
    pub how: How,
}

/// How the values of a module differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum How {
    Same,
    /// The upper half of the rows is the lower one there.
    Swapped,
    /// A matrix is a convolution of 1×1 there.
    Convolution,
}

/// Which part of a tensor in a file is a tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Whole,
    /// Part `.0` of `.1` equal ones, cut by rows.
    Part(usize, usize),
    /// The two halves of the rows change places.
    Swapped,
    /// Without the two dimensions of 1 at the end.
    Squeezed,
}

impl View {
    /// The shape that the model gets from a tensor of this shape; `None` when it can't be cut so.
    pub fn shape(&self, stored: &Shape) -> Option<Shape> {
        match (self, stored.dims()) {
            (View::Whole, _) => Some(stored.clone()),
            (View::Part(_, count), [rows, rest @ ..]) if rows.is_multiple_of(*count) => {
                Some([&[rows / count], rest].concat().into())
            }
            (View::Swapped, [rows, ..]) if rows.is_multiple_of(2) => Some(stored.clone()),
            (View::Squeezed, [rows, cols, 1, 1]) => Some([*rows, *cols].into()),
            // Some files have the matrix already, and vectors have nothing to squeeze.
            (View::Squeezed, [_] | [_, _]) => Some(stored.clone()),
            _ => None,
        }
    }
}

/// A tensor of the model in a tensor of a file.
#[derive(Debug, PartialEq)]
pub(crate) struct Piece {
    pub name: String,
    pub view: View,
}

/// What the model calls `name`, if a rule knows it.
pub(super) fn translate(rules: &[Rule], name: &str) -> Option<Vec<Piece>> {
    let (module, leaf) = name.rsplit_once('.')?;
    // Norms have a scale in the original naming and a weight in every other.
    let leaf = if leaf == "scale" { "weight" } else { leaf };
    rules.iter().find_map(|rule| {
        let matched = Match::new(rule.theirs, module)?;
        let view = |i| match (rule.how, rule.ours.len()) {
            (How::Swapped, _) => View::Swapped,
            (How::Convolution, _) => View::Squeezed,
            (How::Same, 1) => View::Whole,
            (How::Same, count) => View::Part(i, count),
        };
        let pieces = rule.ours.iter().enumerate();
        Some(
            pieces
                .map(|(i, ours)| Piece { name: format!("{}.{leaf}", matched.fill(ours)), view: view(i) })
                .collect(),
        )
    })
}

/// The tensor of a file in which the model's tensor `name` is written, and which part of it.
pub(super) fn restore(rules: &[Rule], name: &str) -> Option<(String, View)> {
    let (module, leaf) = name.rsplit_once('.')?;
    rules.iter().find_map(|rule| {
        let (i, matched) =
            rule.ours.iter().enumerate().find_map(|(i, ours)| Some((i, Match::new(ours, module)?)))?;
        let norm = rule.theirs.ends_with("_norm") && rule.theirs.contains(".norm.");
        let leaf = if norm && leaf == "weight" { "scale" } else { leaf };
        let view = match (rule.how, rule.ours.len()) {
            (How::Swapped, _) => View::Swapped,
            (How::Convolution, _) => View::Squeezed,
            (How::Same, 1) => View::Whole,
            (How::Same, count) => View::Part(i, count),
        };
        Some((format!("{}.{leaf}", matched.fill(rule.theirs)), view))
    })
}

/// What the signs of a pattern stood for.
struct Match<'n> {
    numbers: Vec<usize>,
    rest: &'n str,
}

/// The last of the autoencoder's levels.
const LAST_LEVEL: usize = 3;

impl<'n> Match<'n> {
    fn new(pattern: &str, name: &'n str) -> Option<Match<'n>> {
        let (mut numbers, mut rest) = (Vec::new(), name);
        let mut signs = pattern.split('.').peekable();
        while let Some(sign) = signs.next() {
            if sign == "*" {
                return Some(Match { numbers, rest });
            }
            let (word, after) = match (rest.split_once('.'), signs.peek()) {
                (Some((word, after)), Some(_)) => (word, after),
                (None, None) => (rest, ""),
                _ => return None,
            };
            match sign {
                "#" => numbers.push(number(word)?),
                "~" => numbers.push(LAST_LEVEL.checked_sub(number(word)?)?),
                _ if sign != word => return None,
                _ => {}
            }
            rest = after;
        }
        Some(Match { numbers, rest: "" })
    }

    fn fill(&self, pattern: &str) -> String {
        let mut numbers = self.numbers.iter();
        let mut number = || numbers.next().copied().unwrap_or(0);
        let words = pattern.split('.').map(|sign| match sign {
            "#" => number().to_string(),
            "~" => LAST_LEVEL.saturating_sub(number()).to_string(),
            "*" => self.rest.to_owned(),
            word => word.to_owned(),
        });
        words.collect::<Vec<_>>().join(".")
    }
}

/// A number as a model would write it, and small: a name must not make up another one's.
fn number(word: &str) -> Option<usize> {
    let plain = word == "0" || !word.starts_with(['0', '+']);
    (plain && word.len() <= 4).then(|| word.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::super::{Component, original};
    use super::*;

    fn names(component: Component, name: &str) -> Vec<(String, View)> {
        let pieces = translate(original(component), name).unwrap_or_default();
        pieces.into_iter().map(|p| (p.name, p.view)).collect()
    }

    #[test]
    fn every_kind_of_rule_goes_there_and_back() {
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
            let pieces = names(component, name);
            assert!(!pieces.is_empty(), "{name}");
            for (ours, view) in pieces {
                assert_eq!(restore(original(component), &ours), Some((name.to_owned(), view)), "{ours}");
            }
        }
    }

    #[test]
    fn fused_rows_reversed_levels_and_swapped_halves_are_seen() {
        let qkv = names(Component::Transformer, "double_blocks.3.img_attn.qkv.weight");
        assert_eq!(qkv[1], ("transformer_blocks.3.attn.to_k.weight".into(), View::Part(1, 3)));
        let norm = names(Component::Transformer, "single_blocks.3.norm.query_norm.weight");
        assert_eq!(norm, [("single_transformer_blocks.3.attn.norm_q.weight".into(), View::Whole)]);
        let last = names(Component::Transformer, "final_layer.adaLN_modulation.1.weight");
        assert_eq!(last, [("norm_out.linear.weight".into(), View::Swapped)]);
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
            assert_eq!(translate(original(Component::Transformer), name), None, "{name}");
        }
        assert_eq!(translate(original(Component::Vae), "decoder.up.4.upsample.conv.weight"), None);
    }

    #[test]
    fn views_have_the_shapes_they_cut() {
        let shape = |view: View, dims: &[usize]| view.shape(&dims.into()).map(|s| s.dims().to_vec());
        assert_eq!(shape(View::Part(2, 3), &[9, 4]), Some(vec![3, 4]));
        assert_eq!(shape(View::Part(2, 3), &[10, 4]), None);
        assert_eq!(shape(View::Squeezed, &[5, 5, 1, 1]), Some(vec![5, 5]));
        assert_eq!(shape(View::Squeezed, &[5, 5, 3, 3]), None);
        assert_eq!(shape(View::Swapped, &[3, 2]), None);
    }
}
