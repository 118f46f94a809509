//! Comparing tensors and images with the dumps of diffusers.

use kiln_image::RgbImage;
use kiln_ops::Backend;
use kiln_tensor::HostTensor;
use kiln_weights::WeightSource;

use crate::Tolerance;
use crate::case::Case;
use crate::recorder::Recorder;

/// Compares the recorded tensors with the dump's. Returns the number of compared tensors.
pub(crate) fn tensors<B: Backend>(
    recorder: &Recorder<'_, B>,
    dump: &WeightSource,
    tolerance: &Tolerance,
) -> Result<usize, String> {
    let mut compared = 0;
    for name in dump.names() {
        let expected = dump.tensor(name).map_err(|e| e.to_string())?;
        let batch = expected.shape().dims().first().copied().unwrap_or(0);
        for (i, image) in recorder.images.iter().enumerate() {
            let (key, relation) = key(name);
            let Some(ours) = image.get(&key).or_else(|| recorder.shared.get(&key)) else { continue };
            let item = if batch == recorder.images.len() { i } else { 0 };
            let expected = item_of(&expected, item, ours, relation)?;
            let ours = relation.select(ours, expected.len())?;
            check(name, &ours, &expected, tolerance)?;
            compared += 1;
        }
    }
    Ok(compared)
}

/// Compares text embeddings with the set's, and the first prompt's hidden states if the set has them.
pub(crate) fn texts<B: Backend>(
    recorder: &Recorder<'_, B>,
    prompts: &WeightSource,
    case: &Case,
    tolerance: &Tolerance,
) -> Result<usize, String> {
    let (names, mut compared) = (case.prompt_names(), 0);
    for (name, ours) in names.iter().zip(&recorder.texts) {
        let key = format!("{name}.prompt_embeds");
        // The dumps have no embeddings of a rewritten prompt.
        let Ok(expected) = prompts.tensor(&key) else { continue };
        let expected = expected.to_f32().map_err(|e| e.to_string())?.into_owned();
        let ours = ours.to_f32().map_err(|e| e.to_string())?;
        // The encoder is causal and its positions are relative: a shorter sequence is the start of a longer one, including
        // padding, or its end if padding comes first.
        let common = ours.len().min(expected.len());
        let (ours, expected) = if case.is_left_padded() {
            (&ours[ours.len() - common..], &expected[expected.len() - common..])
        } else {
            (&ours[..common], &expected[..common])
        };
        check(&key, ours, expected, tolerance)?;
        compared += 1;
    }
    // The state of the padding on the left comes last.
    let places = [
        ("hidden_states_first32", false),
        ("hidden_states_real_rows", false),
        ("hidden_states_pad_row", true),
    ];
    for (dumped, at_end) in places {
        let states = names.first().and_then(|name| prompts.tensor(&format!("{name}.{dumped}")).ok());
        let Some(states) = states else { continue };
        let per_state = states.numel() / states.shape().dims()[0];
        let states = states.to_f32().map_err(|e| e.to_string())?;
        for (i, expected) in states.chunks_exact(per_state).enumerate() {
            let key = format!("text.state{i}");
            let Some(ours) = recorder.shared.get(&key) else { continue };
            let ours = ours.to_f32().map_err(|e| e.to_string())?;
            let start = if at_end { ours.len() - per_state } else { 0 };
            check(&key, &ours[start..start + per_state], expected, tolerance)?;
            compared += 1;
        }
    }
    Ok(compared)
}

/// How a dumped tensor relates to ours.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Relation {
    /// It is the start of ours.
    Prefix,
    /// It is the end of ours.
    Suffix,
    /// It is channels-first, ours channels-last.
    Transposed,
}

impl Relation {
    /// The `count` values of ours that the dump has.
    fn select(self, ours: &HostTensor, count: usize) -> Result<Vec<f32>, String> {
        let values = ours.to_f32().map_err(|e| e.to_string())?;
        if values.len() < count {
            return Err(format!("{} values, expected at least {count}", values.len()));
        }
        Ok(match self {
            Relation::Suffix => values[values.len() - count..].to_vec(),
            _ => values[..count].to_vec(),
        })
    }
}

