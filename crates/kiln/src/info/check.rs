//! Checks whether the weights of a component fit its configuration, as far as their names and shapes tell: what loading
//! the model would refuse.

use std::collections::{BTreeMap, BTreeSet};

use kiln_model::{text_encoder, transformer, vae};
use kiln_weights::WeightSource;

/// Returns what is wrong with a transformer.
pub(super) fn transformer(config: &transformer::Config, weights: &WeightSource) -> Option<String> {
    let Some(found) = transformer::Config::from_tensors(weights) else { return Some(missing(weights)) };
    let layers = [
        ("double blocks", config.num_layers, found.num_layers),
        ("single blocks", config.num_single_layers, found.num_single_layers),
    ];
    let sizes = [
        ("width", config.dim(), found.dim()),
        ("width of text", config.joint_attention_dim, found.joint_attention_dim),
        ("number of latent channels", config.in_channels, found.in_channels),
    ];
    mismatch(&layers, &sizes)
        .or_else(|| incomplete(weights, "transformer_blocks", config.num_layers))
        .or_else(|| incomplete(weights, "single_transformer_blocks", config.num_single_layers))
}

/// Returns what is wrong with a text encoder.
pub(super) fn text_encoder(config: &text_encoder::Config, weights: &WeightSource) -> Option<String> {
    let Some(found) = text_encoder::Config::from_tensors(weights) else { return Some(missing(weights)) };
    let used = text_encoder::OUTPUT_LAYERS.into_iter().max().unwrap_or(0);
    let layers = [("layers", used, found.num_hidden_layers)];
    let sizes = [
        ("hidden size", config.hidden_size, found.hidden_size),
        ("width of the MLP", config.intermediate_size, found.intermediate_size),
        ("vocabulary", config.vocab_size, found.vocab_size),
    ];
    mismatch(&layers, &sizes).or_else(|| incomplete(weights, "model.layers", used))
}

/// Returns what is wrong with a VAE.
pub(super) fn vae(config: &vae::Config, weights: &WeightSource) -> Option<String> {
    let Some(found) = vae::Config::from_tensors(weights) else { return Some(missing(weights)) };
    let widths = [config.block_out_channels.as_slice(), config.decoder_channels()];
    let stored = [found.block_out_channels.as_slice(), found.decoder_channels()];
    if widths != stored {
        return Some(format!("its tensors have channels {stored:?}, its configuration says {widths:?}"));
    }
    mismatch(&[], &[("number of latent channels", config.latent_channels, found.latent_channels)])
}

fn missing(weights: &WeightSource) -> String {
    format!("tensors that every such component has are missing in `{}`", weights.path().display())
}

/// Compares what the configuration says with what the tensors have: enough layers, and the same sizes.
fn mismatch(layers: &[(&str, usize, usize)], sizes: &[(&str, usize, usize)]) -> Option<String> {
    let few = layers.iter().find(|(_, expected, found)| found < expected);
    let few = few
        .map(|(what, expected, found)| format!("there are tensors of {found} {what}, expected {expected}"));
    let unlike = sizes.iter().find(|(_, expected, found)| expected != found);
    let unlike = unlike.map(|(what, expected, found)| {
        format!("the {what} of its tensors is {found}, its configuration says {expected}")
    });
    few.or(unlike)
}

/// Finds a tensor that one of the first `count` blocks lacks and another has.
fn incomplete(weights: &WeightSource, blocks: &str, count: usize) -> Option<String> {
    let mut found = BTreeMap::<usize, BTreeSet<&str>>::new();
    for name in weights.names() {
        let rest = name.strip_prefix(blocks).and_then(|rest| rest.strip_prefix('.'));
        let Some((number, leaf)) = rest.and_then(|rest| rest.split_once('.')) else { continue };
        // int8 layers have scales, and not every layer need be int8.
        if let Some(number) = number.parse().ok().filter(|n| *n < count)
            && !leaf.ends_with("_scale")
        {
            found.entry(number).or_default().insert(leaf);
        }
    }
    let all: BTreeSet<&str> = found.values().flatten().copied().collect();
    let lacks = |(number, leaves): (&usize, &BTreeSet<&str>)| {
        all.difference(leaves).next().map(|leaf| format!("no tensor `{blocks}.{number}.{leaf}`"))
    };
    found.iter().find_map(lacks)
}
