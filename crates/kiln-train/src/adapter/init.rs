//! The first values of adapters, as PEFT draws them, and seeds derived from seeds.
//!
//! PEFT's `kaiming_uniform_(a = √5)` is uniform between ±1/√columns. LoRA: A uniform, B zero. LoKr: the first factor zero, the
//! second uniform. So a fresh adapter changes nothing.

use kiln_tensor::HostTensor;
use kiln_tensor::rng::TorchCpu;

use super::set::Lokr;
use super::targets::TargetLayer;
use crate::{AdapterKind, Result};

/// Name and shape of each parameter, and whether it is uniform (or zero).
pub(super) fn parameters(
    target: &TargetLayer,
    kind: AdapterKind,
    lokr: Option<&Lokr>,
) -> Vec<(&'static str, Vec<usize>, bool)> {
    let (rows, cols, rank) = (target.layer.rows, target.layer.cols, target.rank);
    if let Some(Lokr { outer: [l, m], inner: [k, n], low_rank }) = lokr {
        let mut list = vec![("lokr_w1", vec![*l, *m], false)];
        if *low_rank {
            list.extend([("lokr_w2_a", vec![*k, rank], true), ("lokr_w2_b", vec![rank, *n], true)]);
        } else {
            list.push(("lokr_w2", vec![*k, *n], true));
        }
        return list;
    }
    let mut list =
        vec![("lora_A.weight", vec![rank, cols], true), ("lora_B.weight", vec![rows, rank], false)];
    if kind == AdapterKind::Dora {
        list.push(("lora_magnitude_vector", vec![rows], false));
    }
    list
}

/// Uniform values between ±1/√columns, or zeros.
pub(super) fn uniform(seed: u64, name: &str, shape: Vec<usize>, uniform: bool) -> Result<HostTensor> {
    if !uniform {
        return Ok(HostTensor::zeros(shape));
    }
    let bound = 1.0 / (shape[shape.len() - 1] as f64).sqrt();
    let mut random = TorchCpu::new(derive(&[seed, hash(name)]));
    let count = shape.iter().product();
    let values = (0..count).map(|_| ((2.0 * random.uniform_f64() - 1.0) * bound) as f32).collect();
    Ok(HostTensor::from_f32(shape, values)?)
}

/// FNV-1a.
pub(super) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// A seed from several numbers, each mixed in by SplitMix64's output function.
pub(crate) fn derive(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |state: u64, part| {
        let z = (state ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    })
}

/// The seed of a layer's dropout.
pub(super) fn layer_seed(seed: u64, layer: &str) -> u64 {
    derive(&[seed, hash(layer)])
}