/// Our name of a dumped tensor, and how it relates to ours.
fn key(name: &str) -> (String, Relation) {
    if let Some((stem, _)) = name.rsplit_once("_first") {
        return (single_block_key(stem), Relation::Prefix);
    }
    if let Some((stem, count)) = name.rsplit_once("_last")
        && count.bytes().all(|b| b.is_ascii_digit())
    {
        // The last text rows of a joint sequence are not at its end.
        return if stem.contains(".single") {
            (String::new(), Relation::Suffix)
        } else {
            (stem.to_owned(), Relation::Suffix)
        };
    }
    match name {
        "vae.enc.down0_out" => ("vae.enc.down0".to_owned(), Relation::Transposed),
        "final.unpacked" | "final.bn_denormalised" => (String::new(), Relation::Transposed),
        _ if name.ends_with(".normalised_latents") || name == "noise" => {
            (name.to_owned(), Relation::Transposed)
        }
        _ if name.starts_with("vae.") => (name.to_owned(), Relation::Transposed),
        _ if name.starts_with("kv.") => (format!("{name}.0"), Relation::Prefix),
        _ if name.contains(".single") && name.ends_with(".img") => {
            (name.trim_end_matches(".img").to_owned(), Relation::Suffix)
        }
        _ => (name.to_owned(), Relation::Prefix),
    }
}

/// Removes the `.txt` that dumps add to the text rows of a single block's joint output.
fn single_block_key(stem: &str) -> String {
    if stem.contains(".single") { stem.trim_end_matches(".txt").to_owned() } else { stem.to_owned() }
}

/// One image's values of a dumped tensor, in our layout and truncated to ours.
fn item_of(
    expected: &HostTensor,
    item: usize,
    ours: &HostTensor,
    relation: Relation,
) -> Result<Vec<f32>, String> {
    let item = expected.rows(item..item + 1).map_err(|e| e.to_string())?;
    let mut values = item.to_f32().map_err(|e| e.to_string())?.into_owned();
    if relation == Relation::Transposed {
        let dims = item.shape().dims();
        let (channels, pixels) = (dims[1], dims[2] * dims[3]);
        let channels_last = |i: usize| values[(i % channels) * pixels + i / channels];
        values = (0..values.len()).map(channels_last).collect();
    }
    // We keep the transformer's output only for the image tokens, which come first.
    if relation == Relation::Prefix {
        values.truncate(ours.numel());
    }
    Ok(values)
}

fn check(name: &str, ours: &[f32], expected: &[f32], tolerance: &Tolerance) -> Result<(), String> {
    if ours.iter().any(|v| !v.is_finite()) {
        return Err(format!("{name}: not finite"));
    }
    let pairs = || ours.iter().zip(expected).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let distance = pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    let length = pairs().map(|(_, b)| b * b).sum::<f64>().sqrt();
    let relative = distance / length.max(f64::MIN_POSITIVE);
    if relative > tolerance.relative {
        return Err(format!(
            "{name}: relative L2 {relative:.2e}, at most {:.0e} allowed",
            tolerance.relative
        ));
    }
    let largest = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    if name.contains("latents") && largest > tolerance.absolute {
        return Err(format!("{name}: off by {largest:.2e}, at most {:.0e} allowed", tolerance.absolute));
    }
    Ok(())
}

/// Compares the 8-bit values of two images.
pub(crate) fn image(
    ours: &RgbImage,
    expected: &Result<RgbImage, String>,
    tolerance: &Tolerance,
) -> Result<(), String> {
    let expected = expected.as_ref()?;
    if (ours.width(), ours.height()) != (expected.width(), expected.height()) {
        return Err(format!("image of {}×{}", ours.width(), ours.height()));
    }
    let pairs = ours.pixels().iter().zip(expected.pixels());
    let largest = pairs.map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0);
    if largest > tolerance.levels {
        return Err(format!("image off by {largest} levels, at most {} allowed", tolerance.levels));
    }
    Ok(())
}
