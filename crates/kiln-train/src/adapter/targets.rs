//! Which layers get an adapter, and of which rank.

use kiln_nn::transformer::Config;
use kiln_weights::LayerShape;

use crate::{AdapterSettings, Error, LayerGroup, Result, TargetPreset, Targets};

/// Single blocks of the preset `identity`.
const IDENTITY_BLOCKS: usize = 13;

/// A layer that gets an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetLayer {
    /// The layer, under diffusers' name.
    pub layer: LayerShape,
    /// The adapter's rank.
    pub rank: usize,
}

/// The group and block number of a layer in a block; `None` for other layers.
fn group(name: &str) -> Option<(LayerGroup, usize)> {
    let number = |rest: &str| rest.split('.').next()?.parse().ok();
    if let Some(rest) = name.strip_prefix("transformer_blocks.") {
        let group = if name.contains(".attn.") { LayerGroup::DoubleAttention } else { LayerGroup::DoubleMlp };
        return Some((group, number(rest)?));
    }
    let rest = name.strip_prefix("single_transformer_blocks.")?;
    let group = if name.ends_with(".to_out") { LayerGroup::SingleOut } else { LayerGroup::SingleIn };
    Some((group, number(rest)?))
}

fn is_double(group: LayerGroup) -> bool {
    matches!(group, LayerGroup::DoubleAttention | LayerGroup::DoubleMlp)
}

/// Lists the layers that these settings adapt, in the transformer's order.
pub fn target_layers(config: &Config, settings: &AdapterSettings) -> Result<Vec<TargetLayer>> {
    let invalid = |what: String| Err(Error::Settings(what));
    if settings.rank == 0 || settings.ranks.iter().any(|(_, rank)| *rank == 0) {
        return invalid("the rank is 0, expected at least 1".into());
    }
    if !(0.0..1.0).contains(&settings.dropout) {
        return invalid(format!("the dropout is {}, expected at least 0 and below 1", settings.dropout));
    }
    if settings.alpha.is_some_and(|alpha| !(alpha.is_finite() && alpha > 0.0)) {
        return invalid("alpha must be a number above 0".into());
    }
    let layers = config.linear_layers();
    if let Targets::Patterns(patterns) = &settings.targets {
        for pattern in patterns {
            let matching = || layers.iter().filter(|layer| matches(pattern, &layer.name));
            if matching().next().is_none() {
                return invalid(format!("the pattern `{pattern}` matches no layer of the transformer"));
            }
            if !matching().any(|layer| group(&layer.name).is_some()) {
                return invalid(format!(
                    "the pattern `{pattern}` matches only layers outside of the blocks, which are not trained"
                ));
            }
        }
    }
    let chosen = |layer: &LayerShape, (group, block): (LayerGroup, usize)| match &settings.targets {
        Targets::Preset(TargetPreset::Full) => true,
        Targets::Preset(TargetPreset::Style) => is_double(group),
        Targets::Preset(TargetPreset::Identity) => !is_double(group) && block < IDENTITY_BLOCKS,
        Targets::Patterns(patterns) => patterns.iter().any(|pattern| matches(pattern, &layer.name)),
    };
    let target = |layer: LayerShape| {
        let (group, block) = group(&layer.name)?;
        let own = settings.ranks.iter().rev().find(|(of, _)| *of == group);
        let rank = own.map_or(settings.rank, |(_, rank)| *rank);
        chosen(&layer, (group, block)).then_some(TargetLayer { layer, rank })
    };
    let targets: Vec<TargetLayer> = layers.clone().into_iter().filter_map(target).collect();
    if targets.is_empty() {
        return invalid("no layer of the transformer is chosen for training".into());
    }
    Ok(targets)
}

/// Whether a pattern matches a layer's name: `*` stands for any text; without one, the name may have more parts before it.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return name == pattern || name.strip_suffix(pattern).is_some_and(|rest| rest.ends_with('.'));
    };
    let Some(mut tail) = name.strip_prefix(first) else { return false };
    let mut middle: Vec<&str> = rest.split('*').collect();
    let last = middle.pop().unwrap_or_default();
    for part in middle {
        let Some(at) = tail.find(part) else { return false };
        tail = &tail[at + part.len()..];
    }
    tail.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        serde_json::from_str(
            r#"{"in_channels": 4, "num_layers": 2, "num_single_layers": 15, "attention_head_dim": 8,
                "num_attention_heads": 2, "joint_attention_dim": 12, "axes_dims_rope": [2, 2, 2, 2]}"#,
        )
        .unwrap()
    }

    fn names(targets: Targets) -> Vec<String> {
        let settings = AdapterSettings { targets, ..AdapterSettings::default() };
        target_layers(&config(), &settings).unwrap().into_iter().map(|t| t.layer.name).collect()
    }

    #[test]
    fn presets_choose_their_blocks() {
        let preset = |preset| names(Targets::Preset(preset));
        assert_eq!(preset(TargetPreset::Full).len(), 2 * 12 + 15 * 2);
        assert_eq!(preset(TargetPreset::Style).len(), 2 * 12);
        let identity = preset(TargetPreset::Identity);
        assert_eq!(identity.len(), 13 * 2);
        assert_eq!(identity[25], "single_transformer_blocks.12.attn.to_out");
    }

    #[test]
    fn patterns_match_ends_or_whole_names() {
        let patterns = |list: &[&str]| names(Targets::Patterns(list.iter().map(|p| (*p).into()).collect()));
        assert_eq!(patterns(&["to_q"]), ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q"]);
        assert_eq!(patterns(&["single_transformer_blocks.1*.to_out"]).len(), 6);
        assert_eq!(patterns(&["*.1.ff*.linear_in"]).len(), 2);
        for (pattern, error) in [("to_x", "matches no layer"), ("x_embedder", "outside of the blocks")] {
            let targets = Targets::Patterns(vec![pattern.into()]);
            let settings = AdapterSettings { targets, ..AdapterSettings::default() };
            let found = target_layers(&config(), &settings).unwrap_err().to_string();
            assert!(found.contains(error), "{found}");
        }
    }

    #[test]
    fn groups_have_their_own_ranks() {
        let ranks = vec![(LayerGroup::DoubleAttention, 128), (LayerGroup::SingleOut, 32)];
        let settings = AdapterSettings { rank: 64, ranks, ..AdapterSettings::default() };
        let targets = target_layers(&config(), &settings).unwrap();
        let rank = |name: &str| targets.iter().find(|t| t.layer.name == name).unwrap().rank;
        assert_eq!(rank("transformer_blocks.1.attn.to_add_out"), 128);
        assert_eq!(rank("transformer_blocks.1.ff_context.linear_out"), 64);
        assert_eq!(rank("single_transformer_blocks.3.attn.to_qkv_mlp_proj"), 64);
        assert_eq!(rank("single_transformer_blocks.3.attn.to_out"), 32);
    }
}
